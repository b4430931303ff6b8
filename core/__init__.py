"""All that runs inside the training container. Knows no cloud."""
