"""The collisionless embedding table: the Python face of the core."""
