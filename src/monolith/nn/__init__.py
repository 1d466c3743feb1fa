"""Embedding modules with autograd over a table."""

from monolith.nn.embedding import Embedding, EmbeddingBag

__all__ = ["Embedding", "EmbeddingBag"]
