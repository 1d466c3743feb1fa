"""Embedding shards: the rows of an export in several processes, and the read-only store over them."""
