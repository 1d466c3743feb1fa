"""The change log: which rows changed, in order, each change with a sequence number."""
