"""What this machine has and leaves: drives, GPU rates, pinned memory, limits."""
