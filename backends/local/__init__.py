"""The local backend: this machine, by the same worker and the same run directory as in a cloud."""
