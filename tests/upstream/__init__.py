"""Other libraries' own tests, run with our classes in the place of theirs: `python tests/upstream --help`."""
