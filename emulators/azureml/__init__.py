"""An Azure ML that really runs command jobs."""
