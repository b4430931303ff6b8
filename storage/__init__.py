"""Bytes and shards; knows no model and no cloud job."""
