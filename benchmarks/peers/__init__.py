"""What `benchmarks/stream.py` compares: the same rows in every format, and a reader of each, alone in its process."""
