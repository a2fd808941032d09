"""Embeddings and heads that are never whole: lookups by rows, logits, losses and gradients by blocks of rows."""
