"""`python -m memascend` is the `memascend` command."""

from memascend.cli.main import run

run()
