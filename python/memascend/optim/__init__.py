"""Optimizers whose states may live on SSD."""

from memascend.optim.adamw import AdamW

__all__ = ["AdamW"]
