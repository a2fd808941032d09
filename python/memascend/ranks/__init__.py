"""The ranks of a group of torch.distributed, and what they do together."""
