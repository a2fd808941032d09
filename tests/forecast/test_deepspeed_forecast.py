"""`memascend plan --deepspeed`: DeepSpeed's configuration, refusals, and sums."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import faults
import pytest
import tiny_models

from memascend.cli import main
from memascend.errors import BudgetError, DataError
from memascend.forecast import zero_infinity
from memascend.forecast.deepspeed.configuration import read_configuration
from memascend.forecast.deepspeed.forecast import forecast
from memascend.forecast.deepspeed.plan import Decision, traffic

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.core
NVME: dict[str, Any] = {"device": "nvme", "nvme_path": "/nvme"}
ZERO: dict[str, Any] = {"stage": 3, "offload_param": NVME | {"max_in_cpu": 0}, "offload_optimizer": NVME}
WHOLE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": ZERO}
TABLES = ("host_memory", "ssd_traffic")
LARGE = Path(__file__).parents[2] / "benches" / "configs" / "qwen2.5-7b.json"
#: Two of 1 MiB in bfloat16, which are swapped, one that is too small for that, and one of no whole block.
NUMELS = [1 << 19, 100, 1 << 19, 700_001]


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Write a configuration to a file: `WHOLE` with changes, or a text."""

    def write(text: str | None = None, **changes: Any) -> Path:
        file = tmp_path / "ds_config.json"
        file.write_text(json.dumps(WHOLE | changes) if text is None else text)
        return file

    return write


def read(file: Path, ranks: int = 1, dtype: str | None = None, passes: int = 1) -> Any:
    return read_configuration(file, ranks=ranks, dtype=dtype, passes=passes)


def test_defaults_are_those_of_deepspeed(written: Callable[..., Path]) -> None:
    found = read(written(zero_optimization=ZERO | {"offload_param": NVME}))
    assert (found.dtype, found.gradient_dtype, found.passes) == ("bfloat16", "bfloat16", 1)
    assert (found.sub_group_size, found.buffer_count, found.buffer_size) == (10**9, 5, 10**8)
    assert found.max_in_cpu == 10**9
    assert found.notes == []


def test_sub_groups_are_made_of_each_ranks_parts(written: Callable[..., Path]) -> None:
    found = read(written(zero_optimization=ZERO | {"sub_group_size": 3e5}), ranks=2)
    shapes = found.shapes(NUMELS, 2)
    assert shapes.sub_groups == [[1 << 18, 50, 1 << 18], [350_001]]
    assert shapes.params == [1 << 18, 50, 1 << 18, 350_001]
    assert shapes.streamed_states == 12 * sum(shapes.params)


@pytest.mark.parametrize(("block_size", "streamed"), [(1 << 17, sum(NUMELS) - 100), (1 << 22, 0)])
def test_small_sub_groups_are_not_streamed(block_size: int, streamed: int, written: Callable[..., Path]) -> None:
    file = written(zero_optimization=ZERO | {"sub_group_size": 0}, aio={"block_size": block_size})
    assert read(file).shapes(NUMELS, 1).streamed_states == 12 * streamed


@pytest.mark.parametrize(
    ("changes", "ranks", "passes"),
    [
        ({"gradient_accumulation_steps": 4}, 1, 4),
        ({"train_batch_size": 16}, 2, 4),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 4}, 2, 4),
        ({"train_micro_batch_size_per_gpu": None, "train_batch_size": 8}, 1, 1),
    ],
)
def test_backward_passes_are_those_that_deepspeed_makes(
    changes: dict[str, Any], ranks: int, passes: int, written: Callable[..., Path]
) -> None:
    found = read(written(**changes), ranks)
    assert found.passes == passes
    assert found.shapes(NUMELS, ranks).accumulates == (passes > 1)


def test_options_take_the_place_of_auto(written: Callable[..., Path]) -> None:
    enabled = {"enabled": "auto"}
    file = written(
        bf16=enabled, fp16=enabled, train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto"
    )
    found = read(file)
    assert (found.dtype, found.passes) == ("bfloat16", 1)
    assert len(found.notes) == 2 and all('"auto"' in note for note in found.notes)
    found = read(file, dtype="float32", passes=8)
    assert (found.dtype, found.passes) == ("float32", 8)
    # An option that no figure depends on may be anything.
    assert not read(written(optimizer={"params": {"lr": "auto"}}, gradient_clipping="auto")).notes


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"zero_optimization": {"stage": 2}}, "stage is 2, but only stage 3"),
        ({"zero_optimization": {"stage": 3}}, "offloads nothing to NVMe"),
        ({"zero_optimization": ZERO | {"offload_param": {"device": "disk"}}}, "offload_param.device is 'disk'"),
        ({"zero_optimization": ZERO | {"offload_optimizer": {}}}, "offloads weights alone"),
        ({"zero_optimization": ZERO | {"sub_group_size": "auto"}}, "sub_group_size is 'auto', and memascend has no"),
        ({"zero_optimization": ZERO | {"zenflow": {"topk_ratio": 0.1}}}, "zenflow"),
        ({"zero_optimization": 3}, "zero_optimization is not an object"),
        ({"optimizer": {"type": "Muon"}}, "Muon"),
        ({"fp16": {"enabled": True}}, "both enabled"),
        ({"bf16": {"enabled": "yes"}}, "is 'yes': write true"),
        ({"data_types": {"grad_accum_dtype": "fp8"}}, "grad_accum_dtype is 'fp8'"),
        ({"train_batch_size": 7}, "train_batch_size 7 is not"),
        ({"gradient_accumulation_steps": True}, "gradient_accumulation_steps is True"),
        ({"memascend": {"host_ram": "1GiB"}}, '"memascend" in DeepSpeed\'s configuration takes host_memory, states'),
    ],
)
def test_what_cannot_be_planned_is_told(changes: dict[str, Any], told: str, written: Callable[..., Path]) -> None:
    file = written(**changes)
    with pytest.raises(DataError) as caught:
        read(file)
    assert told in str(caught.value)
    assert str(caught.value).startswith(f"--deepspeed {file}")


def test_options_that_contradict_the_file_are_told(written: Callable[..., Path]) -> None:
    file = written(gradient_accumulation_steps=2)
    with pytest.raises(DataError, match="--dtype"):
        read(file, dtype="float32")
    with pytest.raises(DataError, match="--grad-accum"):
        read(file, passes=4)
    assert read(file, dtype="bfloat16", passes=2).passes == 2


def test_traffic_of_deepspeed_is_that_of_its_formula(written: Callable[..., Path]) -> None:
    shapes = read(written()).shapes(NUMELS, 1)
    found = traffic(shapes, Decision([], keeps_gradients=False), moment_itemsize=4, passes=3)
    total, small = sum(NUMELS), 100
    # Weights below 1 MiB stay in memory.
    expected = sum(zero_infinity.ssd_traffic_bytes(total, 2, 3)) - small * 2 * (2 * 3 + 1)
    assert sum(line.stock for line in found) == expected
    ours = {line.name: line.ours for line in found}
    assert ours["gradients"] == total * 4 and ours["masters and moments"] == total * 24
    shapes = read(written(memascend={"states": "bfloat16"})).shapes(NUMELS, 1)
    halves = traffic(shapes, Decision([], keeps_gradients=True, kept_states=total), moment_itemsize=2, passes=3)
    assert [line.ours for line in halves] == [ours["weights"], total * (16 - 2), 0]
    on_cpu = read(written(zero_optimization=ZERO | {"offload_optimizer": {"device": "cpu"}})).shapes(NUMELS, 1)
    assert [line.name for line in traffic(on_cpu, Decision([], True), 4, 3)] == ["weights"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama_directory(tmp_path_factory.mktemp("model"), hidden=64)


def test_the_budget_of_the_section_is_kept(written: Callable[..., Path]) -> None:
    least = forecast(LARGE, written())
    assert not least["keeps_gradients"]
    needed = least["host_memory_memascend_bytes"]
    with pytest.raises(BudgetError, match="host memory for swapping") as caught:
        forecast(LARGE, written(memascend={"host_memory": needed - 1}))
    assert caught.value.smallest_bytes == needed
    assert forecast(LARGE, written(memascend={"host_memory": needed})) == least
    for host_memory in ("32GiB", "1TiB"):
        found = forecast(LARGE, written(memascend={"host_memory": host_memory, "states": "bfloat16"}))
        assert found["keeps_gradients"]
        held, moved = ({line["consumer"]: line["memascend_bytes"] for line in found[name]} for name in TABLES)
        states = 8 * found["parameters"]
        assert moved["gradients"] == 0
        assert moved["masters and moments"] == 2 * (states - held["states that stay in memory"])
        assert (moved["masters and moments"] == 0) == (host_memory == "1TiB")


def test_the_command_prints_tables_or_one_error(
    model_dir: Path, written: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    file = written()
    assert main.main(["plan", str(model_dir), "--deepspeed", str(file), "--ranks", "2"]) == 0
    out = capfd.readouterr().out
    assert "2 ranks" in out and "parameter pool" in out and "bytes per parameter: DeepSpeed " in out
    assert main.main(["plan", str(model_dir), "--deepspeed", str(file), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found == forecast(model_dir, file)
    assert sum(line["deepspeed_bytes"] for line in found["host_memory"]) == found["host_memory_deepspeed_bytes"]
    cut, listed = file.with_name("cut.json"), file.with_name("listed.json")
    cut.write_text('{"bf16": ')
    listed.write_text("[]")
    for more, told in (
        (["--deepspeed", f"{file}.missing"], f"{file}.missing is not a file"),
        (["--deepspeed", str(model_dir)], f"{model_dir} is not a file"),
        (["--deepspeed", str(file), "--host-memory", "1GiB"], "--host-memory is not of a plan with --deepspeed"),
        (["--deepspeed", str(cut)], f"{cut} cannot be read as JSON"),
        (["--deepspeed", str(listed)], f"{listed}: it does not hold a JSON object"),
    ):
        assert main.main(["plan", str(model_dir), *more]) == main.BAD_INPUT
        assert told in capfd.readouterr().err
    assert main.main(["plan", str(model_dir), "--json", "--deepspeed", str(written("{}"))]) == main.BAD_INPUT
    assert "only stage 3" in json.loads(capfd.readouterr().out)["error"]


def test_deepspeed_is_not_needed(model_dir: Path, written: Callable[..., Path]) -> None:
    script = """
import sys
sys.modules["deepspeed"] = None
from memascend.cli import main
assert main.main(sys.argv[1:]) == 0
"""
    out = faults.run_script(script, ["plan", str(model_dir), "--deepspeed", str(written())], {})
    assert "optimizer states" in out
