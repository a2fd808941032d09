"""Rates of a machine: `memascend bench --gpu`, remembered results, and refusals without them."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import LlamaConfig

from memascend.cli import main
from memascend.cli.tables import gpu_text
from memascend.errors import UnmeasuredError
from memascend.hardware import drives, gpu
from memascend.hardware.gpu import rates_for

if TYPE_CHECKING:
    from pathlib import Path

GPU = {
    "gpu": "A GPU",
    "memory_bytes": 24 << 30,
    "h2d": 25e9,
    "d2h": 24e9,
    "flops": {"bfloat16": 70e12, "float32": 30e12},
    "dram": 40e9,
}
NOTHING = dict.fromkeys(gpu.NAMES)


def remember_drive(name: str, mix: float) -> None:
    drives.remember(
        [{"place": name, "identity": name, "workloads": {"mix": {"bytes_per_second": mix}}, "worth_it": []}]
    )


# ---- measuring ----------------------------------------------------------------------------------------------


def test_work_is_counted_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    finished = 0

    def work() -> None:
        nonlocal now
        now += 0.25

    def finish() -> None:
        nonlocal now, finished
        now += 2.0
        finished += 1

    monkeypatch.setattr(gpu.time, "perf_counter", lambda: now)
    # Eight pieces of work and their waits take 4 seconds; the first piece is not counted.
    assert gpu._per_second(work, 7.0, finish) == 2.0
    assert finished == 1 + 2


def test_host_memory_is_measured() -> None:
    # Nothing copies less than 100 MB or more than 10 TB a second.
    assert 1e8 < gpu.measure_host_memory(size=16 << 20, seconds=0.05) < 1e13


def test_without_cuda_bench_says_what_is_missing(capfd: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main.main(["bench", "--gpu"]) != 0
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("memascend: error: ")
    assert "CUDA" in err or "cuda" in err
    assert not gpu.remembered_in().exists()


def test_something_has_to_be_measured(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench"]) == main.BAD_INPUT
    assert "--gpu" in capfd.readouterr().err


@pytest.mark.gpu
def test_a_gpu_is_measured_and_remembered(capfd: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "--gpu", "--seconds", "0.2", "--json"]) == 0
    (found,) = json.loads(capfd.readouterr().out)
    assert found["memory_bytes"] > 1 << 30
    assert 1e9 < found["d2h"] < 1e12
    assert 1e9 < found["h2d"] < 1e12
    # The stand-in device (tests/rehearsal) multiplies on one core.
    least = 1e8 if "REHEARSAL" in os.environ else 1e11
    assert least < found["flops"]["float32"] <= found["flops"]["bfloat16"] * 1.1
    assert found["pinned"].keys() == {"registered", "cuda"}
    assert all(1e9 < rate < 1e12 for rates in found["pinned"].values() for rate in rates.values())
    known = rates_for("bfloat16", NOTHING | {"ssd": 1e9})
    assert known["h2d"].per_second == found["h2d"]


def kinds(registered: float, cuda: float) -> dict[str, dict[str, float]]:
    return {"registered": {"h2d": registered, "d2h": registered}, "cuda": {"h2d": cuda, "d2h": cuda}}


@pytest.mark.parametrize(
    ("measured", "preferred"),
    [
        (kinds(20e9, 20e9), None),
        (kinds(20e9, 21e9), None),
        (kinds(20e9, 23e9), "cuda"),
        (kinds(23e9, 20e9), None),
        ({"registered": {"h2d": 10e9, "d2h": 30e9}, "cuda": {"h2d": 30e9, "d2h": 10e9}}, None),
        ({"registered": {}, "cuda": {"h2d": 1e9, "d2h": 1e9}}, None),
        ({"registered": {"h2d": "fast", "d2h": 1}, "cuda": {"h2d": 1e9, "d2h": 1e9}}, None),
        ("fast", None),
        (None, None),
    ],
)
def test_memory_of_cudas_own_is_preferred_where_copies_are_faster_by_far(measured: Any, preferred: str | None) -> None:
    assert gpu.preferred_pinned() is None
    gpu.remember(GPU | {"pinned": measured})
    assert gpu.preferred_pinned() == preferred


# ---- remembering and choosing -------------------------------------------------------------------------------


def test_what_is_given_comes_before_what_was_measured() -> None:
    gpu.remember(GPU)
    remember_drive("/nvme", 5e9)
    found = rates_for("bfloat16", NOTHING | {"h2d": 1e9})
    assert {name: rate.per_second for name, rate in found.items()} == {
        "flops": 70e12,
        "h2d": 1e9,
        "d2h": 24e9,
        "dram": 40e9,
        "ssd": 5e9,
    }
    assert found["h2d"].source == "given"
    assert found["flops"].source.startswith("A GPU, 20")
    assert "/nvme" in found["ssd"].source
    assert rates_for("float32", NOTHING)["flops"].per_second == 30e12


def test_a_store_on_several_drives_has_the_rates_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drives, "identity", lambda place: str(place)[:5])
    gpu.remember(GPU)
    remember_drive("/one/", 5e9)
    remember_drive("/two/", 3e9)
    assert rates_for("bfloat16", NOTHING, ["/one/x", "/two/x"])["ssd"].per_second == 8e9
    # Two directories of one drive share it.
    assert rates_for("bfloat16", NOTHING, ["/one/x", "/one/y"])["ssd"].per_second == 5e9
    with pytest.raises(UnmeasuredError, match="name the drives with --store"):
        rates_for("bfloat16", NOTHING)
    with pytest.raises(UnmeasuredError, match=re.escape("`memascend bench /two/x /third`")):
        rates_for("bfloat16", NOTHING, ["/two/x", "/third"])


def test_host_memory_is_measured_where_no_rate_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    given = NOTHING | {"flops": 1e12, "h2d": 1e9, "d2h": 1e9}
    monkeypatch.setattr(gpu, "measure_host_memory", lambda: pytest.fail("measured for a run that is refused"))
    with pytest.raises(UnmeasuredError):
        rates_for("bfloat16", given)
    monkeypatch.undo()
    found = rates_for("bfloat16", given | {"ssd": 1e9})["dram"]
    assert found.source == "measured just now"
    assert found.per_second > 1e8


@pytest.mark.parametrize("text", ["", "[]", "{", '{"h2d": "fast"}', '{"h2d": 0, "flops": [1]}'])
def test_measurements_that_make_no_sense_are_not_used(text: str) -> None:
    gpu.remembered_in().parent.mkdir(parents=True)
    gpu.remembered_in().write_text(text)
    with pytest.raises(UnmeasuredError, match="copies to the GPU"):
        rates_for("bfloat16", NOTHING | {"ssd": 1e9})


def test_a_prediction_without_rates_is_refused_with_what_to_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=2).save_pretrained(tmp_path)

    def refusal(*more: str) -> str:
        assert main.main(["plan", str(tmp_path), "--gpu", "24GiB", *more]) == main.BAD_INPUT
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith("memascend: error: not known: the rates of ")
        return err

    everything = refusal()
    assert "`memascend bench --gpu DIR`" in everything
    assert all(option in everything for option in ("--flops", "--pcie", "--ssd"))
    without_drive = refusal("--flops", "1e12", "--pcie", "1e10")
    assert "the rates of the drives. Run `memascend bench DIR`" in without_drive
    assert "--flops" not in without_drive
    assert "`memascend bench --gpu`" in refusal("--ssd", "1e9")


def test_the_table_of_a_gpu_shows_every_rate() -> None:
    rows: dict[str, Any] = {}
    for line in gpu_text(GPU).splitlines()[1:]:
        *title, number, unit = line.split()
        rows[" ".join(title)] = (float(number), unit)
    assert rows == {
        "products, bfloat16": (70, "TFLOP/s"),
        "products, float32": (30, "TFLOP/s"),
        "to the GPU, pinned": (25, "GB/s"),
        "from the GPU, pinned": (24, "GB/s"),
        "host memory, copy": (40, "GB/s"),
    }
    assert gpu_text(GPU).startswith("A GPU, 24.0 GiB")


def test_an_update_is_timed_with_a_runs_threads() -> None:
    rate = gpu.measure_update(2, seconds=0.05)
    assert 1e8 < rate.per_second < 1e12 and rate.source == "measured just now, 2 threads"
