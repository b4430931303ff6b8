"""Node checks and the all-reduce bench before a run starts. Empty in this version."""
