"""Streams: partitioned, append-only logs of records, in a folder or on a broker."""
