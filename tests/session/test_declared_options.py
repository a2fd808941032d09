"""The options of the public functions are those that `memascend.options` declares, and are checked there."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

import memascend
from memascend._memascend import Runtime
from memascend.memory_plan.arena import Arena
from memascend.options import OPTION_NAMES, TUNING_NAMES, OffloadOptions

#: A resumed run goes on with these, and one of its keywords means "as before".
LEFT_OUT = {"resume": {"fused_loss", "gradients"}}
OF_RESUME = {"host_memory": ("str | int | None", None), "recompute": ("bool | None", None)}
#: A value of each entry of `Tuning`.
VALUES: dict[str, Any] = {
    "engine": "threads",
    "direct": False,
    "rates": [1e9],
    "depth": 4,
    "io_poll": False,
    "sq_poll": False,
    "checksums": False,
    "allocator": "pageable",
    "huge_pages": False,
    "compute_threads": 2,
}


@pytest.mark.parametrize("function", [memascend.offload, memascend.from_pretrained, memascend.resume])
def test_public_functions_name_every_option_as_it_is_declared(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    assert set(OPTION_NAMES) - parameters.keys() == LEFT_OUT.get(function.__name__, set())
    for option in fields(OffloadOptions):
        if option.name not in parameters:
            continue
        expected = option.type, inspect.Parameter.empty if option.default is MISSING else option.default
        if function is memascend.resume:
            expected = OF_RESUME.get(option.name, expected)
        given = parameters[option.name]
        assert (given.annotation, given.default) == expected, option.name


def test_the_native_side_takes_the_tuning_and_no_other_keyword(tmp_path: Path) -> None:
    arena = Arena([("weights", 4096, 1)], [], 4096, 1, 65536, 4096, 1)
    Runtime([tmp_path / "store"], arena, **VALUES).close(keep=False)
    assert VALUES.keys() == set(TUNING_NAMES)
    with pytest.raises(TypeError, match="engin: there is no such option"):
        Runtime([tmp_path / "store"], arena, engin="ring")
    with pytest.raises(TypeError, match="depth: 'str' object"):
        Runtime([tmp_path / "store"], arena, depth="many")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda store: memascend.offload(tiny_models.build("plain"), store=store, host_memory=None, engin="ring"),
            "'engine'",
        ),
        (
            lambda store: memascend.offload(tiny_models.build("plain"), store=store, host_memory=None, updte=1),
            "'update'",
        ),
        (
            lambda store: memascend.offload(tiny_models.build("plain"), store=store, host_memory=None, zzz=1),
            "compute_threads",
        ),
        (lambda store: memascend.resume(store, check_sums=False), "'checksums'"),
        (lambda store: memascend.resume(store, fused_loss=False), "'fused_loss': a run goes on with its own"),
        (lambda store: memascend.AdamW([torch.nn.Parameter(torch.ones(2))], store=store, wheight_decay=1), "'weight_d"),
    ],
)
def test_an_unknown_option_is_named_with_the_one_that_was_meant(
    call: Callable[[Path], Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match="has no option") as refused:
        call(tmp_path / "store")
    assert says in str(refused.value)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"host_memory": "lots"}, "'lots' is not a size"),
        ({"host_memory_max": "auto"}, "'auto' is not a size"),
        ({"device_memory": "auto"}, "'auto' is not a size"),
        ({"durability": "every:0"}, "durability 'every:0' is not one of"),
        ({"keep_store": "yes"}, "keep_store='yes' is not one of"),
        ({"fused_loss": "maybe"}, "fused_loss='maybe' is not one of"),
        ({"micro_batch_size": 0}, "micro_batch_size=0 is not a whole number of at least 1"),
        ({"batch_tokens": (0, 8)}, "a batch has at least one token"),
    ],
)
def test_a_value_that_an_option_does_not_have(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        OffloadOptions(**{"store": "/nvme", "host_memory": None} | wrong)
