"""Losses of recommendation models, as functions. Predictions come first, labels second, as in `torch.nn.functional`."""
