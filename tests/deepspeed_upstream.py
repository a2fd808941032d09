"""Run DeepSpeed's own tests of its NVMe offload with DeepSpeed as it is, and with memascend behind it.

    python tests/deepspeed_upstream.py PATH_TO_TESTS [--only SUBSTRING] [--timeout SECONDS]

PATH_TO_TESTS is the folder `tests` of a checkout of DeepSpeed, near the version that is installed; nothing is fetched.
The interpreter needs deepspeed, pytest, transformers and memascend; DeepSpeed as it is also needs a C++ compiler and
ninja, with which it compiles its operators on first use (minutes), and libaio. Where programs with another PyTorch run
DeepSpeed meanwhile, give this one a TORCH_EXTENSIONS_DIR of its own: they would compile the same files again and again.
The tests run on the CPU unless DS_ACCELERATOR says otherwise.

Every test that passes with DeepSpeed as it is has to pass with memascend. The exit status is 1 if one is lost, or if
nothing was compared.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

#: The files, and pytest's selection where only a part concerns offloading.
FILES: dict[str, tuple[str, ...]] = {
    "unit/v1/nvme": (),
    "unit/v1/pin_memory": (),
    "unit/runtime/zero/test_nvme_checkpointing.py": (),
    # The others are of the same API without offloading to a drive, and take half an hour.
    "unit/runtime/zero/test_zero_tensor_fragment.py": ("-k", "nvme"),
    # The rest of the file is of backward passes without offloading.
    "unit/v1/zero/test_zero_user_backward.py": ("-k", "offload"),
    # Excluded tests expect a tensor on a GPU to be refused; without a GPU they do not end.
    "unit/ops/adam/test_cpu_adam.py": ("-k", "not gpu_error"),
    "unit/runtime/half_precision/test_zero_optim_overflow.py": (),
    "unit/v1/half_precision/test_bf16.py": (),
}

#: In `unit/common.py` a result is gathered from all ranks, on a device that is given by its number and in a tensor
#: without dimensions; neither works without CUDA.
GATHERING = {
    "    device = get_accelerator().current_device()\n": "    device = get_accelerator().current_device_name()\n",
    "torch.tensor(1 if flag else 0,": "torch.tensor([1 if flag else 0],",
}

#: Added to the copy of `unit/common.py`, which every worker imports. DeepSpeed finds that a processor without
#: instructions for float16 cannot compute with it, and skips tests of fp16; PyTorch computes with it on all.
FLOAT16 = """
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
CPU_Accelerator.is_fp16_supported = lambda self: True
"""

#: The output of pytest then.
HANGED = b"Test hanged, exiting"

#: Prints which parts of memascend are in force when deepspeed has been imported.
PARTS = """\
import sys, deepspeed
hooked = sys.modules.get("memascend.integrations.deepspeed")
print(", ".join(hooked.installed()) if hooked else "none")
"""


def environment(hook: str | None) -> dict[str, str]:
    """Return the variables of a run, with the hook's folder in front of the others if it is given."""
    variables = {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2", **os.environ}
    if hook is not None:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (hook, variables.get("PYTHONPATH"))))
    return variables


def python(*arguments: str, hook: str | None = None) -> str:
    """Return the output of Python."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment(hook), stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def run(tests: Path, name: str, hook: str | None, timeout: float, log: Path) -> dict[str, str] | None:
    """Run the tests of a file; the result of each, or None if they did not come to an end."""
    report = log.with_suffix(".xml")
    options = ["-m", "", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *options, name, *FILES[name]]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=tests, env=environment(hook), stdout=output, stderr=output, start_new_session=True
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            # With the workers that it has started.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    # DeepSpeed ends pytest where a test hangs, and has a report in which that test seems to have passed.
    if not report.exists() or HANGED in log.read_bytes():
        return None
    results = {}
    for case in ET.parse(report).iter("testcase"):
        outcomes = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        results[f"{case.get('classname')}::{case.get('name')}"] = outcomes[0] if outcomes else "passed"
    return results


def patch(common: Path) -> None:
    """Have DeepSpeed's helpers of its tests work on a CPU."""
    text = common.read_text()
    for before, after in GATHERING.items():
        text = text.replace(before, after)
    common.write_text(text + FLOAT16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path, metavar="PATH_TO_TESTS")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="files whose path contains it")
    parser.add_argument("--timeout", type=float, default=1800, metavar="SECONDS", help="for each run of a file (1800)")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep what pytest prints and reports")
    args = parser.parse_args()
    names = [name for name in FILES if args.only in name and (args.tests / name).exists()]
    if not names:
        parser.error(f"{args.tests} has none of: {', '.join(name for name in FILES if args.only in name)}")
    hook = python("-m", "memascend.deepspeed", "--hook")
    print("parts of memascend in force:", python("-c", PARTS, hook=hook).splitlines()[-1], flush=True)

    lost_tests: list[str] = []
    compared = 0
    print(f"{'stock':>6}{'ours':>6}{'lost':>6}{'gained':>8}{'skipped':>9}  seconds", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        # Alone in a folder: the tests' own conftest would take operators from beside them in a checkout.
        tests = Path(folder) / "tests"
        shutil.copytree(args.tests, tests)
        patch(tests / "unit" / "common.py")
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        for name in names:
            results, seconds = [], []
            for kind, where in (("stock", None), ("memascend", hook)):
                started = time.monotonic()
                log = (logs / f"{name.replace('/', '.')}-{kind}.log").resolve()
                log.with_suffix(".xml").unlink(missing_ok=True)
                results.append(run(tests, name, where, args.timeout, log))
                seconds.append(f"{time.monotonic() - started:.0f}")
            stock, ours = (result or {} for result in results)
            passed, passed_ours = ({test for test in result if result[test] == "passed"} for result in (stock, ours))
            lost, gained = sorted(passed - passed_ours), len(passed_ours - passed)
            skipped = sum(result == "skipped" for result in stock.values())
            counts = f"{len(passed):6}{len(passed_ours):6}{len(lost):6}{gained:8}{skipped:9}"
            unended = [kind for kind, result in zip(("stock", "ours"), results, strict=True) if result is None]
            note = f"  ({' and '.join(unended)} did not come to an end)" if unended else ""
            print(f"{counts}  {' / '.join(seconds):9}  {name}{note}", flush=True)
            lost_tests += [f"{test}: {ours.get(test, 'no result')}" for test in lost]
            lost_tests += [f"{name}: {kind} did not come to an end" for kind in unended]
            compared += len(passed)
    for test in lost_tests:
        print("lost:", test)
    print(f"{compared} tests compared, {len(lost_tests)} lost")
    return 1 if lost_tests or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
