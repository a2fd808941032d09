"""DeepSpeed ZeRO-3 with memascend behind it: the same bits from every part of it, its operators, and starting it."""

from __future__ import annotations

import errno
import fcntl
import gc
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
import types
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed_run
import lab
import needs
import pytest
import torch
from deepspeed_run import environment
from packaging.version import Version

import memascend
from memascend.forecast.deepspeed.forecast import as_text, forecast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

if importlib.util.find_spec("deepspeed") is None:
    needs.unmet("deepspeed", "deepspeed is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")

SCRIPT = deepspeed_run.__file__
TIERS = ("A", "AB", "ABC")
MIB = 1 << 20

#: The parts that are in force with the version of DeepSpeed that is installed, and those that it is too old for.
installed_version = Version(importlib.metadata.version("deepspeed"))
POOLS, STREAMS = installed_version >= Version("0.19.4"), installed_version >= Version("0.19.5")
PARTS = ["async_io", *(["pin_memory"] if STREAMS else []), "cpu_adam", "fused_adam"]
ALL_LARGER_PARTS = ["parameter pools", "gradients", "streaming step", "loading of checkpoints"]
LARGER_PARTS = ALL_LARGER_PARTS if STREAMS else ALL_LARGER_PARTS[:1] if POOLS else []
#: Before 0.19.4 DeepSpeed swaps out updated tensors only from memory that CUDA has pinned. Without a GPU such a version
#: keeps optimizer states in memory, and weights in files only until it makes the optimizer.
IN_MEMORY: dict[str, Any] = {} if POOLS else {"optimizer": "cpu", "in_memory": 1_000_000_000}
#: For tests of what is not in force with an old DeepSpeed.
for_pools = pytest.mark.skipif(not POOLS, reason=f"DeepSpeed {installed_version} keeps its own pools")
for_streaming = pytest.mark.skipif(not STREAMS, reason=f"DeepSpeed {installed_version} keeps its own step")

# ---- training -----------------------------------------------------------------------------------------------

#: Every case is trained with each of `TIERS`, and without offload by PyTorch's fused AdamW. The sizes of the model's
#: partitions are no multiples of what drives read.
CASES: dict[str, dict[str, Any]] = {
    "bfloat16": {"clip": 0.0, "buffer_size": 0, "in_memory": 1_000_000_000},
    "clipping, sub-groups, accumulated": {"layers": 2, "sub_group": 1_000_000, "accumulated": 2},
    "some weights in memory": {"layers": 2, "sub_group": 1_000_000, "clip": 0.0, "in_memory": 3_000_000},
    "float16 with overflows": {"dtype": "float16", "initial_scale_power": 22, "steps": 6},
}
#: In `make soak`.
MORE_CASES: dict[str, dict[str, Any]] = {
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
if os.environ.get("MEMASCEND_DEEPSPEED_CASES") == "all":
    CASES |= MORE_CASES
#: Of losses and norms relative to those without offload, where gradients are clipped: DeepSpeed rounds the norm to
#: float32 there, and here keeps float64. One unit in the last place of the norm moves some bfloat16 weights by one.
CLIPPED = 2e-4
SAVED = {"sub_group": 1_000_000, "steps": 2}
RANKS = {"ranks": 2, "sub_group": 1_000_000}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank of each run has found, by the name of the run. One of pytest's processes has it all trained."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
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
    # Some states stay in memory in the first, all in the second, and gradients in both.
    for name, host_memory in (("some", "70MiB"), ("all", "1GiB")) if STREAMS else ():
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
@pytest.mark.parametrize("kept", ["some kept", "all kept"])
def test_states_in_memory_change_no_bits(kept: str, trained: dict[str, list[dict[str, Any]]]) -> None:
    for run in ("bfloat16", "saved"):
        assert without_memory(trained[f"{run} {kept}"]) == without_memory(trained[f"{run} ABC"])
    # Checkpoints hold what was in memory, and what is loaded takes its place.
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


# ---- a script of its own ------------------------------------------------------------------------------------


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
    with lab.mounted("ext4", 96 * MIB, tmp_path / "drive") as drive:
        # Weights and masters fit; moments and gradients do not.
        process = alone(tmp_path / "run", tiers=tiers, swap=str(drive.path), leave_free=4 * MIB)
        _, err = process.communicate()
        assert process.returncode == 1, err
        last = err[err.rindex("memascend.errors.StoreError: ") :]
        assert f"{drive.path}/" in last
        assert "No space left on device" in last
        assert "free" in last.split("No space left on device")[1]


@pytest.mark.root
def test_a_drive_that_fails_ends_the_script(tmp_path: Path) -> None:
    with lab.mounted("ext4", 128 * MIB, tmp_path / "drive") as drive:
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


# ---- installing ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deepspeed() -> Iterator[types.ModuleType]:
    """DeepSpeed in this process, on its processor, with memascend behind it."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("DS_ACCELERATOR", "cpu")
        patch.delenv("MEMASCEND_DEEPSPEED_TIERS", raising=False)
        import deepspeed
        from deepspeed.runtime.zero import stage3  # noqa: F401

        import memascend.deepspeed

        yield deepspeed
        memascend.deepspeed.uninstall()


@pytest.fixture
def stock(deepspeed: types.ModuleType) -> Iterator[types.ModuleType]:
    """DeepSpeed as it is without memascend, which comes back after the test."""
    memascend.deepspeed.uninstall()
    yield deepspeed
    memascend.deepspeed.uninstall()
    memascend.deepspeed.install()


def everything() -> dict[tuple[str, str], dict[str, Any]]:
    """Return what all modules and classes of DeepSpeed hold, and what it keeps elsewhere."""
    found: dict[tuple[str, str], dict[str, Any]] = {("sys", ""): {n: v for n, v in vars(sys).items() if "deep" in n}}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "deepspeed" or module is None:
            continue
        contents = dict(vars(module))
        found[name, ""] = {n: value for n, value in contents.items() if not isinstance(value, types.ModuleType)}
        for cls in contents.values():
            if isinstance(cls, type) and cls.__module__ == name:
                found[name, cls.__qualname__] = dict(vars(cls))
                loaded = vars(cls).get("_loaded_ops")
                if loaded is not None:
                    found[name, f"{cls.__qualname__}._loaded_ops"] = dict(loaded)
    return found


def changed(before: dict[tuple[str, str], dict[str, Any]]) -> set[tuple[str, str, str]]:
    """Return where something else is held now: a module, a class and a name."""
    after = everything()
    return {
        (*owner, name)
        for owner, contents in before.items()
        for name in contents.keys() | after.get(owner, {}).keys()
        if contents.get(name, ...) is not after.get(owner, {}).get(name, ...)
    }


def test_uninstall_leaves_nothing(stock: types.ModuleType) -> None:
    assert memascend.deepspeed.installed() == []
    before = everything()
    parts = memascend.deepspeed.install()
    assert [part for part in parts if part != "gloo"] == PARTS + LARGER_PARTS
    names = {name for _, _, name in changed(before)}
    expected = {"async_io", "is_compatible"}
    if STREAMS:
        expected |= {"_deepspeed_pin_memory_op_module", "step", "has_overflow"}
    assert expected <= names
    installed = everything()
    assert memascend.deepspeed.install() == parts == memascend.deepspeed.installed()
    assert not changed(installed)
    memascend.deepspeed.uninstall()
    assert memascend.deepspeed.installed() == []
    assert not changed(before)
    memascend.deepspeed.uninstall()
    assert not changed(before)


@pytest.fixture(params=[True, False], ids=["at import", "when needed"])
def asks(request: pytest.FixtureRequest, stock: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have DeepSpeed find out which operators there are when it is imported, as before 0.19.8, or when it needs to."""
    operators = sys.modules["deepspeed.ops"]
    known = dict(operators.__compatible_ops__)
    if not request.param:
        if "__getattr__" not in vars(operators):
            pytest.skip(f"DeepSpeed {installed_version} does so when it is imported")
        return
    monkeypatch.delattr(operators, "__getattr__", raising=False)
    monkeypatch.setattr(operators, "__compatible_ops__", known, raising=False)


def test_operators_are_known_to_be_there(asks: None, stock: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed.ops

    # As on a machine without libaio, whatever this one has.
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    monkeypatch.setattr(type(ALL_OPS["async_io"]), "is_compatible", lambda self, verbose=False: False)
    if hasattr(deepspeed.ops, "__getattr__"):
        vars(deepspeed.ops).pop("__compatible_ops__", None)
    else:
        monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "async_io", False)
    assert not deepspeed.ops.__compatible_ops__["async_io"]
    memascend.deepspeed.install()
    assert deepspeed.ops.__compatible_ops__["async_io"]
    assert AsyncIOBuilder().load().aio_handle().get_queue_depth() == 128
    with pytest.raises(AttributeError, match=r"uninstall\(\)"):
        _ = AsyncIOBuilder().load().gds_handle
    memascend.deepspeed.uninstall()
    assert not deepspeed.ops.__compatible_ops__["async_io"]
    if hasattr(deepspeed.ops, "__getattr__"):
        vars(deepspeed.ops).pop("__compatible_ops__", None)


def test_collectives_are_known_to_be_missing(
    asks: None, stock: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if not hasattr(deepspeed.ops, "__getattr__"):
        monkeypatch.setitem(deepspeed.ops.__compatible_ops__, builder.NAME, True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "gloo" in memascend.deepspeed.install()
    assert not builder.is_compatible()
    assert not deepspeed.ops.__compatible_ops__[builder.NAME]


def test_a_deepspeed_without_an_operator_for_pinned_memory(
    stock: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import deepspeed.ops.op_builder.cpu

    for package in (deepspeed.ops.op_builder, deepspeed.ops.op_builder.cpu):
        monkeypatch.delattr(package, "PinMemoryBuilder", raising=False)
    parts = memascend.deepspeed.install()
    assert "async_io" in parts
    assert "pin_memory" not in parts
    assert not hasattr(sys, "_deepspeed_pin_memory_op_module")


@pytest.mark.parametrize("version", ["0.17.9", "0.20.0", "0.20.1+cpu", "1.0"])
def test_other_versions_are_left_alone(version: str, stock: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "__version__", version)
    before = everything()
    with pytest.warns(UserWarning, match=rf"{version.replace('+', '[+]')}, as it is"):
        assert memascend.deepspeed.install() == []
    assert not changed(before)


#: What each piece of DeepSpeed's code is needed for, by the number of larger parts that do without it.
NEEDED = {
    "SwapBufferManager": 0,
    "PartitionedOptimizerSwapper": 0,
    "partition_grads": 1,
    "step": 2,
    "load_checkpoint": 3,
}


@for_streaming
@pytest.mark.parametrize("name", NEEDED)
def test_parts_that_need_unknown_code_are_left_out(
    name: str, stock: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memascend.integrations.deepspeed import versions

    monkeypatch.setitem(versions.KNOWN, name, {"0123456789abcdef"})
    before = everything()
    fitting, left_out = ALL_LARGER_PARTS[: NEEDED[name]], ALL_LARGER_PARTS[NEEDED[name] :]
    with pytest.warns(UserWarning, match=rf"leaves out its {', '.join(left_out)} with .* does not know: {name}\. "):
        parts = memascend.deepspeed.install()
    assert [part for part in parts if part != "gloo"] == PARTS + fitting
    replaced = {"SwapBufferManager": 1, "partition_grads": 2, "step": 3, "load_checkpoint": 4}
    expected = {changed_name for changed_name, part in replaced.items() if part <= len(fitting)}
    assert replaced.keys() & {changed_name for _, _, changed_name in changed(before)} == expected


@for_streaming
def test_parts_that_cannot_be_imported_are_left_out(stock: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero import stage3

    from memascend.integrations.deepspeed import gradients

    # Its import asks for the method.
    monkeypatch.delattr(stage3.DeepSpeedZeroOptimizer_Stage3, "partition_grads")
    monkeypatch.delitem(sys.modules, gradients.__name__)
    monkeypatch.delattr(sys.modules[gradients.__package__], "gradients")
    with pytest.warns(UserWarning, match=r"leaves out its gradients, .* does not know: partition_grads\. "):
        parts = memascend.deepspeed.install()
    assert [part for part in parts if part != "gloo"] == PARTS + ALL_LARGER_PARTS[:1]


def test_a_method_that_is_gone_is_unknown(stock: types.ModuleType) -> None:
    from deepspeed.runtime.zero import stage3

    from memascend.integrations.deepspeed import versions

    cls = "DeepSpeedZeroOptimizer_Stage3"
    assert versions.unknown(stage3, cls, ["step", "no_such_method"]) == ["no_such_method"]
    assert versions.unknown(stage3, "NoSuchClass") == ["NoSuchClass"]


# ---- starting scripts ---------------------------------------------------------------------------------------

TELLS = """
import json, sys
import deepspeed
import memascend.deepspeed
print(json.dumps([__name__, sys.argv, sys.path[0], memascend.deepspeed.installed()]))
sys.exit(3)
"""
WATCHES = """
import json, sys
print(json.dumps([getattr(sys, "hidden", None), sorted(sys.modules.keys() & {"memascend", "torch", "deepspeed"})]))
if "deepspeed" in sys.argv:
    import deepspeed
    from deepspeed.ops.op_builder import AsyncIOBuilder
    print(json.dumps([sys.modules["memascend.deepspeed".replace(".", ".integrations.")].installed(),
                      AsyncIOBuilder().load().aio_handle.__module__]))
"""


def launched(
    *arguments: object, cwd: Path, python: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *python, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment(**variables), capture_output=True, text=True)


LAUNCH = ("-m", "memascend.deepspeed")


def test_a_script_is_started_with_its_arguments(tmp_path: Path) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    script = folder / "tells.py"
    script.write_text(TELLS)
    done = launched(*LAUNCH, "--local_rank=0", "scripts/tells.py", "a", "b", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    name, argv, first, parts = json.loads(done.stdout.splitlines()[-1])
    assert (name, first) == ("__main__", str(folder))
    assert argv == ["scripts/tells.py", "--local_rank=0", "a", "b"]
    assert set(PARTS + LARGER_PARTS) <= set(parts)


def test_a_module_is_started_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    done = launched(*LAUNCH, "-m", "tells", "a", "--hook", "-m", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    name, argv, _, parts = json.loads(done.stdout.splitlines()[-1])
    assert name == "__main__"
    assert (Path(argv[0]).name, argv[1:]) == ("tells.py", ["a", "--hook", "-m"])
    assert set(PARTS + LARGER_PARTS) <= set(parts)


def test_what_cannot_be_started_is_told() -> None:
    from memascend.integrations.deepspeed.launch import main

    for arguments in ([], ["-m"], ["--no-such-option"]):
        assert main(list(arguments)) == 2


def test_a_missing_script_is_named(deepspeed: types.ModuleType, tmp_path: Path, capsys: Any) -> None:
    from memascend.integrations.deepspeed.launch import main

    missing = str(tmp_path / "no such script.py")
    assert main([missing, "a"]) == 2
    assert missing in capsys.readouterr().err


@pytest.fixture(scope="module")
def hook(tmp_path_factory: pytest.TempPathFactory) -> str:
    done = launched(*LAUNCH, "--hook", cwd=tmp_path_factory.mktemp("hook"))
    assert done.returncode == 0, done.stderr
    return done.stdout.removesuffix("\n")


def test_the_hook_waits_for_deepspeed(hook: str, tmp_path: Path) -> None:
    (tmp_path / "watches.py").write_text(WATCHES)
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.hidden = __name__, __file__\n")
    path = os.pathsep.join([hook, str(hidden), *filter(None, sys.path)])
    done = launched("watches.py", "deepspeed", cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    before, after = map(json.loads, done.stdout.splitlines()[-2:])
    # Nothing is imported for a process that does not import deepspeed, and the other sitecustomize has run.
    assert before == [["sitecustomize", str(hidden / "sitecustomize.py")], []]
    parts, module = after
    assert set(PARTS + LARGER_PARTS) <= set(parts)
    assert module == "memascend.integrations.deepspeed.files"


# ---- files --------------------------------------------------------------------------------------------------


@pytest.fixture
def handle(deepspeed: types.ModuleType) -> Any:
    from memascend.integrations.deepspeed.files import AioHandle

    return AioHandle()


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_options_are_kept(deepspeed: types.ModuleType) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    made = AsyncIOBuilder().load().aio_handle(1 << 17, 64, True, True, 4)
    assert made.get_block_size() == 1 << 17
    assert made.get_queue_depth() == 64
    assert made.get_single_submit() is made.get_overlap_events() is True
    assert made.get_intra_op_parallelism() == 4
    assert made.get_alignment() == 2048


@pytest.mark.parametrize("seed", range(3))
def test_transfers_at_any_offset(handle: Any, tmp_path: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def any_of(most: int) -> int:
        # Short ones, whole pages, and anything.
        most = (16, 4096, 70_000, most)[int(torch.randint(4, (), generator=generator))]
        value = int(torch.randint(most, (), generator=generator))
        return value // 4096 * 4096 if torch.rand((), generator=generator) < 0.3 else value

    file = tmp_path / "file"
    expected = bytearray()
    for turn in range(60):
        offset = min(any_of(3_000_000), len(expected)) if turn % 3 else any_of(3_000_000)
        data = random_bytes(any_of(2_000_000) + 3, seed=turn)[turn % 3 :]
        if turn % 2:
            assert handle.sync_pwrite(data, str(file), offset) == 1
        else:
            assert handle.async_pwrite(data, file, offset) == 0
            assert handle.wait() == 1
        expected.extend(bytes(max(0, offset + data.numel() - len(expected))))
        expected[offset : offset + data.numel()] = data.numpy().tobytes()
        at = min(any_of(len(expected)), len(expected) - 1)
        found = torch.zeros(len(expected) - at, dtype=torch.uint8)
        assert handle.sync_pread(found, str(file), at) == 1
        assert found.numpy().tobytes() == expected[at:]
    assert file.read_bytes() == expected


def test_every_way_to_start_a_transfer(handle: Any, tmp_path: Path) -> None:
    data = torch.arange(5000, dtype=torch.float32)
    path = str(tmp_path / "file")
    assert handle.write(data, path, True) == 0
    assert handle.pwrite(data + 1, path, True, False) == 1
    assert handle.pwrite(data + 2, path, False, True, file_offset=20_000) == 0
    assert handle.pwrite(data + 3, path, False, **{"async": True}, file_offset=40_000) == 0
    assert handle.wait() == 2
    assert handle.wait() == 0
    found = torch.zeros(15_000)
    assert handle.read(found, path, True) == 0
    assert torch.equal(found, torch.cat([data + 1, data + 2, data + 3]))
    found.zero_()
    assert handle.pread(found[:5000], path, True, False, 20_000) == 1
    assert handle.async_pread(found[5000:10_000], path, 0) == 0
    assert handle.pread(found[10_000:], path, True, True, 40_000) == 0
    assert handle.wait() == 2
    assert torch.equal(found, torch.cat([data + 2, data + 1, data + 3]))
    with open(path, "r+b") as file:
        assert handle.async_pwrite(data, fd=file.fileno()) == 0
        assert handle.async_pwrite(data, file.fileno(), 20_000) == 0
        assert handle.wait() == 2
    handle.read(found, path, False)
    assert torch.equal(found, torch.cat([data, data, data + 3]))
    for wrong in (lambda: handle.pread(found, path, True), lambda: handle.async_pwrite(found)):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(ValueError, match="negative"):
        handle.async_pread(found, path, -1)
    assert handle.wait() == 0


def test_the_functions_of_the_operator(deepspeed: types.ModuleType, tmp_path: Path) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    operator = AsyncIOBuilder().load()
    data, found = torch.arange(1000.0), torch.zeros(1000)
    assert operator.aio_write(data, str(tmp_path / "file"), 1 << 20, 8, False, False, False) == 0
    assert operator.aio_read(found, str(tmp_path / "file"), 1 << 20, 8, False, False, False) == 0
    assert torch.equal(found, data)
    assert operator.deepspeed_memcpy(found, data + 1) == 0
    assert torch.equal(found, data + 1)


def test_tensors_that_are_not_contiguous(handle: Any, tmp_path: Path) -> None:
    whole = torch.arange(600.0).reshape(20, 30)
    for number, view in enumerate((whole.t(), whole[::2], whole[:, 3:7], whole[3:4].expand(5, 30))):
        path = str(tmp_path / str(number))
        assert handle.sync_pwrite(view, path) == 1
        assert Path(path).read_bytes() == view.contiguous().numpy().tobytes()
    target = torch.zeros(20, 30)
    handle.async_pread(target[:, ::3], str(tmp_path / "0"))
    assert handle.wait() == 1
    assert torch.equal(target[:, ::3].reshape(-1), whole.t().reshape(-1)[:200])
    assert not target[:, 1::3].any()
    # A leaf that needs a gradient, and one in bfloat16.
    handle.sync_pread(torch.nn.Parameter(torch.zeros(30, 20)), str(tmp_path / "0"))
    weight = torch.nn.Parameter(torch.zeros(10, dtype=torch.bfloat16))
    handle.sync_pwrite(torch.full((10,), 2.0, dtype=torch.bfloat16), str(tmp_path / "half"))
    handle.sync_pread(weight, str(tmp_path / "half"))
    assert weight.detach().eq(2.0).all()


def test_validation_finds_other_bytes(handle: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = random_bytes(10_000)
    expected = data.numpy().tobytes()
    handle.pwrite(data, str(path), True, True)
    while not path.exists() or path.read_bytes() != expected:
        time.sleep(0.001)
    data[5000] ^= 1
    with pytest.raises(memascend.StoreError, match=str(path)):
        handle.wait()
    assert handle.wait() == 0


def test_transfers_of_the_same_bytes_keep_their_order(handle: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    size = 2 * MIB
    found = [torch.zeros(size, dtype=torch.uint8) for _ in range(20)]
    handle.async_pwrite(torch.full((size,), 255, dtype=torch.uint8), path)
    for number, target in enumerate(found):
        # Over the end of one write and the beginning of another.
        handle.async_pread(target, path, 0)
        handle.async_pwrite(torch.full((size,), number, dtype=torch.uint8), path)
        handle.async_pwrite(torch.full((MIB,), 100 + number, dtype=torch.uint8), path, MIB + 1000)
    handle.async_pread(torch.zeros(10), str(tmp_path / "file"), MIB)
    # Those that were waited for early are counted too.
    assert handle.wait() == 62
    assert found[0].eq(255).all()
    for number, target in enumerate(found[1:]):
        assert target[: MIB + 1000].eq(number).all()
        assert target[MIB + 1000 :].eq(100 + number).all()
    # So are their failures kept.
    missing = str(tmp_path / "missing" / "file")
    for _ in range(3):
        handle.async_pwrite(found[0], missing)
    with pytest.raises(memascend.StoreError, match=missing):
        handle.wait()
    assert handle.wait() == 0


def test_several_handles_and_threads(deepspeed: types.ModuleType, tmp_path: Path) -> None:
    from memascend.integrations.deepspeed.files import AioHandle

    shared = AioHandle()
    failures: list[str] = []
    waited = []

    def work(number: int) -> None:
        own = AioHandle()
        path = str(tmp_path / f"own{number}")
        for turn in range(20):
            data = random_bytes(100_000 + turn, seed=number * 100 + turn)
            own.async_pwrite(data, path, turn * 3)
            shared.async_pwrite(data, str(tmp_path / f"shared{number}-{turn}"))
            if own.wait() != 1:
                failures.append(f"{number} {turn}: count")
            found = torch.zeros_like(data)
            own.sync_pread(found, path, turn * 3)
            if not torch.equal(found, data):
                failures.append(f"{number} {turn}: bytes")
            if turn % 5 == 4:
                waited.append(shared.wait())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    waited.append(shared.wait())
    assert failures == []
    assert sum(waited) == 80
    for number in range(4):
        for turn in range(20):
            data = random_bytes(100_000 + turn, seed=number * 100 + turn)
            assert (tmp_path / f"shared{number}-{turn}").read_bytes() == data.numpy().tobytes()


def test_a_handle_that_is_dropped_ends_its_transfers(deepspeed: types.ModuleType, tmp_path: Path) -> None:
    from memascend.integrations.deepspeed.files import AioHandle

    data = random_bytes(32 * MIB)
    expected = data.clone()
    handle = AioHandle()
    for number in range(4):
        handle.async_pwrite(data, str(tmp_path / str(number)))
    handle.async_pread(torch.empty(100), str(tmp_path / "missing"))
    del handle
    gc.collect()
    # Nothing reads it any more.
    data.zero_()
    for number in range(4):
        assert (tmp_path / str(number)).read_bytes() == expected.numpy().tobytes()


def test_errors_name_the_file_and_others_go_on(handle: Any, tmp_path: Path) -> None:
    data, found = random_bytes(50_000), torch.zeros(50_000, dtype=torch.uint8)
    missing = tmp_path / "no such folder" / "file"
    present = tmp_path / "file"
    present.write_bytes(data.numpy().tobytes())
    handle.async_pread(found, str(present))
    handle.async_pwrite(data, str(missing))
    handle.async_pwrite(data, str(tmp_path / "other"))
    with pytest.raises(memascend.StoreError, match=str(missing)) as caught:
        handle.wait()
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename == str(missing)
    # All others have ended, and the next are not troubled.
    assert torch.equal(found, data)
    assert (tmp_path / "other").read_bytes() == data.numpy().tobytes()
    assert handle.wait() == 0
    assert handle.sync_pread(found, str(present)) == 1
    # What would have followed a transfer that failed is forgotten.
    strided = torch.zeros(2, 50_000, dtype=torch.uint8)[:, ::2]
    handle.async_pread(strided, str(missing))
    handle.pwrite(data, str(missing), True, True)
    with pytest.raises(memascend.StoreError, match=str(missing)):
        handle.wait()
    found.zero_()
    assert handle.sync_pread(found, str(present)) == 1
    assert torch.equal(found, data)
    assert not strided.any()
    # A file that is shorter than the tensor, before and after it was opened.
    for _ in range(2):
        with pytest.raises(memascend.StoreError, match="shorter") as caught:
            handle.sync_pread(torch.zeros(50_001, dtype=torch.uint8), str(present))
        assert caught.value.filename == str(present)
    os.truncate(present, 49_999)
    with pytest.raises(memascend.StoreError, match="shorter") as caught:
        handle.sync_pread(found, str(present))
    assert caught.value.filename == str(present)
    with pytest.raises(memascend.StoreError) as caught:
        handle.sync_pread(found, str(tmp_path))
    assert caught.value.filename == str(tmp_path)


@pytest.mark.root
def test_a_full_drive_is_told_with_its_remedy(
    deepspeed: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from memascend.integrations.deepspeed import files

    def fill(path: str) -> None:
        handle = files.AioHandle()
        data = random_bytes(64 * MIB)
        handle.async_pwrite(data, path)
        with pytest.raises(memascend.StoreError, match=path) as caught:
            handle.wait()
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == path
        assert caught.value.hint
        # Room again: the same file and handle go on.
        os.truncate(path, 0)
        assert handle.sync_pwrite(data[:MIB], path) == 1
        assert Path(path).read_bytes() == data[:MIB].numpy().tobytes()

    with lab.mounted("ext4", lab.LEAST_BYTES["ext4"], tmp_path / "drive") as drive:
        # An engine of its own, so that it closes the file.
        with monkeypatch.context() as patch:
            patch.setattr(files, "_engine", None)
            fill(str(drive.path / "file"))
        gc.collect()


@pytest.mark.root
def test_a_drive_that_fails_is_told_with_its_remedy(
    deepspeed: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from memascend.integrations.deepspeed import files
    from memascend.integrations.deepspeed.pinned import PINNED

    def fail(path: str, device: lab.LoopDevice) -> None:
        handle = files.AioHandle()
        # Whole pages of memory and of the file: they do not pass through the kernel's cache.
        data = PINNED.empty(MIB, torch.uint8)
        handle.sync_pwrite(data, path)
        os.sync()
        device.shrink(0)
        for start in (handle.async_pread, handle.async_pwrite):
            start(data, path)
            with pytest.raises(memascend.StoreError, match=path) as caught:
                handle.wait()
            assert caught.value.errno == errno.EIO
            assert caught.value.filename == path
            assert "dmesg" in caught.value.hint
            assert handle.wait() == 0

    with lab.mounted("ext4", lab.LEAST_BYTES["ext4"], tmp_path / "drive") as drive:
        assert drive.device is not None
        with monkeypatch.context() as patch:
            patch.setattr(files, "_engine", None)
            fail(str(drive.path / "file"), drive.device)
        gc.collect()


# ---- Adam ---------------------------------------------------------------------------------------------------

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
#: After so many steps no bias is corrected.
LATE = 10_000_000
#: What PyTorch's square root may add where it does not fuse, in units in the last place of the update.
ROOT_ULPS = 8


@pytest.fixture
def adam(deepspeed: types.ModuleType) -> Iterator[Callable[..., int]]:
    """Do a step with options like those of `torch.optim`: AdamW (`decoupled`) or Adam."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    operator = CPUAdamBuilder().load()
    for number, decoupled in enumerate((False, True)):
        assert operator.create_adam(9000 + number, adamw_mode=decoupled) == 0

    def step(decoupled: bool, number: int, corrected: bool, *tensors: torch.Tensor, undo: bool = False) -> int:
        function = operator.adam_rollback if undo else operator.adam_update
        lr, betas, eps, decay = OPTIONS.values()
        return function(9000 + decoupled, number, lr, *betas, eps, decay, corrected, *tensors)

    yield step
    for number in range(2):
        assert operator.destroy_adam(9000 + number) == 0


class Reference:
    """A parameter that PyTorch's fused optimizer trains in float32.

    It is padded to whole vectors: what is left over PyTorch computes without fusing multiplications and additions.
    """

    def __init__(self, weight: torch.Tensor, decoupled: bool, corrected: bool = True, fused: bool = True) -> None:
        self.numel = weight.numel()
        self.weight = torch.nn.Parameter(self.padded(weight))
        cls = torch.optim.AdamW if decoupled else torch.optim.Adam
        self.optimizer = cls([self.weight], **OPTIONS, fused=fused, foreach=False)
        self.corrected = corrected

    def step(self, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.weight.grad = self.padded(gradient)
        state = self.optimizer.state[self.weight]
        if not state:
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(self.weight)
            state["step"] = torch.tensor(0.0)
        if not self.corrected:
            state["step"] = torch.tensor(float(LATE))
        self.optimizer.step()
        found = self.weight.detach(), state["exp_avg"], state["exp_avg_sq"]
        return tuple(tensor[: self.numel] for tensor in found)

    def begin(self, *values: torch.Tensor) -> None:
        """Go on from these: weight and moments."""
        self.weight.data[: self.numel] = values[0]
        state = self.optimizer.state[self.weight]
        if state:
            state["exp_avg"][: self.numel] = values[1]
            state["exp_avg_sq"][: self.numel] = values[2]

    def padded(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(tensor.detach().float(), (0, -self.numel % 64))


def gradients(numel: int, dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    """Yield gradients of all sizes, some of them zeros."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(5):
        sizes = 10.0 ** torch.randint(-6, 2, (numel,), generator=generator)
        gradient = torch.randn(numel, generator=generator) * sizes
        yield gradient.masked_fill(torch.rand(numel, generator=generator) < 0.1, 0.0).to(dtype)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("corrected", [True, False])
def test_a_step_has_the_bits_of_torch(adam: Callable[..., int], decoupled: bool, corrected: bool) -> None:
    weight = torch.randn(10_007)
    expected, m, v = Reference(weight, decoupled, corrected), torch.zeros(10_007), torch.zeros(10_007)
    for number, gradient in enumerate(gradients(10_007), start=1):
        wanted = expected.step(gradient)
        assert adam(decoupled, number, corrected, weight, gradient.clone(), m, v) == 0
        for found, of_torch in zip((weight, m, v), wanted, strict=True):
            assert torch.equal(found, of_torch)


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_step_is_that_of_torch_without_fusing(adam: Callable[..., int], decoupled: bool) -> None:
    # See optim/test_numerics.py.
    weight = torch.randn(10_007)
    expected, m, v = Reference(weight, decoupled, fused=False), torch.zeros(10_007), torch.zeros(10_007)
    for number, gradient in enumerate(gradients(10_007), start=1):
        expected.begin(weight, m, v)
        before = weight.clone()
        wanted = expected.step(gradient)
        adam(decoupled, number, True, weight, gradient.clone(), m, v)
        assert torch.equal(m, wanted[1])
        assert torch.equal(v, wanted[2])
        ulps = 2 * torch.maximum(before.abs(), weight.abs()) + ROOT_ULPS * (weight - before).abs()
        assert ((weight - wanted[0]).abs() <= torch.finfo(torch.float32).eps * ulps).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_states", [torch.float32, None])
@pytest.mark.parametrize("contiguous", [True, False])
def test_half_precision_is_rounded_to_nearest(
    adam: Callable[..., int], dtype: torch.dtype, of_states: torch.dtype | None, contiguous: bool
) -> None:
    def tensor(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(1001, dtype=dtype) if contiguous else torch.zeros(1001, 2, dtype=dtype)[:, 0]

    weight = tensor(dtype).copy_(torch.randn(1001))
    m, v = (tensor(of_states or dtype) for _ in range(2))
    expected = Reference(weight, True)
    for number, gradient in enumerate(gradients(1001, dtype), start=1):
        expected.begin(weight.float(), m.float(), v.float())
        wanted = expected.step(gradient)
        adam(True, number, True, weight, tensor(dtype).copy_(gradient), m, v)
        for found, of_torch in zip((weight, m, v), wanted, strict=True):
            # PyTorch rounds to the nearest.
            assert torch.equal(found, of_torch.to(found.dtype))


def test_large_tensors_in_half_precision_are_whole(adam: Callable[..., int]) -> None:
    from memascend.integrations.deepspeed import adam as kernels

    numel = 2 * kernels._CHUNK + 3
    weight, gradient = torch.randn(numel).bfloat16(), torch.randn(numel).bfloat16()
    m, v = torch.zeros(numel), torch.zeros(numel)
    wanted = Reference(weight, True).step(gradient)
    adam(True, 1, True, weight, gradient, m, v)
    assert torch.equal(weight, wanted[0].bfloat16())
    assert torch.equal(m, wanted[1])
    assert torch.equal(v, wanted[2])


@pytest.mark.parametrize("corrected", [True, False])
def test_a_step_can_be_undone(adam: Callable[..., int], corrected: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, m, v = torch.randn(1001), torch.zeros(1001), torch.zeros(1001)
    for number in range(1, 4):
        before = [tensor.clone() for tensor in (weight, m, v)]
        gradient = torch.randn(1001, generator=generator)
        adam(True, number, corrected, weight, gradient, m, v)
        after = [tensor.clone() for tensor in (weight, m, v)]
        adam(True, number, corrected, weight, gradient, m, v, undo=True)
        for found, old, new in zip((weight, m, v), before, after, strict=True):
            torch.testing.assert_close(found, old, rtol=1e-5, atol=2e-6)
            assert not torch.allclose(found, new, rtol=1e-4, atol=1e-4)
        for tensor, new in zip((weight, m, v), after, strict=True):
            tensor.copy_(new)


def test_lists_of_tensors(deepspeed: types.ModuleType) -> None:
    from deepspeed.ops.op_builder import FusedAdamBuilder

    operator = FusedAdamBuilder().load()
    weights = [torch.randn(numel) for numel in (1, 100, 1001)]
    grads, ms, vs = [torch.randn_like(w) for w in weights], *([torch.zeros_like(w) for w in weights] for _ in "mv")
    lr, betas, eps, decay = OPTIONS.values()
    for mode in (0, 1):
        wanted = []
        for weight, gradient, m, v in zip(weights, grads, ms, vs, strict=True):
            m.zero_()
            v.zero_()
            wanted.append(Reference(weight, mode == 1).step(gradient))
        operator.multi_tensor_adam(
            2048, torch.zeros(1), [grads, weights, ms, vs], lr, *betas, eps, 1, mode, True, decay
        )
        for number, tensors in enumerate(zip(weights, ms, vs, strict=True)):
            for found, of_torch in zip(tensors, wanted[number], strict=True):
                assert torch.equal(found, of_torch)


# ---- pinned memory ------------------------------------------------------------------------------------------


@pytest.fixture
def pins(deepspeed: types.ModuleType) -> Any:
    if not STREAMS:
        pytest.skip(f"DeepSpeed {installed_version} has no operator for pinned memory")
    from deepspeed.ops.op_builder import PinMemoryBuilder

    return PinMemoryBuilder().load().pin_handle()


def test_views_of_pinned_memory_are_pinned(pins: Any, handle: Any) -> None:
    from memascend.integrations.deepspeed.pinned import PINNED

    held = PINNED.nbytes
    tensor = pins.new_cpu_locked_tensor(1000, torch.empty(0, dtype=torch.float16))
    assert (tensor.dtype, tensor.numel(), tensor.any().item()) == (torch.float16, 1000, False)
    assert PINNED.nbytes == held + 2000
    for view in (tensor, tensor[500:], tensor[-1:], tensor.view(torch.uint8), tensor.reshape(10, 100).t(), tensor.data):
        assert pins.is_pinned(view)
        # Known to all handles of the process.
        assert handle.is_pinned(view)
    assert not pins.is_pinned(torch.zeros(1000, dtype=torch.float16))
    assert not pins.is_pinned(tensor.clone())
    assert not pins.is_pinned(torch.empty(3, device="meta"))
    # A view keeps it.
    view = tensor[10:20]
    del tensor
    gc.collect()
    assert pins.is_pinned(view)
    del view
    gc.collect()
    assert PINNED.nbytes == held
    assert pins.new_cpu_locked_tensor(0, torch.empty(0)).numel() == 0


def test_pinned_memory_is_given_up_once(pins: Any) -> None:
    from memascend.integrations.deepspeed.pinned import PINNED

    held = PINNED.nbytes
    tensors = [pins.new_cpu_locked_tensor(5000, torch.empty(0)) for _ in range(3)]
    tensors[1].fill_(3.0)
    assert pins.free_cpu_locked_tensor(tensors[1][1:]) is False
    assert pins.free_cpu_locked_tensor(tensors[1]) is True
    assert pins.free_cpu_locked_tensor(tensors[1]) is False
    assert not pins.is_pinned(tensors[1])
    assert pins.is_pinned(tensors[0])
    assert pins.is_pinned(tensors[2])
    # What is left over does not dangle.
    assert tensors[1].eq(3.0).all()
    assert pins.free_cpu_locked_tensor_by_ptr(tensors[2].data_ptr()) is True
    assert pins.free_cpu_locked_tensor_by_ptr(tensors[2].data_ptr()) is False
    assert pins.free_cpu_locked_tensor(torch.zeros(3)) is False
    assert PINNED.nbytes == held + 20_000
    del tensors
    gc.collect()
    assert PINNED.nbytes == held


def test_freed_memory_goes_back_to_the_system(pins: Any) -> None:
    before = deepspeed_run.memory("VmRSS")
    tensor = pins.new_cpu_locked_tensor(64 * MIB, torch.empty(0, dtype=torch.uint8)).fill_(1)
    assert deepspeed_run.memory("VmRSS") > before + 56 * MIB
    pins.free_cpu_locked_tensor(tensor)
    del tensor
    gc.collect()
    assert deepspeed_run.memory("VmRSS") < before + 8 * MIB
