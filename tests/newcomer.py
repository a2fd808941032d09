"""Types the shell commands of README.md and of the pages, as a newcomer would: `make newcomer`.

Each page has a directory of its own with a small model, chats and the results of other pages' commands
(`newcomer_room.py`), under the names that the pages have. Commands are typed as they are written, but for the
replacements of `SUBSTITUTED`; the commands of `LEFT_OUT` need something that a fresh environment lacks.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Patterns of commands that are not typed here, and why.
LEFT_OUT = {
    r"^make ": "builds and tests the project itself: continuous integration does",
    r"^pip install": "the environment is made with the wheel and its extras; nothing is on the package index yet",
    r"^git clone ": "needs a network: this is the clone",
    r"^docker ": "needs Docker and a network",
    r"^ollama ": "needs Ollama",
    r"^(sbatch|srun)|scontrol|^code=|^exit |SLURM": "needs Slurm",
    r"^deepspeed |memascend\.deepspeed": "needs DeepSpeed: `make deepspeed` runs it",
    r"torchrun --nnodes": "needs two machines",
    r"--device cuda|--gpu": "needs a GPU",
    r"/dev/nvme": "needs root and a drive whose contents may be lost",
    r"fp8_model|path/to/gpt-oss": "needs a quantised model: tests/cli/test_dequantize.py makes one",
    r"path/to/mixture": "needs a mixture of experts: tests/cli/test_experts_option.py makes one",
    r"--resume --change": "goes on with a run that was interrupted: tests/cli/test_changes.py does",
}
#: Replacements for the sizes of a large run: (pattern, replacement), and why.
SUBSTITUTED = (
    (r"--steps \d+", "--steps 3", "a thousand steps take an hour"),
    (r"^memascend bench", "memascend bench --size 64MiB --seconds 0.2", "a drive is measured for ten seconds"),
    (r"^memascend doctor$", "memascend doctor --no-measure", "likewise"),
    (
        r"(^memascend finetune (?!.*--lora-rank)|-m memascend finetune )",
        r"\1--keep-store ",
        "later commands look at it",
    ),
)
SECONDS = 300


def pages() -> list[Path]:
    """Return README.md and the pages with commands."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(page: Path) -> list[str]:
    """Return the commands of a page's blocks, each on one line."""
    found = []
    for block in re.findall(r"^ *```sh\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            command = " ".join(re.sub(r"(^|\s)#.*", "", line).split())
            found += [command] if command else []
    return found


def left_out(command: str) -> str | None:
    """Return why a command is not typed, or None."""
    return next((reason for pattern, reason in LEFT_OUT.items() if re.search(pattern, command)), None)


def typed(command: str, room: Path) -> str:
    """Return a command with the places and sizes that it has in `room`."""
    for pattern, replacement, _ in SUBSTITUTED:
        command = re.sub(pattern, replacement, command)
    return re.sub(r"(?<![\w/.])/(?=(nvme|backup|mnt)\b|nvme\d|nvme\{)", f"{room}/", command)


def clear(command: str, room: Path) -> None:
    """Remove the output of an alternative to this command."""
    words = shlex.split(command)
    if "plan" in words[:2] or "bench" in words[:2]:
        return
    for flag, value in pairwise(words):
        if flag == "--out" and "report" not in words:
            shutil.rmtree(room / value, ignore_errors=True)
        if flag == "--store" and "finetune" in words:
            for rank in "01" if "{rank}" in value else "0":
                shutil.rmtree(Path(value.replace("{rank}", rank)), ignore_errors=True)


def type_page(page: Path, room: Path, environment: dict[str, str]) -> list[str]:
    """Type the commands of a page in `room` and return those that failed, with the last lines of their output."""
    failed = []
    exported: list[str] = []
    for command in commands(page):
        name = f"{page.relative_to(ROOT)}: {command}"
        if (reason := left_out(command)) is not None:
            print(f"left out  {name}  ({reason})", flush=True)
            continue
        if command.startswith("export "):
            exported.append(command)
            continue
        line = typed(command, room)
        clear(line, room)
        began = time.monotonic()
        try:
            done = subprocess.run(
                ["bash", "-c", "\n".join([*exported, line])],
                cwd=room,
                env=environment,
                input="How many drives?\n",
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
            code, said = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            code, said = 124, f"not done within {SECONDS} s"
        print(f"{'ok' if code == 0 else 'FAILED':<8}  {name}  ({time.monotonic() - began:.0f} s)", flush=True)
        if code:
            failed.append(f"{name}\n" + "\n".join(f"    {text}" for text in said.splitlines()[-12:]))
    return failed


def make_environment(folder: Path, wheel: Path) -> Path:
    """Return a fresh virtual environment with the wheel and the extras that the pages name."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    extras = f"{wheel}[cli,gguf]"
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", "--no-input", extras], check=True)
    return folder


def main() -> int:
    """Type all pages; return 1 where a command failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, nargs="?", help="the wheel to install")
    parser.add_argument("--environment", type=Path, help="an environment with memascend in it, instead of a fresh one")
    parser.add_argument("--pages", default="", help="only pages whose path has this")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        home = Path(folder).resolve()
        if chosen.environment is None and chosen.wheel is None:
            parser.error("name a wheel, or give --environment")
        made = chosen.environment or make_environment(home / "environment", chosen.wheel)
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
            "PATH": f"{made.resolve() / 'bin'}:{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(home / "cache"),
            "HF_HUB_OFFLINE": "1",
        }
        template = home / "template"
        template.mkdir()
        room_maker = [made.resolve() / "bin" / "python", ROOT / "tests" / "newcomer_room.py", "memascend"]
        subprocess.run(room_maker, cwd=template, env=environment, check=True, stdout=subprocess.DEVNULL)
        failed = []
        for page in pages():
            if chosen.pages not in str(page.relative_to(ROOT)) or not commands(page):
                continue
            room = home / "room"
            shutil.copytree(template, room)
            failed += type_page(page, room, environment)
            shutil.rmtree(room)
    print("\n".join(["", *failed, f"{len(failed)} commands failed"]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
