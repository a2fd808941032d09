#!/usr/bin/env python
"""Run other libraries' own tests with our classes in the place of theirs.

    python tests/upstream.py accelerate CHECKOUT tests/test_accelerator.py tests/test_optimizer.py
    python tests/upstream.py transformers CHECKOUT tests/trainer/test_trainer.py --json out.json

CHECKOUT is a checkout of the library's repository, near the version that is installed; nothing is fetched. Every test
is run twice, as it is and with our class in the place of theirs (`SUBSTITUTES`), and counted as

- passed: with ours, too;
- not applicable: fails or is skipped as it is (no network, no GPU, another version), or is named in `NOT_OURS`;
- failed: passes as it is, and not with ours. The exit status is 1 if there is one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

#: Of each library: (module, name) of its class, and of ours.
SUBSTITUTES = {
    "accelerate": [(("accelerate", "Accelerator"), ("memascend.integrations.accelerate", "Accelerator"))],
    "transformers": [(("transformers", "Trainer"), ("memascend.integrations.transformers", "Trainer"))],
    "trl": [
        (("trl", name), ("memascend.integrations.trl", name)) for name in ("SFTTrainer", "DPOTrainer", "RewardTrainer")
    ],
}
#: Tests of what is refused on purpose: a part of their name, and why.
_PROCESSES = "several processes are refused"
NOT_OURS: dict[str, dict[str, str]] = {
    "accelerate": {"_multiprocess": _PROCESSES, "SchedulerTester::test_accumulation": _PROCESSES},
    "transformers": {},
    "trl": {},
}
_VARIABLE = "MEMASCEND_UPSTREAM"


def pytest_configure() -> None:
    """Substitute, before test modules are imported: this file is a plugin of the runs that it starts."""
    for (module, name), (our_module, our_name) in SUBSTITUTES.get(os.environ.get(_VARIABLE, ""), ()):
        ours = getattr(importlib.import_module(our_module), our_name)
        theirs = getattr(importlib.import_module(module), name)
        for loaded in list(sys.modules.values()):
            named = getattr(loaded, "__name__", "")
            # Not where theirs is defined, nor in our modules, which derive from it.
            defines = named.startswith("memascend") or named == theirs.__module__
            if not defines and getattr(loaded, "__dict__", {}).get(name) is theirs:
                setattr(loaded, name, ours)


def outcomes(library: str, checkout: Path, arguments: list[str], substitute: bool) -> dict[str, tuple[str, str]]:
    """Run the tests, and return for each "passed", "skipped" or "failed" and the message."""
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        environment = os.environ | {_VARIABLE: library if substitute else "", "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(here), environment.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "pytest", "-q", "-p", "upstream", f"--junitxml={report}", *arguments]
        done = subprocess.run(command, cwd=checkout, env=environment, stdin=subprocess.DEVNULL, text=True)
        if not report.is_file():
            sys.exit(f"pytest ended with {done.returncode} and wrote no report")
        found = {}
        for case in ElementTree.parse(report).iter("testcase"):
            named = f"{case.get('classname')}::{case.get('name')}"
            worst = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
            outcome = "passed" if worst is None else "skipped" if worst.tag == "skipped" else "failed"
            found[named] = (outcome, "" if worst is None else (worst.get("message") or "").splitlines()[0][:200])
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=SUBSTITUTES)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--json", type=Path, help="write the list here")
    args, rest = parser.parse_known_args()
    plain = outcomes(args.library, args.checkout, rest, substitute=False)
    ours = outcomes(args.library, args.checkout, rest, substitute=True)
    result: dict[str, dict[str, str]] = {"passed": {}, "not applicable": {}, "failed": {}}
    for named in sorted(plain.keys() | ours.keys()):
        (before, why), (after, message) = plain.get(named, ("failed", "absent")), ours.get(named, ("failed", "absent"))
        reason = next((text for part, text in NOT_OURS[args.library].items() if part in named), None)
        if after == "passed":
            result["passed"][named] = ""
        elif before != "passed":
            result["not applicable"][named] = f"{before} as it is: {why}"
        elif reason is not None:
            result["not applicable"][named] = reason
        else:
            result["failed"][named] = message
    for group, tests in result.items():
        print(f"{group}: {len(tests)}")
    for named, message in result["failed"].items():
        print(f"  {named}: {message}")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
