"""Tables from and to the dumps that the original writes beside its checkpoints."""
