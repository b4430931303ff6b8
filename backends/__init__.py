"""The pluggable surface of launching, run records, supervision, and the built-in backend."""
