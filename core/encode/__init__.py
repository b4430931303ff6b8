"""Images and captions -> latents and text embeddings in a latent dataset."""
