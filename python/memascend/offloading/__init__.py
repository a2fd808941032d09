"""Offloading a model: its session, its hooks and the gradients and activations that they put aside."""
