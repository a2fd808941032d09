"""Mutations of the code that makes a step durable: each has to fail the tests. `make mutants` runs it.

A mutation leaves out one thing that only a power cut shows. The sources are copied to build/mutants, mutated one at a
time, and their Rust tests run until one fails. Ends with 1 where a mutant lives, where the text that it replaces is not
there, and where a test fails without a mutation.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "build" / "mutants"
NVME, STORE = "memascend-nvme", "memascend-store"
VOLUME, DEVICE = f"crates/{NVME}/src/volume", f"crates/{NVME}/src/block_device"
#: Tests of the crates that a mutation has to fail: cargo's words for the programs, which are built and run in turn,
#: and those tests that are run of them.
TESTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    NVME: (("--lib",), ("volume::", "block_device::notes::")),
    STORE: (("--lib", "--test=flips", "--test=power"), ()),
}
#: A mutation changes a line or two: the rest of its crate is not compiled again.
ENVIRONMENT = os.environ | {"CARGO_PROFILE_CHECKED_INCREMENTAL": "true", "CARGO_PROFILE_CHECKED_CODEGEN_UNITS": "256"}
#: Where tests that are ended leave their files.
SCRATCH = COPY / "scratch"
LIMIT_SECONDS = 3600
#: Parts of the repository that cargo needs.
SOURCES = ("Cargo.toml", "Cargo.lock", "crates", "rustfmt.toml", "README.md", "LICENSE")


@dataclass(frozen=True)
class Mutant:
    """A text of a file that is replaced, and the step that is then missing."""

    missing: str
    file: str
    text: str
    replacement: str


MUTANTS = (
    Mutant(
        "a note is flushed before it gets its name",
        f"{VOLUME}/notes.rs",
        "        file.sync().map_err(|source| flush_error(&path, source))?;\n",
        "",
    ),
    Mutant(
        "names are flushed after a note was written",
        f"{VOLUME}/notes.rs",
        "            let _ = self.fill_spare(&[], length).and_then(|spare| spare.sync());\n        }\n"
        "        self.flush_names()\n",
        "            let _ = self.fill_spare(&[], length).and_then(|spare| spare.sync());\n        }\n        Ok(())\n",
    ),
    Mutant(
        "names are flushed after a note was removed",
        f"{VOLUME}/notes.rs",
        "        // durable.\n        self.flush_names()\n",
        "        Ok(())\n",
    ),
    Mutant(
        "a note that is found is flushed",
        f"{VOLUME}/notes.rs",
        "        unless_read_only(file.sync())?;\n        let mut note",
        "        let mut note",
    ),
    Mutant(
        "the name of a note that is found is flushed",
        f"{VOLUME}/notes.rs",
        "        let mut note = file.read()?;\n        unless_read_only(self.names.sync())?;\n",
        "        let mut note = file.read()?;\n",
    ),
    Mutant(
        "the absence of a note is flushed",
        f"{VOLUME}/notes.rs",
        "                unless_read_only(self.names.sync()).map_err(|source| flush_error(self.path, source))?;\n",
        "",
    ),
    Mutant(
        "names are exchanged, not removed and given again",
        f"{VOLUME}/notes.rs",
        "if self.names.exchange(SPARE_NAME, Volume::NOTE_NAME).is_err() {\n            // There",
        "let _ = self.names.remove(Volume::NOTE_NAME);\n        {\n            // There",
    ),
    Mutant(
        "the note before stays until the next is whole",
        f"{VOLUME}/notes.rs",
        "let file = match self.names.open(SPARE_NAME, true) {",
        "let file = match self.names.open(Volume::NOTE_NAME, true) {",
    ),
    Mutant(
        "names are flushed after the note before was put in the place of a damaged one",
        f"{VOLUME}/notes.rs",
        '            renamed.map_err(|source| file_error("write", &self.note_path(), source))?;\n        }\n'
        "        self.flush_names()\n",
        '            renamed.map_err(|source| file_error("write", &self.note_path(), source))?;\n        }\n'
        "        Ok(())\n",
    ),
    Mutant(
        "a flush of a note reaches the system",
        f"{VOLUME}/folder.rs",
        "    fn sync(&self) -> io::Result<()> {\n        self.sync_all()\n",
        "    fn sync(&self) -> io::Result<()> {\n        Ok(())\n",
    ),
    Mutant(
        "a flush of names reaches the system",
        f"{VOLUME}/folder.rs",
        "        self.directory.sync_all()\n",
        "        Ok(())\n",
    ),
    Mutant(
        "the name of a new directory is flushed",
        f"{VOLUME}/directory.rs",
        "Folder::open(above).and_then(|above| above.sync())",
        "Folder::open(above)",
    ),
    Mutant(
        "data is flushed",
        f"{VOLUME}/file.rs",
        "        self.file.sync_data().map_err(|source| flush_error(&self.path, source))\n",
        "        Ok(())\n",
    ),
    Mutant(
        "a device's note is flushed",
        f"{DEVICE}/notes.rs",
        "        medium.flush().map_err(PutError::Flush)\n",
        "        Ok(())\n",
    ),
    Mutant(
        "a device's note that is found is flushed",
        f"{DEVICE}/notes.rs",
        "        medium.flush()?;\n        Ok(found)\n",
        "        Ok(found)\n",
    ),
    Mutant(
        "a flush of a device's note reaches the system",
        f"{DEVICE}/notes.rs",
        "        self.sync_data()\n",
        "        Ok(())\n",
    ),
    Mutant(
        "a device's note is written to the older slot",
        f"{DEVICE}/notes.rs",
        "Some(newest) => (1 - newest.index, newest.sequence + 1),",
        "Some(newest) => (newest.index, newest.sequence + 1),",
    ),
    Mutant(
        "volumes are flushed before the manifest is written",
        "crates/memascend-store/src/commit.rs",
        "        if let Err(error) = self.sync() {\n",
        "        if let Err(error) = Ok(()) {\n",
    ),
    Mutant(
        "no manifest is written after a flush has failed",
        "crates/memascend-store/src/commit.rs",
        "        self.members.iter().try_for_each(Member::check_flushes).map_err(refused)?;\n        let body",
        "        let body",
    ),
    Mutant(
        "bytes that a failed commit may have named are not overwritten",
        "crates/memascend-store/src/commit.rs",
        "                    table.doubt(generation);\n",
        "                    table.release(generation, !self.in_place);\n",
    ),
    Mutant(
        "a generation that is overwritten in place leaves the manifest first",
        "crates/memascend-store/src/commit.rs",
        "        self.members.iter().try_for_each(|member| member.clear_note())?;\n",
        "",
    ),
    Mutant(
        "no generation leaves the manifest after a flush has failed",
        "crates/memascend-store/src/commit.rs",
        "        self.members.iter().try_for_each(Member::check_flushes)?;\n        if snapshots",
        "        if snapshots",
    ),
    Mutant(
        "a generation that is overwritten in place leaves a manifest with snapshots first",
        "crates/memascend-store/src/commit.rs",
        "        self.write_manifest(None, &snapshots).map_err(|failed| failed.error)?;\n",
        "",
    ),
    Mutant(
        "what only memory has is written before the manifest",
        "crates/memascend-store/src/commit.rs",
        "        self.write_kept()?;\n",
        "",
    ),
    Mutant(
        "no manifest is written where what only memory has was not",
        "crates/memascend-store/src/commit.rs",
        "        self.write_kept()?;\n",
        "        let _ = self.write_kept();\n",
    ),
    Mutant(
        "the only whole manifest is not written over",
        "crates/memascend-store/src/member.rs",
        "        self.settle_note()?;\n",
        "",
    ),
    Mutant(
        "a run that went back settles that",
        "crates/memascend-store/src/commit.rs",
        "        self.on_all(|_, member| member.settle_note())\n",
        "        Ok(())\n",
    ),
    Mutant(
        "a flush that has failed is remembered",
        "crates/memascend-store/src/member.rs",
        "            let _ = self.lost.set((path.clone(), source.raw_os_error().unwrap_or(libc::EIO)));\n",
        "            let _ = (path, source);\n",
    ),
    Mutant(
        "nothing is committed where the store was replaced",
        f"{VOLUME}.rs",
        "        if directory.is_in_place(&self.file.file) {\n            return Ok(());\n        }\n"
        "        Err(IoError::Replaced { path: directory.path().to_owned() })\n",
        "        let _ = directory;\n        Ok(())\n",
    ),
    Mutant(
        "nothing is removed where the store was replaced",
        f"{VOLUME}.rs",
        "            if directory.is_in_place(&self.file.file) {\n                directory.remove_files();",
        "            {\n                directory.remove_files();",
    ),
    Mutant(
        "the volume itself is locked",
        f"{VOLUME}/lock.rs",
        "            let file = folder.open_regular(name, flags)?;\n            lock(&file)?;\n",
        "            let file = folder.open_regular(name, flags)?;\n",
    ),
)


def main() -> None:
    """Try every mutant, or those that have a word in their name: `python3 tests/mutants.py "device's note"`."""
    words = sys.argv[1:]
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.missing for word in words)]
    if not chosen:
        sys.exit(f"no mutant is named by {' or '.join(map(repr, words))}")
    _copy_sources()
    living = 0
    failed_of: dict[str, set[str]] = {NVME: set(), STORE: set()}
    for mutant in chosen:
        began = time.monotonic()
        failed = _first_failure_of(mutant)
        if failed is None:
            living += 1
        else:
            failed_of[_package(mutant)].add(failed)
        end = f"found by {failed}" if failed else "LIVES"
        print(f"{end} in {time.monotonic() - began:.0f} s: not: {mutant.missing}", flush=True)
    # A test that fails without a mutation has found none.
    for package, tests in failed_of.items():
        if tests and (failed := _first_failure(package, only=sorted(tests))):
            sys.exit(f"{failed} fails without a mutation")
    print(f"{len(chosen) - living} of {len(chosen)} mutants found")
    sys.exit(bool(living))


def _copy_sources() -> None:
    """Copy what cargo needs, and leave files as they are whose text is the same: cargo builds only the others."""
    COPY.mkdir(parents=True, exist_ok=True)
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, COPY / name, dirs_exist_ok=True, copy_function=_copy_if_other)
        elif source.exists():
            _copy_if_other(str(source), str(COPY / name))


def _copy_if_other(source: str, copy: str) -> None:
    """Copy a file, with the time of now: an earlier one would hide from cargo that a mutation is gone."""
    content = Path(source).read_bytes()
    if not Path(copy).is_file() or Path(copy).read_bytes() != content:
        Path(copy).write_bytes(content)


def _package(mutant: Mutant) -> str:
    return STORE if STORE in mutant.file else NVME


def _first_failure_of(mutant: Mutant) -> str | None:
    """Return the test that a mutation fails, or None where all pass."""
    file = COPY / mutant.file
    original = file.read_text()
    if original.count(mutant.text) != 1:
        sys.exit(
            f"{mutant.file} has the text of the mutant 'not: {mutant.missing}' {original.count(mutant.text)} times"
        )
    file.write_text(original.replace(mutant.text, mutant.replacement))
    try:
        return _first_failure(_package(mutant))
    finally:
        file.write_text(original)


def _first_failure(package: str, *, only: Sequence[str] = ()) -> str | None:
    """Build the tests of a package as its sources are; return the first that fails, or None where all pass.

    With `only`, these tests alone are run.
    """
    targets, chosen = TESTS[package]
    words = (*only, "--exact") if only else chosen
    failures = (
        _first_failure_of_program([_built(package, target), *words], COPY / "crates" / package) for target in targets
    )
    return next((failure for failure in failures if failure), None)


def _built(package: str, target: str) -> str:
    """Build a program of tests as the sources are, and return its path."""
    words = ["cargo", "test", "--profile", "checked", "--package", package, target, "--no-run"]
    built = subprocess.run(
        [*words, "--message-format=json"], cwd=COPY, capture_output=True, text=True, check=False, env=ENVIRONMENT
    )
    if built.returncode:
        sys.exit(f"{package} does not compile:\n{built.stderr[-2000:]}")
    messages = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
    (program,) = [message["executable"] for message in messages if message.get("executable")]
    return str(program)


def _first_failure_of_program(words: list[str], folder: Path) -> str | None:
    """Run a program of tests until one fails; return that one, or None where all pass."""
    shutil.rmtree(SCRATCH, ignore_errors=True)
    SCRATCH.mkdir()
    # Property tests say that they fail only when they have looked for the smallest case. A short test does not wait for
    # longer ones.
    at_once = {"PROPTEST_MAX_SHRINK_ITERS": "0", "RUST_TEST_THREADS": "8"}
    environment = os.environ | at_once | {"TMPDIR": str(SCRATCH)}
    with subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as running:
        assert running.stdout is not None
        # A mutant that goes round for ever is noticed too.
        limit = threading.Timer(LIMIT_SECONDS, running.kill)
        limit.daemon = True
        limit.start()
        failed = None
        for line in running.stdout:
            # The others would not change the answer.
            if failed := re.fullmatch(r"test (\S+)( - should panic)? \.\.\. FAILED\n", line):
                running.kill()
                break
        limit.cancel()
    if failed:
        return failed[1]
    # A test that ends its process has not printed a line of its own.
    return f"the program, which ended with {running.returncode}," if running.returncode else None


if __name__ == "__main__":
    main()
