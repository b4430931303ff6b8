"""Isthmus: one recipe, two clouds. Trains latent text-to-image models and moves the training between clouds."""

__version__ = "0.1.0"
__all__ = ["__version__"]
