"""`python -m memascend` is the `memascend` command."""

from memascend.cli import run

run()
