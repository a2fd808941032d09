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
NVME, STORE = "memascend-nvme", "memascend-store"
VOLUME, DEVICE = f"crates/{NVME}/src/volume", f"crates/{NVME}/src/block_device"
#: Tests of the crates that a mutation has to fail.
TESTS = {
    NVME: ("--lib", "--", "volume::", "block_device::notes::"),
    STORE: ("--test", "power"),
}
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


def lives(mutant: Mutant) -> bool:
    """Return whether the tests pass with a mutation."""
    file = COPY / mutant.file
    original = file.read_text()
    if original.count(mutant.text) != 1:
        sys.exit(
            f"{mutant.file} has the text of the mutant 'not: {mutant.missing}' {original.count(mutant.text)} times"
        )
    file.write_text(original.replace(mutant.text, mutant.replacement))
    package = STORE if STORE in mutant.file else NVME
    command = ["cargo", "test", "--profile", "checked", "--quiet", "--package", package, *TESTS[package]]
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
