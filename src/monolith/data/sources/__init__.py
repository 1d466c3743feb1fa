"""Sources of batches: record files, tables, Python iterables."""
