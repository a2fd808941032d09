"""Model directories and checkpoints read and written as streams."""
