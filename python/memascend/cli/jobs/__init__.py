"""The work of each subcommand of `memascend`: a module imports no more than its commands need."""
