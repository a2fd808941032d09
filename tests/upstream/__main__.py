"""Run other libraries' own tests with our classes in the place of theirs, or with offloaded models.

    python tests/upstream --transformers CHECKOUT --trl CHECKOUT --peft CHECKOUT --accelerate CHECKOUT --json out.json

A checkout is one of the library's repository, near the version that is installed; nothing is fetched. Files that the
tests take from the hub are made here (`proxies.py`; TRL's data sets by TRL's scripts, so PEFT's and TRL's tests need
--trl). Every test of `suites.py` is run with ours, failures are run again as they are, and counted as

- passed: with ours, too;
- not applicable: fails or is skipped as it is (needs the hub, a GPU, another package, another version), or is named in
  `Suite.not_ours`;
- refused: ends with an error of ours on purpose (`Suite.refused`);
- failed: passes as it is, and not with ours. The exit status is 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from upstream import stand_ins
from upstream.outcomes import Outcome, run
from upstream.suites import SUITES, Suite

#: A test that is not found again as it is: nothing says that theirs fails.
ABSENT = Outcome("passed")


def classify(suite: Suite, name: str, plain: Outcome, ours: Outcome) -> tuple[str, str]:
    """Return the group that a test belongs to, and why."""
    if ours.result == "passed":
        return "passed", ""
    if plain.result != "passed":
        return "not applicable", f"{plain.result} as it is: {first_line(plain.message)}"
    for part, reason in suite.not_ours.items():
        if part in name:
            return "not applicable", reason
    for part, reason in suite.refused.items():
        if part in ours.message:
            return "refused", reason
    return "failed", first_line(ours.message)


def first_line(message: str) -> str:
    return next(iter(message.strip().splitlines()), "")[:200]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for library in SUITES:
        parser.add_argument(f"--{library}", type=Path, metavar="CHECKOUT")
    parser.add_argument("--workers", type=int, default=1, help="processes, with pytest-xdist")
    parser.add_argument("--json", type=Path, help="write the list of tests here")
    args = parser.parse_args()
    lists: dict[str, dict[str, dict[str, str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        hub = Path(folder)
        texts = [] if args.trl is None else stand_ins.make_datasets(hub / "datasets", args.trl)
        stand_ins.make_hub(hub / "hub", texts)
        for library, suite in SUITES.items():
            checkout = getattr(args, library)
            if checkout is not None:
                ours = run(library, suite, checkout.resolve(), hub, args.workers)
                others = [name for name, outcome in ours.items() if outcome.result != "passed"]
                plain = run(library, suite, checkout.resolve(), hub, args.workers, only=others) if others else {}
                groups = lists.setdefault(library, {})
                for name, outcome in sorted(ours.items()):
                    group, reason = classify(suite, name, plain.get(name, ABSENT), outcome)
                    groups.setdefault(group, {})[name] = reason
    for library, groups in lists.items():
        print(f"\n{library} {version(library)}: ", end="")
        print(", ".join(f"{len(tests)} {group}" for group, tests in sorted(groups.items())))
        for group, tests in groups.items():
            for reason, count in Counter(tests.values()).most_common() if group != "failed" else ():
                if reason:
                    print(f"  {group}, {count}: {reason}")
        for name, message in groups.get("failed", {}).items():
            print(f"  failed: {name}: {message}")
    if args.json is not None:
        args.json.write_text(json.dumps(lists, indent=1) + "\n")
    return 1 if any("failed" in groups for groups in lists.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
