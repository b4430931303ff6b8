"""Byte ranges of files in any store: local disks and mounts, object stores, a cache in between. No shards here."""
