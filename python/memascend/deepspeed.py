"""Short name of `memascend.integrations.deepspeed`: importing it puts memascend behind DeepSpeed.

`python -m memascend.deepspeed SCRIPT ARGUMENTS...` runs a script that way without a change to it.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from memascend.integrations.deepspeed.launch import main

    sys.exit(main(sys.argv[1:]))

from memascend.integrations.deepspeed import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
