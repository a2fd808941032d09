"""The resources of this machine, and their free parts: drives, GPU rates, pinned memory, limits."""
