"""What each subcommand of `memascend` does: a module imports no more than its commands need."""
