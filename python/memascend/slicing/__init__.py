"""Layers on slices of a batch, and parts of layers on tiles of tokens."""
