"""Plans of host and device memory, and estimates of what PyTorch takes beside them."""
