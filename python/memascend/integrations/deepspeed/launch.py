"""`python -m memascend.deepspeed SCRIPT ...`: a script with memascend behind DeepSpeed, unchanged."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HOOK = Path(__file__).parent / "hook"

USAGE = """\
usage: python -m memascend.deepspeed SCRIPT [ARGUMENTS...]
       python -m memascend.deepspeed -m MODULE [ARGUMENTS...]
       python -m memascend.deepspeed --hook

Runs SCRIPT or MODULE with memascend behind DeepSpeed. Launchers start it as a module:
  torchrun --nproc_per_node 2 -m memascend.deepspeed SCRIPT ...
  accelerate launch -m memascend.deepspeed SCRIPT ...
  deepspeed --module memascend.deepspeed SCRIPT ...
--hook prints a folder. With it on PYTHONPATH every Python program that imports deepspeed gets memascend:
  PYTHONPATH=$(python -m memascend.deepspeed --hook) deepspeed train.py ...
"""


def main(arguments: list[str]) -> int:
    """Run a script or module, or print help or version; return the exit status."""
    # DeepSpeed's launcher puts the rank first, for the script.
    ranks = []
    while arguments and arguments[0].startswith("--local_rank"):
        ranks.append(arguments.pop(0))
    if arguments[:1] == ["--hook"]:
        print(HOOK)
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    is_module = arguments[0] == "-m"
    if is_module:
        del arguments[0]
    if not arguments or arguments[0].startswith("-"):
        print(USAGE, end="", file=sys.stderr)
        return 2
    target, rest = arguments[0], arguments[1:]
    if not is_module and not Path(target).exists():
        print(f"memascend.deepspeed: there is no script {target}", file=sys.stderr)
        return 2

    import memascend.integrations.deepspeed  # noqa: F401

    sys.argv = [target, *ranks, *rest]
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(target).resolve().parent)
        runpy.run_path(target, run_name="__main__")
    return 0
