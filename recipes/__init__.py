"""The YAML recipes that ship with the package."""
