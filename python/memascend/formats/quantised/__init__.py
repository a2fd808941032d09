"""Quantised weights as they are published: which form a directory has, and its values in floating point."""
