"""Values as JSON and back, exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memascend
from memascend.durability import exact_json


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"a": [1, 2.5, float("inf"), -0.0, True, "x", None], "b": {"c": ()}},
        {1: "one", (2, 3): [4], "!": 5, None: 6},
        (1, (2, [3]), {4}),
        b"\x00\xff",
        torch.float16,
        [1e-300, 2**70, 0.1 + 0.2],
    ],
)
def test_values_come_back_from_json(value: Any) -> None:
    assert repr(exact_json.loads(exact_json.dumps(value, "it"))) == repr(value)


def test_tensors_come_back_from_json() -> None:
    nan = torch.tensor([0x7FC1], dtype=torch.uint16).view(torch.bfloat16)
    values = [torch.randn(3, 4), torch.tensor(7), torch.empty(0, 5), torch.ones(2, dtype=torch.bool), nan]
    for value in values:
        back = exact_json.loads(exact_json.dumps(value, "it"))
        assert (back.dtype, back.shape) == (value.dtype, value.shape)
        assert torch.equal(back.view(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
    with pytest.raises(memascend.MemascendError, match=r"it\['a'\]\[1\] is a function"):
        exact_json.dumps({"a": [1, lambda: 0]}, "it")
