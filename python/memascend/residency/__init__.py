"""Which units are in memory, which are on their way, and which give up their buffer."""
