"""The benchmarks of the CUDA path and of ranks run without a GPU or DeepSpeed; their sums are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

BENCHES = Path(__file__).resolve().parents[1] / "benches"
sys.path.insert(0, str(BENCHES))

import _gpu_child  # noqa: E402
import _gpu_tables  # noqa: E402
import dequantise  # noqa: E402
import pool  # noqa: E402
import ranks  # noqa: E402
import timeline  # noqa: E402
from device import cufile  # noqa: E402


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCHES / "gpu.py"), *map(str, words)], capture_output=True, text=True)


@pytest.mark.timeout(900)  # a dozen processes, and each imports PyTorch and transformers
def test_the_smoke_runs_on_the_cpu(tmp_path: Path) -> None:
    """One section of it: all take a minute."""
    out = tmp_path / "smoke.json"
    done = run("--smoke", "--only", "step", "--workdir", tmp_path / "work", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("cpu smoke")
    told = json.loads(out.read_text())
    assert told["smoke"] and str(tmp_path) not in out.read_text()
    rows = told["rows"]
    assert list(rows) == ["step"]
    assert not [row["name"] for section in rows.values() for row in section if "failed" in row]
    (step,) = rows["step"]
    assert step["floor_s"] == max(step["floors_s"].values()) == step["floors_s"][step["bound_by"]] > 0
    assert step["moved"]["ssd_bytes_written"] > 0 and step["update_bytes"] > 0
    hardware = step["hardware"]
    # Neither the update's rate nor the product's is measured without a probe.
    assert hardware["not_measured"] == ["flops", "update"] and hardware["floor_s"] <= step["floor_s"]
    assert hardware["moved"]["flops"] > 6 * 128 * 64 * 256


def test_parts_of_io_run_in_an_interpreter_without_packages() -> None:
    """DeepSpeed's interpreter runs one of them."""
    program = [sys.executable, "-S", str(BENCHES / "io.py"), "--help"]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0 and "{fio,peers,volumes,all}" in done.stdout, done.stderr


def test_a_smoke_run_is_no_result() -> None:
    done = run("--smoke", "--out", BENCHES / "results" / "gpu-smoke.json")
    assert done.returncode == 2 and "not in benches/results" in done.stderr


def test_time_in_which_kernels_overlap_counts_once() -> None:
    def event(name: str, start: float, end: float, device: DeviceType = DeviceType.CUDA, user: bool = False):
        times = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, time_range=times, device_type=device, is_user_annotation=user)

    events = [
        event("gemm", 5e6, 7e6),
        event("softmax", 1e6, 3e6),
        event("gemm", 2e6, 4e6),
        event("gemm", 2.5e6, 3e6),
        event("Memcpy HtoD (Pinned -> Device)", 0, 5e5),
        event("Memcpy DtoH (Device -> Pinned)", 0, 25e4),
        event("Memset (Device)", 8e6, 9e6),
        event("aten::mm", 0, 9e6, DeviceType.CPU),
        event("memascend: wait for H2D", 0, 9e6, user=True),
    ]
    profiler = SimpleNamespace(events=lambda: events)
    # Copies run for 0.5 s before the first kernel, and for 0.5 s beside one.
    events.append(event("Memcpy HtoD (Pinned -> Device)", 35e5, 4e6))
    expected = {"kernel_seconds": 5.0, "h2d_seconds": 1.0, "d2h_seconds": 0.25, "overlapped_share": 0.5}
    assert _gpu_child.busy(profiler) == pytest.approx(expected)
    alone = SimpleNamespace(events=lambda: events[:1])
    assert _gpu_child.busy(alone)["overlapped_share"] is None


STEP = {
    "of_floor": 1.15,
    "bound_by": "ssd",
    "synchronising": {"forward": {}, "backward": {}, "clip": {"gpu.py:1": 1}, "update": {}},
    "waits_per_step": {"forward": 0, "backward": 0, "clip": 3, "update": 0},
}
ROWS = {
    "exact": [{"losses_equal": True, "weights_equal": True}],
    "copy": [{"ratio": 0.95}],
    "plan": [{"device_off_by": 0.0, "driver_off_by": 0.03, "host_off_by": None}],
    "step": [STEP],
    "activations": [
        {"tokens": 1, "policy": "keep", "allocated_bytes": 100, "step_s": 1.0},
        {"tokens": 1, "policy": "host", "allocated_bytes": 60, "step_s": 1.0},
        {"tokens": 1, "policy": "ssd", "allocated_bytes": 53, "step_s": 1.03},
    ],
}


def verdicts(rows: dict) -> list[bool]:
    return [passed for passed, _ in _gpu_tables.checks({s: [{"name": "it", **row} for row in rows[s]] for s in rows})]


def test_what_is_at_the_limits_passes() -> None:
    assert verdicts(ROWS) == [True] * 9


@pytest.mark.parametrize(
    ("section", "number", "worse", "number_failed"),
    [
        ("exact", 0, {"losses_equal": False}, 1),
        ("exact", 0, {"weights_equal": False}, 1),
        ("copy", 0, {"ratio": 0.949}, 1),
        ("plan", 0, {"device_off_by": 0.001}, 1),
        ("plan", 0, {"device_off_by": -0.301}, 1),
        ("plan", 0, {"host_off_by": 0.031}, 1),
        ("step", 0, {"of_floor": 1.16}, 1),
        ("step", 0, {"synchronising": STEP["synchronising"] | {"backward": {"model.py:7": 448}}}, 1),
        ("step", 0, {"waits_per_step": STEP["waits_per_step"] | {"forward": 1}}, 1),
        ("activations", 2, {"allocated_bytes": 54}, 1),
        ("activations", 2, {"step_s": 1.04}, 1),
        # Without its peer there is no verdict.
        ("activations", 0, {"failed": "no room"}, 0),
    ],
)
def test_what_is_beyond_a_limit_fails(section: str, number: int, worse: dict, number_failed: int) -> None:
    rows = {name: [dict(row) for row in there] for name, there in ROWS.items()}
    rows[section][number] |= worse
    assert verdicts(rows).count(False) == number_failed


def test_synchronising_calls_are_counted_by_place() -> None:
    step = _gpu_child.Step.__new__(_gpu_child.Step)
    step.run = SimpleNamespace(counters=lambda: {})
    step.seconds, step.moved = dict.fromkeys(_gpu_child.PHASES, 0.0), {phase: {} for phase in _gpu_child.PHASES}
    step.synchronising, step.caught = {phase: Counter() for phase in _gpu_child.PHASES}, []
    with step.phase("update"):
        for line in (7, 7, 9):
            message = UserWarning("called a synchronizing CUDA operation")
            step.caught.append(SimpleNamespace(message=message, filename="/somewhere/homes.py", lineno=line))
        step.caught.append(SimpleNamespace(message=UserWarning("deprecated"), filename="other.py", lineno=1))
    assert step.synchronising["update"] == {"homes.py:7": 2, "homes.py:9": 1}
    row = {"name": "it", "synchronising": step.synchronising, "waits_per_step": None}
    ((passed, what),) = _gpu_tables.synchronisations(row)
    assert not passed and "3 synchronising calls" in what and "2 at homes.py:7" in what


@pytest.mark.parametrize("force", [False, True])
def test_cufile_is_configured_before_its_driver_opens_and_its_log_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", "")  # which is put back afterwards
    line = "26-11-2026 21:25:25:263 [pid=1 tid=1] {} cufio:312 {}\n"

    def fails() -> None:
        config = json.loads(Path(os.environ["CUFILE_ENV_PATH_JSON"]).read_text())
        assert config["properties"] == {"allow_compat_mode": True, "force_compat_mode": force, "use_poll_mode": False}
        log = Path(config["logging"]["dir"]) / "cufile_1.log"
        log.write_text(line.format("NOTICE", "a notice") + 2 * line.format("ERROR ", "no volume attributes"))
        cufile.checked("cuFileHandleRegister", cufile.Status(5027, 0))

    with pytest.raises(RuntimeError) as raised, cufile.configured(tmp_path, force):
        fails()
    said = "cuFileHandleRegister returned error 5027, the file descriptor is not registered (driver 0)"
    assert str(raised.value) == f"{said}; cuFile's log: cufio:312 no volume attributes"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(900)  # four processes, and each imports PyTorch and transformers
def test_what_ranks_send_is_counted(tmp_path: Path) -> None:
    out = tmp_path / "ranks.json"
    words = ["--model", "tiny", "--systems", "memascend", "--host-memory", "least", "--steps", "3", "--tokens", "16"]
    paths = ("--workdir", str(tmp_path / "work"), "--json", str(out))
    done = subprocess.run([sys.executable, str(BENCHES / "ranks.py"), *words, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (entry,) = json.loads(out.read_text())["runs"]
    for rank in entry["rounds"][0]["raw"]:
        counted = sum(step["network_bytes"] for step in rank["steps"])
        # Comparisons of the order and agreements come on top of weights and gradients.
        assert 1 < counted / rank["network_bytes_sent"] < 1.001
    assert 0 < entry["step_peak_bytes"] < 4e8 and entry["ssd_bytes_written"] > entry["numel"]
    assert str(tmp_path) not in out.read_text()


def test_what_a_collective_sends_is_what_it_is_defined_as() -> None:
    names = ("all_gather_into_tensor", "all_reduce", "broadcast")
    assert [ranks.sent(name, 4, 100, root=True) for name in names] == [75, 150, 300]
    assert ranks.sent("broadcast", 4, 100, root=False) == 0


def test_ranks_are_compared_with_deepspeed() -> None:
    theirs = {"model": "m", "system": "deepspeed-author", "name": "theirs", "losses": [2.0]}
    theirs |= {"step_peak_bytes": 100, "network_bytes": 50, "zero3_network_bytes": 100}
    ours = theirs | {"system": "memascend", "name": "ours"}
    assert ranks.checks([ours | {"network_bytes": 102}, theirs]) == []
    for worse in ({"losses": [2.03]}, {"step_peak_bytes": 101}, {"network_bytes": 104}, {"failed": "no room"}):
        assert ranks.checks([ours | worse, theirs]), worse
    assert ranks.checks([ours])


MS = 1_000_000


def test_a_step_is_divided_by_what_was_in_flight_and_its_gaps_are_named() -> None:
    """Forward 10 ms, turn 10, backward 20, end 10; the caller waits in the forward pass and puts a gradient aside."""
    raw = {
        "spans": [
            ["read", 0, 4096, -5 * MS, 4 * MS],
            ["write", 0, 4096, 2 * MS, 6 * MS],
            ["kernel", 0, 0, 3 * MS, 5 * MS],
            ["flush", 0, 0, 12 * MS, 13 * MS],
            ["write", 0, 4096, 30 * MS, 99 * MS],
        ]
    }
    calls = timeline.innermost(
        [
            ("wait for CPU update", 1 * MS, 8 * MS, 7),
            ("recompute", 20 * MS, 25 * MS, 7),
            ("wait for SSD read", 21 * MS, 22 * MS, 7),
            ("gradient of x.weight", 26 * MS, 28 * MS, 7),
            ("fetch of another thread", 0, 50 * MS, 8),
        ],
        7,
    )
    step = {"marks": [0, 10 * MS, 40 * MS, 50 * MS], "loss": 1.0, "moved": [4096, 8192]}
    told = timeline.analysed(step, raw, calls, [20 * MS])
    # 0-2 reads, 2-4 both, 4-6 writes, 12-13 flush, 30-50 writes.
    expected = {"idle": 0.46, "reads": 0.04, "writes": 0.44, "both": 0.04, "flush": 0.02, "kernels": 0.04}
    assert told["shares"] == pytest.approx(expected)
    # All but the waits without kernels: 1-3, 5-8 and 21-22.
    assert told["works"] == pytest.approx(44 / 50) and told["drive_binds"] is False
    gaps = {(gap["phase"], gap["caller"]): gap["seconds"] for gap in told["gaps"]}
    assert gaps == pytest.approx(
        {
            ("forward", "wait for CPU update"): 0.002,
            ("forward", "computes"): 0.002,
            ("turn", "computes"): 0.009,
            ("backward", "recompute"): 0.004,
            ("backward", "recompute: wait for SSD read"): 0.001,
            ("backward", "computes"): 0.003,
            ("backward", "gradient of"): 0.002,
        }
    )
    assert [told["phases"][phase]["seconds"] for phase in timeline.PHASES] == pytest.approx([0.01, 0.01, 0.02, 0.01])
    drawn = timeline.drawn(step, raw, calls, told["phases"])
    assert sum(drawn["lanes"]["flush"]) == pytest.approx(timeline.BINS / 50, rel=0.01)
    picture = timeline.drawing([{"budget": "<least>", **told, "plot": drawn}])
    assert picture.startswith("<svg") and "&lt;least&gt;" in picture


def test_a_replay_of_the_pool_fetches_and_holds_as_much_as_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMASCEND_NULL_ENGINE", "1")
    config = json.loads((BENCHES / "configs" / "gpt2-xl.json").read_text()) | {"n_layer": 2}
    recorder, facts = pool.record(config, 2, tmp_path)
    same = pool.replay(recorder.events, facts["narrow"], facts["budget"], 1.0, tmp_path)
    assert same["fetches"] == facts["fetches"] and same["live_bytes_at_peak"] == facts["peak"]
    assert {line["consumer"] for line in same["consumers"]} >= {"weights of transformer.wte", "update pipeline"}


def test_dequantisation_is_measured_beside_a_copy_and_the_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "dequantise.json"
    words = ["--rows", "128", "--width", "256", "--repeats", "2", "--dir", tmp_path, "--json", out]
    monkeypatch.setattr(sys, "argv", ["dequantise.py", *map(str, words)])
    assert dequantise.main() == 0
    told = json.loads(out.read_text())
    rows = {row["form"]: row for row in told["rows"]}
    assert list(rows) == list(dequantise.forms(128, 256)) and str(tmp_path) not in out.read_text()
    assert list(tmp_path.iterdir()) == [out] and "| nf4 | 0.516 |" in capsys.readouterr().out
    for row in rows.values():
        assert row["bytes"] == 2 * 128 * 256 and row["cached_of_copy"] > 0
        assert row["cached_out_gb_s"] * row["stored_bytes"] == pytest.approx(row["cached_in_gb_s"] * row["bytes"])
    # NF4 with double quantisation: half a byte, a byte for 64 and four for 64 x 256; groups of 128 with zeros.
    assert rows["nf4"]["bytes_a_weight"] == pytest.approx(0.5 + 1 / 64 + 4 / 64 / 256, rel=1e-3)
    assert rows["gptq"]["bytes_a_weight"] == 0.5 + 2 / 128 + 0.5 / 128
    slow = {"form": "nf4", "cached_of_drive": 0.99}
    assert dequantise.faults([slow, slow | {"form": "awq", "cached_of_drive": 1.0}]) == [
        "nf4: 0.99 of the drive's rate, not 1.0"
    ]
    assert len(dequantise.faults([{"form": "bf16"}, {"form": "nf4"}])) == 1
