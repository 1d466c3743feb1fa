"""Checkpoints: everything a run continues from, complete and durable or not there at all."""
