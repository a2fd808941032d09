#!/usr/bin/env python
"""Host memory and disk that text takes until its sequences can be read: the command's own way, and `datasets`'.

    python benches/data.py --megabytes 64                           # of this Python's own sources, repeated
    python benches/data.py --megabytes 256 --json benches/results/data.json

Each in a process of its own, with the same byte tokenizer: `memascend.cli.data` indexes, tokenises and cuts into
sequences; `datasets` converts the file to Arrow, tokenises with `map` and packs with TRL's `pack_dataset`, as
`trl.SFTTrainer` does. Both then read 256 sequences. Peak is VmHWM above the baseline, after all imports. It counts the
pages of mapped files, so RssAnon is beside it, which cannot be dropped. Disk is the size of the scratch directory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import finish, machine, markdown, rss, run

SEQ_LEN = 512
ROWS = 256


def write_text(path: Path, megabytes: int) -> None:
    """Write JSON lines with the library's sources, again and again under different first lines."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    written = number = 0
    with path.open("w") as file:
        while written < megabytes << 20:
            text = f"# {number}\n" + sources[number % len(sources)].read_text(errors="replace")
            written += file.write(json.dumps({"text": text}) + "\n")
            number += 1


def child(way: str, path: str, folder: str) -> None:
    import datasets
    import torch  # noqa: F401 (part of the baseline)
    import trl.data_utils

    from memascend.cli.data import ByteTokenizer, Documents, TokenBlocks

    datasets.disable_progress_bars()
    tokenizer, scratch = ByteTokenizer(), Path(folder)
    baseline = rss()
    began = time.monotonic()
    if way == "memascend":
        documents = Documents([Path(path)], scratch=scratch)
        blocks = TokenBlocks(documents, tokenizer, scratch=scratch, seq_len=SEQ_LEN, seed=0, vocab_size=258)
        tokens = sum(blocks.row(blocks.number(row))["input_ids"].numel() for row in range(ROWS))
    else:
        rows = datasets.load_dataset("json", data_files=path, split="train", cache_dir=folder)
        rows = rows.map(lambda row: {"input_ids": list(tokenizer.encode(row["text"]))}, remove_columns=["text"])
        rows = trl.data_utils.pack_dataset(rows, SEQ_LEN, strategy="wrapped").shuffle(seed=0)
        tokens = sum(len(rows[row]["input_ids"]) for row in range(ROWS))
    assert tokens == ROWS * SEQ_LEN, tokens
    disk = sum(file.stat().st_size for file in scratch.rglob("*") if file.is_file())
    seconds, now = time.monotonic() - began, rss()
    found = {"seconds": seconds, "disk_bytes": disk}
    found |= {"peak_bytes": now["hwm"] - baseline["hwm"], "anonymous_bytes": now["anon"] - baseline["anon"]}
    Path(folder + ".json").write_text(json.dumps(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--workdir", type=Path, help="where the text and what is made of it go")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(*args.child)
        return 0
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=args.workdir) as folder:
        text = Path(folder, "text.jsonl")
        write_text(text, args.megabytes)
        for way in ("memascend", "datasets"):
            Path(folder, way).mkdir()
            subprocess.run([sys.executable, __file__, "--child", way, str(text), str(Path(folder, way))], check=True)
            found[way] = json.loads(Path(folder, f"{way}.json").read_text())
    columns = ("peak_bytes", "anonymous_bytes", "disk_bytes")
    rows = [
        [way, *(f"{one[name] / 1e6:.0f} MB" for name in columns), f"{one['seconds']:.1f} s"]
        for way, one in found.items()
    ]
    print(markdown([f"{args.megabytes} MiB of text", "peak", "anonymous at the end", "disk", "time"], rows))
    about = {"machine": machine(args.workdir or Path()), "megabytes": args.megabytes, "seq_len": SEQ_LEN}
    return finish(about | {"ways": found}, args.json, [])


if __name__ == "__main__":
    run(main)
