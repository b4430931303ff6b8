"""Images from trained weights: sampling, labelled grids, loading a run, export to diffusers."""
