"""Mutations of the code that makes a step durable: each has to fail the tests. `make mutants` runs it.

A mutation leaves out one thing that only a power cut shows. The sources are copied to build/mutants, mutated one at a
time, and their Rust tests run. Ends with 1 where a mutant lives, or where the text that it replaces is not there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "build" / "mutants"
VOLUME = "crates/memascend-nvme/src/volume"
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
        "        file.sync()?;\n        let mut note",
        "        let mut note",
    ),
    Mutant(
        "the name of a note that is found is flushed",
        f"{VOLUME}/notes.rs",
        "        let mut note = file.read()?;\n        self.names.sync()?;\n",
        "        let mut note = file.read()?;\n",
    ),
    Mutant(
        "the absence of a note is flushed",
        f"{VOLUME}/notes.rs",
        "self.flush_names().map(|()| FoundNote::default())",
        "Ok(FoundNote::default())",
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
        "            let file = folder.open_file(name, libc::O_RDWR | flags)?;\n            lock(&file)?;\n",
        "            let file = folder.open_file(name, libc::O_RDWR | flags)?;\n",
    ),
)


def lives(mutant: Mutant) -> bool:
    """Return whether the tests pass with a mutation."""
    file = COPY / mutant.file
    original = file.read_text()
    if original.count(mutant.text) != 1:
        sys.exit(
            f"{mutant.file} has the text of the mutant 'not: {mutant.missing}' {original.count(mutant.text)} times"
        )
    file.write_text(original.replace(mutant.text, mutant.replacement))
    command = ["cargo", "test", "--profile", "checked", "--quiet", "--package", "memascend-nvme", "--lib", "volume::"]
    try:
        tested = subprocess.run(command, cwd=COPY, capture_output=True, text=True, check=False)
    finally:
        file.write_text(original)
    if tested.returncode and "test result: FAILED" not in tested.stdout:
        sys.exit(f"the mutant 'not: {mutant.missing}' does not compile:\n{tested.stderr[-2000:]}")
    return tested.returncode == 0


def main() -> None:
    """Try every mutant."""
    COPY.mkdir(parents=True, exist_ok=True)
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, COPY / name, dirs_exist_ok=True)
        elif source.exists():
            shutil.copy2(source, COPY / name)
    living = []
    for mutant in MUTANTS:
        alive = lives(mutant)
        print(f"{'LIVES' if alive else 'found'}: not: {mutant.missing}", flush=True)
        living += [mutant.missing] * alive
    print(f"{len(MUTANTS) - len(living)} of {len(MUTANTS)} mutants found")
    sys.exit(bool(living))


if __name__ == "__main__":
    main()
