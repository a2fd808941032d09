"""`python -m memascend` is the `memascend` command."""

import sys

from memascend.cli import main

sys.exit(main())
