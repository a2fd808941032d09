"""`python -m memascend` is the `memascend` command."""

from memascend.command.main import run

run()
