"""Bytes and shards: file systems, the latent-shard format, streaming, run directories. Knows no model and no cloud job."""
