"""A run over processes: its configuration, and what a worker and a parameter server do in it."""
