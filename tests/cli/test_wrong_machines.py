"""Wrong inputs of `bench`, `doctor` and `demo`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from test_wrong_inputs import refusal

from memascend.cli import demo
from memascend.cli.main import FAILED, main

if TYPE_CHECKING:
    from pathlib import Path


def test_a_drive_is_measured_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It was measured twice, and got two shares of a store."""
    (tmp_path / "link").symlink_to(tmp_path)
    told = refusal(capfd, ["bench", str(tmp_path), str(tmp_path / "link")])
    assert f"{tmp_path / 'link'} is {tmp_path}, which is named too" in told


def test_no_drive_is_measured_where_another_cannot_be(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for name, remedy in (("file", "give a directory"), ("none", "make the directory")):
        told = refusal(capfd, ["bench", str(tmp_path), str(tmp_path / name), "--no-remember"])
        assert told == f"{tmp_path / name} is neither a directory nor a block device: {remedy}\n"


def test_a_measurement_without_room_names_its_option(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told = refusal(capfd, ["bench", str(tmp_path), "--size", "100000GiB", "--seconds", "0.1"])
    assert f"{tmp_path} has no room for --size 97.66 TiB: free some space, or give a smaller --size" in told
    assert not list(tmp_path.iterdir())


def test_a_measurement_that_cannot_be_remembered(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert main(["bench", str(tmp_path), "--size", "4MiB", "--seconds", "0.05"]) == 0
    told = capfd.readouterr().err
    assert "cannot be remembered: /proc/none" in told and "Errno" not in told


def test_the_doctor_says_what_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-measure", "--store", str(tmp_path / "none")]) == FAILED
    told = " ".join(capfd.readouterr().out.split())
    assert "No such file or directory (make it first" in told and "Errno" not in told


def test_a_demo_refuses_its_output_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert f"--out {tmp_path} already exists" in refusal(capfd, ["demo", "--random", "--out", str(tmp_path)])


def test_a_torn_model_of_the_demo(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "cache_directory", lambda: tmp_path)
    folder = tmp_path / "random-llama-100M"
    folder.mkdir()
    assert f"delete {folder}: the demo writes it anew" in refusal(capfd, ["demo", "--random"])
