"""APOLLO beside its authors' own code, apollo-torch, with the same random matrices, where that is installed.

apollo-torch is licensed for non-commercial use (CC-BY-NC 4.0): it is no dependency, and none of it is here.
`pip install --no-deps apollo-torch bitsandbytes` has these tests run.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memascend
from memascend._memascend import ForTests, Projection

apollo_torch = pytest.importorskip("apollo_torch")

pytestmark = pytest.mark.filterwarnings("ignore")

RANK, GAP, STEPS = 8, 10, 60
VARIANTS = {
    "apollo": {"rank": RANK, "scale": 1.0, "scale_type": "channel"},
    "mini": {"rank": 1, "scale": 128.0, "scale_type": "tensor"},
}


@pytest.fixture
def same_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have apollo-torch draw memascend's random matrices, in the same order."""
    from apollo_torch.random_projector import GradientProjector

    def draw(self: Any, weights: torch.Tensor, rank: int, type: str, seed: int) -> torch.Tensor:
        drawn = vars(self).setdefault("drawn", 0)
        self.drawn += 1
        rows, columns = weights.shape
        matrix = torch.tensor(ForTests.random_matrix(Projection(rows, columns, rank, 0, drawn))).view(
            min(rows, columns), rank
        )
        return matrix.t().contiguous() if type == "right" else matrix

    monkeypatch.setattr(GradientProjector, "get_orthogonal_matrix", draw)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [(48, 20), (20, 48)])
@pytest.mark.parametrize("scale_front", [False, True])
def test_the_weights_are_those_of_apollo_torch(
    same_matrices: None, variant: str, shape: tuple[int, int], scale_front: bool
) -> None:
    options = VARIANTS[variant] | {"update_proj_gap": GAP, "proj": "random", "proj_type": "std"}
    common: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "scale_front": scale_front}
    generator = torch.Generator().manual_seed(5)
    weight, bias = torch.randn(shape, generator=generator), torch.randn(7, generator=generator)
    ours, theirs = ([nn.Parameter(tensor.clone()) for tensor in (weight, bias)] for _ in range(2))
    groups = [[{"params": [matrix], **options}, {"params": [vector]}] for matrix, vector in (ours, theirs)]
    optimizers = [
        memascend.Apollo(groups[0], **common),
        apollo_torch.APOLLOAdamW(groups[1], no_deprecation_warning=True, **common),
    ]
    for step in range(STEPS):
        # Sometimes larger, so that the growth of the step is limited.
        size = 5.0 if step % 7 == 3 else 1.0
        gradients = [size * torch.randn(parameter.shape, generator=generator) for parameter in ours]
        for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
    for mine, its, start in zip(ours, theirs, (weight, bias), strict=True):
        moved = (its.detach() - start).norm()
        assert moved > 0.01
        assert (mine.detach() - its.detach()).norm() < 1e-5 * (moved + start.norm())
    # The states that both have are the same too.
    mine, its = (optimizer.state_dict()["state"][0] for optimizer in optimizers)
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(mine[name], its[name], rtol=1e-4, atol=1e-6)
