"""`isthmus rehearse`: a recipe, made small, through the very code of a launch on an emulated cloud, struck and brought back."""
