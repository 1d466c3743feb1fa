"""Frames between processes over sockets or Arrow Flight, with deadlines, retries and typed errors."""
