"""Data on its way to the model: sources of batches, transforms, synthetic data, prefetching."""
