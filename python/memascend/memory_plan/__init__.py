"""Plans of host and device memory, and estimates of PyTorch's memory beside them."""
