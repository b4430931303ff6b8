"""Copies of whole places between this machine, S3 and Azure Blob: planned, resumable after a kill, verified."""
