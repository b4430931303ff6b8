"""An example of a backend for isthmus in a package of its own."""
