"""The ranks of a group of torch.distributed, and their collectives."""
