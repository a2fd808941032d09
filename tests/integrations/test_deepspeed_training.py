"""DeepSpeed ZeRO-3 with memascend behind it: the same bits from every part of it, and errors of drives."""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed_run
import faults
import forked_workers
import pytest
from deepspeed_parts import IN_MEMORY, LARGER_PARTS, MIB, PARTS, POOLS, STREAMS, for_pools, for_streaming
from deepspeed_run import environment

from memascend.forecast.deepspeed.forecast import as_text, forecast

pytestmark = pytest.mark.filterwarnings("ignore")

SCRIPT = deepspeed_run.__file__
TIERS = ("A", "AB", "ABC")


#: Every case is trained with each of `TIERS`, and without offload by PyTorch's fused AdamW. The sizes of the model's
#: partitions are no multiples of a drive's block.
CASES: dict[str, dict[str, Any]] = {
    "bfloat16": {"clip": 0.0, "buffer_size": 0, "in_memory": 1_000_000_000},
    "clipping, sub-groups, accumulated": {"layers": 2, "sub_group": 1_000_000, "accumulated": 2},
    "float16 with overflows": {"dtype": "float16", "initial_scale_power": 22, "steps": 6},
}
#: In `make soak`.
MORE_CASES: dict[str, dict[str, Any]] = {
    "some weights in memory": {"layers": 2, "sub_group": 1_000_000, "clip": 0.0, "in_memory": 3_000_000},
    "float32 in sub-groups": {"dtype": "float32", "clip": 0.0, "sub_group": 1_000_000},
    "float16 with overflows, accumulated": {
        "dtype": "float16",
        "initial_scale_power": 22,
        "steps": 6,
        "accumulated": 2,
        "clip": 0.0,
    },
    "norms in memory, pipelined": {"persistent": 100_000, "sub_group": 100_000, "pipelined": True},
}
#: By name: the host memory of runs that keep states there, some of them or, in `make soak`, all.
KEPT = {"some": "70MiB"}
if os.environ.get("MEMASCEND_DEEPSPEED_CASES") == "all":
    CASES |= MORE_CASES
    KEPT["all"] = "1GiB"
#: Of losses and norms relative to those without offload, where gradients are clipped: DeepSpeed rounds the norm to
#: float32 there, and here keeps float64. One unit in the last place of the norm moves some bfloat16 weights by one.
CLIPPED = 2e-4
SAVED = {"sub_group": 1_000_000, "steps": 2}
RANKS = {"ranks": 2, "sub_group": 1_000_000}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The results of each rank of each run, by the name of the run. One of pytest's processes has it all trained."""
    folder = tmp_path_factory.getbasetemp()
    if os.environ.keys() & {"PYTEST_XDIST_WORKER", forked_workers.VARIABLE}:
        folder = folder.parent
    folder = folder / "trained"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _train(folder)


def _train(folder: Path) -> dict[str, list[dict[str, Any]]]:
    runs: dict[str, dict[str, Any]] = {}
    for case, options in CASES.items():
        for tiers in TIERS if case == "bfloat16" else ("A", "ABC"):
            runs[f"{case} {tiers}"] = options | {"tiers": tiers}
        runs[f"{case} none"] = options | {"tiers": "", "device": "none"}
    for tiers in ("A", "ABC"):
        runs[f"ranks {tiers}"] = RANKS | {"tiers": tiers}
        runs[f"saved {tiers}"] = SAVED | {"tiers": tiers, "save": f"{folder}/saved {tiers}"}
    for saved, tiers in itertools.product(("A", "ABC"), repeat=2):
        runs[f"loaded {saved} {tiers}"] = SAVED | {"tiers": tiers, "seed": 2, "load": f"{folder}/saved {saved}"}
    # Gradients stay in memory too.
    for name, host_memory in KEPT.items() if STREAMS else ():
        keeps = {"tiers": "ABC", "host_memory": host_memory}
        runs[f"bfloat16 {name} kept"] = CASES["bfloat16"] | keeps
        runs[f"saved {name} kept"] = SAVED | keeps | {"save": f"{folder}/saved {name} kept"}
        for saved in ("ABC", f"{name} kept"):
            runs[f"loaded {saved} {name} kept"] = SAVED | keeps | {"seed": 2, "load": f"{folder}/saved {saved}"}
    if STREAMS:
        # As many as a larger model has; a model of this size has three.
        runs["bfloat16 eight slots"] = CASES["bfloat16"] | {"tiers": "ABC", "slots": 8}
        runs["bfloat16 blocks returned"] = CASES["bfloat16"] | {"tiers": "ABC", "keep_blocks": False}
    for tiers in ("A", "ABC") if POOLS else ():
        runs[f"cut {tiers}"] = {"tiers": tiers, "cut": "exp_avg-*", "cut_after": 2}
    listed = [options | IN_MEMORY | {"folder": f"{folder}/run {name}"} for name, options in runs.items()]
    file = folder / "runs.json"
    results = file.with_suffix(".found")
    if not results.exists():
        file.write_text(json.dumps(listed))
        done = subprocess.run([sys.executable, SCRIPT, str(file)], env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    found = json.loads(results.read_text())
    return dict(zip(runs, found, strict=True))


def without_memory(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert not [rank["error"] for rank in found if rank["error"]]
    others = ("peak_bytes", "kept_bytes", "block_bytes", "streams", "slots", "told", "parts")
    return [{name: value for name, value in rank.items() if name not in others} for rank in found]


@pytest.mark.parametrize("case", CASES)
def test_all_parts_give_the_same_bits(case: str, trained: dict[str, list[dict[str, Any]]]) -> None:
    expected = without_memory(trained[f"{case} A"])
    for tiers in TIERS[1:]:
        if f"{case} {tiers}" in trained:
            assert without_memory(trained[f"{case} {tiers}"]) == expected
    (streamed,) = trained[f"{case} ABC"]
    assert streamed["streams"] == (streamed["sub_groups"] if STREAMS else 0)
    assert [part for part in streamed["parts"] if part != "gloo"] == PARTS + LARGER_PARTS
    assert (streamed["sub_groups"] > 1) == ("sub_group" in CASES[case])
    # It has trained: no loss like another, and no step left out unless it overflowed.
    assert len(set(streamed["losses"])) == len(streamed["losses"])
    # Old versions of DeepSpeed tell no norm of a step that is left out: it is the norm of the step before, at first 0.
    overflowed = [norm == 0 or not math.isfinite(norm) for norm in streamed["norms"]]
    assert streamed["skipped"] == sum(overflowed)
    assert (0 < sum(overflowed) < len(overflowed)) == (CASES[case].get("dtype") == "float16")


@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_without_offload(case: str, trained: dict[str, list[dict[str, Any]]]) -> None:
    (expected,), (found,) = trained[f"{case} none"], trained[f"{case} ABC"]
    assert not expected["error"]
    assert found["skipped"] == expected["skipped"]
    if CASES[case].get("clip") == 0.0:
        assert found["losses"] == expected["losses"]
        assert found["weights"] == expected["weights"]
        # DeepSpeed adds the squares up in another order.
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6)
    else:
        # Nothing has been clipped before these.
        first = found["skipped"]
        assert found["losses"][: first + 1] == expected["losses"][: first + 1]
        assert found["losses"] == pytest.approx(expected["losses"], rel=CLIPPED)
        assert found["norms"] == pytest.approx(expected["norms"], rel=CLIPPED)


@for_pools
def test_memory_is_that_of_what_is_in_use(trained: dict[str, list[dict[str, Any]]]) -> None:
    whole, pools, streamed = (trained[f"bfloat16 {tiers}"][0]["peak_bytes"] for tiers in TIERS)
    # DeepSpeed's own pool of parameters: 5 buffers of 10^8 elements.
    assert whole > 1_000_000_000
    assert pools < 400_000_000
    if STREAMS:
        # Masters and moments are 12 bytes for each of 3 million parameters; from run to run a peak differs by 20 MB.
        assert streamed < pools - 10_000_000


def test_two_ranks(trained: dict[str, list[dict[str, Any]]]) -> None:
    found = trained["ranks ABC"]
    assert without_memory(found) == without_memory(trained["ranks A"])
    assert found[0]["sub_groups"] > 1
    assert found[0]["streams"] == (found[0]["sub_groups"] if STREAMS else 0)
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["norms"] == found[1]["norms"]
    assert found[0]["losses"] != found[1]["losses"]


def test_checkpoints_are_interchangeable(trained: dict[str, list[dict[str, Any]]]) -> None:
    assert without_memory(trained["saved A"]) == without_memory(trained["saved ABC"])
    for tiers in ("A", "ABC"):
        expected = without_memory(trained[f"loaded A {tiers}"])
        assert without_memory(trained[f"loaded ABC {tiers}"]) == expected
    # DeepSpeed's own begins with moments of zeros again.
    assert expected[0]["losses"][0] == trained["loaded A A"][0]["losses"][0]
    assert (expected[0]["losses"] != trained["loaded A A"][0]["losses"]) == STREAMS
    # It has gone on: not from the start, and not from where the checkpoint is.
    assert expected[0]["losses"][0] != trained["saved A"][0]["losses"][0]
    assert expected[0]["weights"] != trained["saved A"][0]["weights"]


@for_streaming
@pytest.mark.parametrize("case", [*CASES, "ranks"])
def test_the_plan_is_that_of_the_command(case: str, trained: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    run = deepspeed_run.Run(str(tmp_path), **CASES.get(case, RANKS))
    deepspeed_run.model_config(run).save_pretrained(tmp_path)
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(run.configuration()))
    planned = forecast(tmp_path, file, ranks=run.ranks)
    (told, *others) = (rank["told"] for rank in trained[f"{case} ABC"])
    assert as_text(planned).split("\n\n")[1] in told
    assert not any("host memory" in other for other in others)
    assert (planned["sub_groups"] > 1) == ("sub_group" in CASES.get(case, RANKS))


@for_streaming
@pytest.mark.parametrize("kept", [f"{name} kept" for name in KEPT])
def test_states_in_memory_change_no_bits(kept: str, trained: dict[str, list[dict[str, Any]]]) -> None:
    for run in ("bfloat16", "saved"):
        assert without_memory(trained[f"{run} {kept}"]) == without_memory(trained[f"{run} ABC"])
    # Checkpoints hold the resident states, and loaded ones replace them.
    expected = without_memory(trained["loaded ABC ABC"])
    assert without_memory(trained[f"loaded ABC {kept}"]) == expected
    assert without_memory(trained[f"loaded {kept} {kept}"]) == expected
    states = 12 * sum(parameter_numels())
    (found,) = trained[f"bfloat16 {kept}"]
    assert found["kept_bytes"] == states if kept == "all kept" else 0.1 * states < found["kept_bytes"] < 0.9 * states


@for_streaming
def test_the_number_of_slots_changes_no_bits(trained: dict[str, list[dict[str, Any]]]) -> None:
    assert without_memory(trained["bfloat16 eight slots"]) == without_memory(trained["bfloat16 ABC"])
    (three,), (eight,) = trained["bfloat16 ABC"], trained["bfloat16 eight slots"]
    assert (three["slots"], eight["slots"]) == (3, 8)


@for_streaming
def test_malloc_keeps_the_blocks_of_temporaries_unless_it_may_not(trained: dict[str, list[dict[str, Any]]]) -> None:
    assert without_memory(trained["bfloat16 blocks returned"]) == without_memory(trained["bfloat16 ABC"])
    (kept,), (returned,) = trained["bfloat16 ABC"], trained["bfloat16 blocks returned"]
    assert kept["block_bytes"] > 7 * MIB and returned["block_bytes"] < MIB


def parameter_numels() -> list[int]:
    return [parameter.numel() for parameter in deepspeed_run.build(deepspeed_run.Run("")).parameters()]


def alone(folder: Path, **options: Any) -> subprocess.Popen[str]:
    """Start one run as a script that imports memascend.deepspeed, where no compiler is found."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    file = folder / "run.json"
    tiers = options.get("tiers", "ABC")
    file.write_text(json.dumps([{"folder": str(folder), "steps": 3} | options | IN_MEMORY]))
    variables = environment(MEMASCEND_DEEPSPEED_TIERS=tiers, PATH=str(programs))
    for name in ("CC", "CXX"):
        variables.pop(name, None)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, SCRIPT, "--alone", str(file)], env=variables, **pipes)


def test_no_compiler_is_needed(trained: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    process = alone(tmp_path / "run", **CASES["bfloat16"])
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "gloo in place of compiled collectives" in err
    found = json.loads(out.splitlines()[-1])
    assert found["streams"] == STREAMS
    assert found["losses"] == trained["bfloat16 ABC"][0]["losses"][:3]


@for_pools
@pytest.mark.parametrize("tiers", ["A", "ABC"])
def test_a_swap_file_that_was_cut_ends_training(tiers: str, trained: dict[str, list[dict[str, Any]]]) -> None:
    (found,) = trained[f"cut {tiers}"]
    kind, _, told = found["error"].splitlines()[-1].partition(": ")
    assert kind == "memascend.errors.StoreError"
    assert "/exp_avg-" in told
    assert "shorter" in told


@pytest.mark.root
@for_pools
@pytest.mark.parametrize("tiers", ["A", "ABC"])
def test_a_full_drive_ends_the_script(tiers: str, tmp_path: Path) -> None:
    with faults.mounted("ext4", 96 * MIB, tmp_path / "drive") as drive:
        # Weights and masters fit; moments and gradients do not.
        process = alone(tmp_path / "run", tiers=tiers, swap=str(drive.path), leave_free=4 * MIB)
        _, err = process.communicate()
        assert process.returncode == 1, err
        last = err[err.rindex("memascend.errors.StoreError: ") :]
        assert f"{drive.path}/" in last
        assert "No space left on device" in last
        assert "free" in last.split("No space left on device")[1]


@pytest.mark.root
@for_pools
def test_a_drive_that_fails_ends_the_script(tmp_path: Path) -> None:
    with faults.mounted("ext4", 128 * MIB, tmp_path / "drive") as drive:
        assert drive.device is not None
        backing = f"/proc/{os.getpid()}/fd/{drive.device.backing}"
        process = alone(tmp_path / "run", swap=str(drive.path), cut_after=2, backing=backing, left=32 * MIB, steps=4)
        out, err = process.communicate()
        assert process.returncode == 1, err
        assert '"losses"' not in out
        last = err[err.rindex("memascend.errors.StoreError: ") :]
        assert f"{drive.path}/" in last
        assert "Input/output error" in last
        assert "dmesg" in last.split("Input/output error")[1]
