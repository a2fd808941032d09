"""Gradients of an offloaded model: captured, reduced over ranks, applied in the backward pass."""
