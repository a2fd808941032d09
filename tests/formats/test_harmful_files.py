"""Files of another origin that would take memory, time or a thread for ever: refused, with their names."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import tiny_models

import memascend
from memascend import CheckpointError
from memascend.formats.json_files import read_json
from memascend.formats.safetensors import SafetensorsReader


@pytest.mark.parametrize(
    "shape",
    [[1] * 100_000, [1] * 65, [1 << 64], [10**4000] * 60, [-1]],
    ids=["long", "65", "wide", "product", "negative"],
)
def test_headers_are_bounded(tmp_path: Path, shape: list[int]) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="damaged header: it does not describe w"):
        SafetensorsReader(file)
    assert time.monotonic() - began < 5


def test_pipes_in_the_place_of_files_do_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe is not a file"):
        SafetensorsReader(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe cannot be read as JSON: it is not a file"):
        read_json(tmp_path / "pipe")


@pytest.mark.parametrize("name", ["model.safetensors.tmp", "model.safetensors", "config.json"])
def test_links_in_the_place_of_what_is_written_are_not_followed(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    out = tmp_path / "out"
    out.mkdir()
    (out / name).symlink_to(victim)
    model = memascend.offload(
        tiny_models.build("llama"), store=tmp_path / "s", host_memory="64MiB", allocator="pageable"
    )
    memascend.save_pretrained(model, out, overwrite=True)
    memascend.close(model)
    assert victim.read_text() == "precious"
    assert not (out / name).is_symlink()
