"""The command for a machine with a GPU: its stages' limits, its refusals, and the arithmetic of probe and floor."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHES = ROOT / "benches"
sys.path.insert(0, str(BENCHES))

from device import counters, environment, floor, gpu_tests, probe, runner, stages, summary  # noqa: E402
from device.copies import spread  # noqa: E402

RATES = floor.Rates(
    ssd_read=2e9, ssd_write=1e9, ssd_mix=1.5e9, h2d=50e9, d2h=40e9, update=100e9, dram=200e9, product=700e12
)


def settings(tmp_path: Path, **options: object) -> stages.Settings:
    places = {name: tmp_path / name for name in ("out", "base", "store", "models")}
    return stages.Settings(**places, **options)


# ---- stages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", stages.GROUPS)
def test_a_group_fits_into_a_call(group: str, tmp_path: Path) -> None:
    there = stages.chosen(group)
    assert sum(stage.limit for stage in there) < stages.CALL_SECONDS == 540
    files = {stage.file for stage in there if stage.file} | {stages.SUMMARY, stages.LOGS}
    assert len(files) <= stages.FILES_MAX == 8
    for stage in there:
        # A stage that ends by itself is told to before it is killed.
        command = stage.command(settings(tmp_path, wheel=Path("x.whl")))
        words = command if isinstance(command, list) else []
        for option, unit in (("--minutes", 60), ("--seconds", 1)):
            if option in words:
                assert unit * float(words[words.index(option) + 1]) < stage.limit - runner.GRACE


def test_every_stage_is_in_the_readme_with_its_limit() -> None:
    text = (BENCHES / "device" / "README.md").read_text()
    assert len(stages.STAGES) >= 10
    for stage in stages.STAGES.values():
        assert re.search(rf"^\| `{stage.name}` \| {stage.limit} \|", text, re.MULTILINE), stage.name
    assert all(f"ONLY={group}" in text for group in stages.GROUPS if group != "first")


def test_stages_are_chosen_by_name_and_by_group() -> None:
    first = [stage.name for stage in stages.chosen("")]
    assert first == [stage.name for stage in stages.chosen("first")] and first[0] == "install"
    assert [stage.name for stage in stages.chosen("tests, probe")] == ["probe", "tests"]


def test_an_unknown_stage_is_refused_with_the_list() -> None:
    """By the command itself, before anything is installed or run."""
    environment = os.environ | {"ONLY": "probe,prob", "PYTHON": sys.executable}
    command = ["bash", str(BENCHES / "device_run.sh")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and "prob:" in done.stderr
    assert all(name in done.stderr for name in stages.STAGES)


def test_a_directory_that_the_user_names_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    found = stages.settings_of({"STORE": str(tmp_path), "WORK": str(tmp_path), "OUT": str(tmp_path / "out")})
    run = runner.Run(found)
    run.prepare()
    run.finish()
    assert (tmp_path / "mine").read_text() == "kept"
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "out"}


def test_a_stage_out_of_time_takes_none_of_the_next(tmp_path: Path) -> None:
    """Processes in sessions of their own, and those that do not end when asked, are killed too."""
    seen = tmp_path / "seen"
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    alive = f"{stubborn}\nwhile True: open({str(seen)!r}, 'a').write('x'); time.sleep(0.05)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {alive!r}], start_new_session=True)"
    code += "; time.sleep(600)"
    # In a process of its own: whatever is below it is ended.
    script = f"""
import sys; sys.path.insert(0, {str(BENCHES)!r})
from pathlib import Path
from device import runner, stages
runner.adopt_orphans()
place = Path({str(tmp_path)!r})
run = runner.Run(stages.Settings(place / "out", place / "base", place / "store", place / "models"))
run.prepare()
for limit, code in ((5, {code!r}), (5, "print(1)")):
    run.stage(stages.Stage("trial", ("first",), limit, lambda _: [sys.executable, "-c", code]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second = json.loads((tmp_path / "out" / stages.SUMMARY).read_text())["stages"]
    assert (first["ended"], second["ended"]) == ("out of time", "passed") and first["killed"] >= 2
    assert seen.is_file(), "the process that was to outlive its stage never ran"
    size = seen.stat().st_size
    time.sleep(0.5)
    assert seen.stat().st_size == size


def test_a_stage_that_fails_is_told_and_its_file_is_kept(tmp_path: Path) -> None:
    run = runner.Run(settings(tmp_path))
    run.prepare()
    (tmp_path / "out" / "probe.json").write_text("[1]")
    (tmp_path / "out" / "gpu.json").write_text("{")  # killed while it wrote
    record = {"name": "probe", "limit_s": 5, "ended": "failed", "exit": 3, "seconds": 1.0}
    run._keep(record | {"tail": str(tmp_path / "out")})
    told = json.loads((tmp_path / "out" / stages.SUMMARY).read_text())
    assert told["results"] == {"probe": [1]} and told["stages"][0]["tail"] == "DIR"
    assert "no figure" in summary.table(run.records, tmp_path / "out")


def test_the_table_shows_figures_and_steps(tmp_path: Path) -> None:
    hardware = floor.report(4.0, floor.Moved(h2d=100e9), RATES, {"h2d": 3.0, "compute": 1.0})
    steps = [
        {"name": "1.5B", "step_s": 4.0, "hardware": hardware, "of_resident": 1.25},
        {"name": "3B", "failed": "no room"},
    ]
    exact = [{"name": "resident"}, {"name": "ssd", "losses_equal": True, "weights_equal": False}]
    (tmp_path / "gpu.json").write_text(json.dumps({"rows": {"step": steps, "exact": exact}}))
    counted = {"collected": 97, "passed": 96, "failed": 1, "skipped": 0, "not_run": 0}
    (tmp_path / "tests.json").write_text(json.dumps(counted))
    names = ("tests", "exact", "smoke", "counters")
    records = [{"name": name, "limit_s": 9, "seconds": 1.0, "ended": "passed"} for name in names]
    records[-1] |= {"ended": "skipped", "why": "no ncu"}
    text = summary.table(records, tmp_path)
    assert "| 96 passed of 97 collected, 1 failed |" in text and "| 0 of 1 equal" in text and "| no ncu |" in text
    assert "| 1.5B | 4.00 | 2.00 | h2d | 2.00 | 1.25 | h2d 3.00 s, compute 1.00 s |" in text and "| no room |" in text


def test_tests_are_counted_while_they_run(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest, time\n"
        "@pytest.mark.parametrize('number', range(3))\n"
        "def test_good(number): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "def test_skipped(): pytest.skip('no need')\n"
        "@pytest.fixture\n"
        "def broken(): raise OSError\n"
        "def test_error(broken): pass\n"
        "def test_long(): time.sleep(600)\n"
        "def test_never(): pass\n"
    )
    (tmp_path / "test_unreadable.py").write_text("import no_such_module\n")
    counts = tmp_path / "counts.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "device.counting", "-p", "no:cacheprovider", str(tmp_path)]
    command += ["--continue-on-collection-errors", "-c", os.devnull, "--rootdir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(BENCHES), "MEMASCEND_COUNTS": str(counts)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.1)
            if counts.is_file() and json.loads(counts.read_text())["failed"] == 2:
                break
    finally:
        process.kill()
        process.wait()
    found = json.loads(counts.read_text())
    names = ("collected", "passed", "failed", "skipped", "not_run")
    assert [found[name] for name in names] == [8, 3, 2, 1, 2]
    assert any("1 == 2" in message for message in found["messages"].values())
    assert list(found["collection_errors"]) == ["test_unreadable.py"]


def test_tests_of_several_workers_are_counted_once(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n@pytest.mark.parametrize('number', range(4))\ndef test_some(number): assert number != 2\n"
    )
    out = tmp_path / "counts.json"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "device.counting", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(BENCHES), "MEMASCEND_COUNTS": str(out)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    found = json.loads(out.read_text())
    assert [found[name] for name in ("collected", "passed", "failed", "not_run")] == [4, 3, 1, 0]


def test_files_with_tests_of_a_device_are_found() -> None:
    found = gpu_tests.files()
    assert {path.name for path in found["kernels"]} == {"test_cuda_kernels.py"}
    assert "test_gpu.py" in {path.name for path in found["device"]}
    assert gpu_tests.joined({"a": {"collected": 2, "passed": 1}, "b": {"failed_to_start": "x"}})["collected"] == 2


# ---- probe and floor ----------------------------------------------------------------------------------------


def test_a_part_of_the_probe_that_fails_costs_no_other() -> None:
    def fails():
        yield {"a": 1}
        raise RuntimeError("no drive")

    kept: list[dict] = []
    found = probe.probe(
        {"one": fails, "two": lambda: [{"b": 2.0}]}, 60, lambda rows: kept.append(json.loads(json.dumps(rows)))
    )
    assert found["one"] == [{"a": 1}] and found["two"] == [{"b": 2.0}]
    assert found["failed"] == {"one": "RuntimeError: no drive"}
    assert kept[0] == {"failed": {}, "seconds": {}, "one": [{"a": 1}]}
    late = probe.probe({"one": lambda: [{}], "two": lambda: [{}]}, -1, lambda _: None)
    assert set(late["failed"]) == {"one", "two"} and "one" not in late


def test_a_row_is_shown_in_units() -> None:
    row = {"kind": "cuda", "h2d_bytes_per_s": 55e9, "flops_per_s": 7.9e14, "p90_s": 1e-5, "more": {}}
    assert probe.shown(row) == "kind cuda, h2d 55.00 GB/s, flops_per_s 790.0 TFLOP/s, p90_s 1e-05"
    assert spread([3.0, 1.0, 2.0, 9.0]) == {"median_s": 2.5, "p90_s": 9.0}


def test_rates_are_the_fastest_of_the_probe() -> None:
    workloads = {"read": 2e9, "write": 1e9, "mix": 1.5e9}
    told = {
        "copies": [
            {"kind": "pageable", "h2d_bytes_per_s": 99e9, "d2h_bytes_per_s": 99e9},
            {"kind": "cuda", "h2d_bytes_per_s": 50e9, "d2h_bytes_per_s": 30e9},
            {"kind": "registered", "h2d_bytes_per_s": 45e9, "d2h_bytes_per_s": 40e9},
            {"kind": "registered-4k", "failed": "no"},
        ],
        "drives": [{"place": "shm", "workloads": {"read": 9e9}}, {"place": "store", "workloads": workloads}],
        "updates": [{"threads": 1, "bytes_per_s": 10e9}, {"threads": 8, "bytes_per_s": 100e9}],
        "host_copies": [{"bytes_per_s": 200e9}, {"bytes_per_s": None}],
        "products": [{"dtype": "float32", "flops_per_s": 800e12}, {"dtype": "bfloat16", "flops_per_s": 700e12}],
    }
    assert floor.rates_of(told) == RATES
    assert floor.rates_of({}) == floor.Rates()


@pytest.mark.parametrize(
    ("read", "written", "seconds"),
    [
        (2e9, 0, 1.0),  # reads alone: no mix
        (0, 1e9, 1.0),
        (1.1e9, 0.9e9, 2e9 / 1.5e9),  # just the probe's mixture, faster than one after the other
        (2.2e9, 0.9e9, 2e9 / 1.5e9 + 1.1e9 / 2e9),  # the mixture, and reads that are left
    ],
)
def test_what_a_drive_takes_is_by_what_it_was_measured_with(read: float, written: float, seconds: float) -> None:
    assert floor.drive_seconds(read, written, RATES) == pytest.approx(seconds)


def test_a_drive_takes_no_less_than_one_direction_alone() -> None:
    """A mix that was measured too fast (another file's pages) does not lower the floor below a plain write."""
    fast = floor.Rates(ssd_read=2e9, ssd_write=1e9, ssd_mix=9e9)
    assert floor.drive_seconds(1.1e9, 0.9e9, fast) == pytest.approx(0.9)
    slow = floor.Rates(ssd_read=2e9, ssd_write=1e9, ssd_mix=0.5e9)
    assert floor.drive_seconds(1.1e9, 0.9e9, slow) == pytest.approx(0.55 + 0.9), "apart is faster than mixed"
    assert floor.drive_seconds(1, 1, floor.Rates(ssd_read=1.0)) is None


def test_the_floor_is_the_slowest_part_and_the_gap_is_named() -> None:
    moved = floor.Moved(ssd_read=1e9, h2d=100e9, d2h=40e9, update=100e9, flops=700e12)
    timeline = {"compute": 1.5, "h2d": 2.25, "d2h": 0.0, "ssd_read": 0.25, "ssd_write": 0.0, "cpu_update": 0.0}
    told = floor.report(4.0, moved, RATES, timeline)
    assert told["floors_s"] == pytest.approx(
        {"ssd": 0.5, "h2d": 2.0, "d2h": 1.0, "update": 1.0, "dram": 241 / 200, "flops": 1.0}
    )
    assert (told["bound_by"], told["floor_s"], told["of_floor"], told["gap_s"]) == ("h2d", 2.0, 2.0, 2.0)
    assert list(told["where_s"])[:3] == ["h2d", "compute", "ssd_read"]
    # Of the waits for the drive (0.25 of 0.5 s) nothing is beyond its work.
    assert told["waits_beyond_s"] == pytest.approx({"flops": 0.5, "h2d": 0.25})
    assert told["not_measured"] == []


def test_a_step_without_rates_has_no_floor() -> None:
    told = floor.report(4.0, floor.Moved(h2d=1e9), floor.Rates(product=1e12), None)
    assert told["not_measured"] == ["d2h", "dram", "h2d", "ssd", "update"]
    assert told["floor_s"] is None and told["of_floor"] is None and told["where_s"] is None


def test_operations_of_a_llama_are_counted() -> None:
    hidden, intermediate, layers, heads, kv_heads, words, tokens, sequence = 8, 16, 3, 2, 1, 32, 20, 10
    weights = 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16
    attention = 2 * (2 * tokens * sequence * hidden) / 2
    layer = 2 * weights * tokens + attention
    head = 2 * words * hidden * tokens
    shape = (hidden, intermediate, layers, heads, kv_heads)
    count = floor.llama_flops(shape, words, tokens, sequence, recomputed=False)
    assert count == 3 * layers * layer + 3 * head
    assert floor.llama_flops(shape, words, tokens, sequence, recomputed=True) == count + layers * layer
    spared = layers * 2 * weights * tokens + head
    assert floor.llama_flops(shape, words, tokens, sequence, recomputed=False, frozen=True) == count - spared


def test_counters_are_read_from_what_the_profiler_prints() -> None:
    printed = """==PROF== Connected
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","overflow_bf16","gpu__time_duration.sum","us","341.2"
"0","overflow_bf16","dram__bytes_read.sum","Gbyte","1.07"
"0","overflow_bf16","other","","1"
"1","overflow_f32","gpu__time_duration.sum","us","340.0"
"""
    assert counters.parsed(printed) == [
        {"kernel": "overflow_bf16", "time": "341.2 us", "bytes_read": "1.07 Gbyte"},
        {"kernel": "overflow_f32", "time": "340.0 us"},
    ]
    assert counters.parsed("==ERROR== no counters") == []


def test_the_environment_is_described_without_a_device(tmp_path: Path) -> None:
    found = environment.environment(tmp_path)
    assert not [name for name, part in found.items() if isinstance(part, dict) and "failed" in part]
    text = json.dumps(found)
    assert found["memory"]["available_bytes"] > 0 and found["io_uring"]["engine"]
    assert str(tmp_path) not in text and os.uname().nodename not in text
