"""Embedding modules with autograd over tables, and what a training loop does with their gradients."""

from monolith.nn.clip import clip_grad_norm_
from monolith.nn.embedding import Embedding, EmbeddingBag
from monolith.nn.embedding_collection import EmbeddingCollection, embedding_collections

__all__ = ["Embedding", "EmbeddingBag", "EmbeddingCollection", "clip_grad_norm_", "embedding_collections"]
