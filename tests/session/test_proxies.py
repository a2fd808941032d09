"""Uses of parameters and gradients by programs: the same bits as in memory."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

import bit_equality
import numpy as np
import pytest
import tiny_models
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from small_net import TOKENS, WIDTH, WRITING, Net, assert_same, loss_of, step
from torch import nn
from torch.utils.checkpoint import checkpoint

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SAME: dict[str, Callable[[Any, Any], Any]] = WRITING.copy()


def same(program: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """List a program that gives the same bits."""
    SAME[program.__name__] = program
    return program


@same
def read_norms(model: Net, _: Any) -> Any:
    return [parameter.norm().detach() for parameter in model.parameters()]


@same
def describe(model: Net, _: Any) -> Any:
    weight = model.head.weight
    return [
        *(
            repr(weight),
            weight.stride(),
            weight.is_contiguous(),
            weight.shape,
            weight.dtype,
            weight.detach().t().stride(),
        ),
        *(weight.mean().item(), weight[0:2].detach().clone(), float(model.scale.detach()), weight.storage_offset()),
        torch.stack([parameter.detach().abs().max() for parameter in model.parameters()]),
    ]


@same
def assign_data(model: Net, _: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


@same
def clamp_a_scalar(model: Net, _: Any) -> None:
    model.scale.data.clamp_(0, 1.2)  # CLIP's logit_scale


@same
def clamp_in_place(model: Net, _: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.01, 0.01)


@same
def keep_views(model: Net, optimizer: memascend.AdamW) -> Any:
    weight, transposed = model.head.weight.detach(), model.layers[0][0].weight.data.t()
    step(model, optimizer, 7)
    return [weight.clone(), transposed.clone()]


@same
def flatten_and_back(model: Net, _: Any) -> Any:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.3, model.parameters())
    return [vector.detach(), torch.cat([p.flatten() for p in model.parameters()]).detach()]


@same
def average(model: Net, optimizer: memascend.AdamW) -> Any:
    averages = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    step(model, optimizer, 5)
    for name, parameter in model.named_parameters():
        averages[name].mul_(0.9).add_(parameter.detach(), alpha=0.1)
    return list(averages.values())


@same
def penalise(model: Net, optimizer: memascend.AdamW) -> Any:
    (loss_of(model) + sum((parameter**2).sum() for parameter in model.parameters())).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return gradients


@same
def use_the_head_outside(model: Net, optimizer: memascend.AdamW) -> Any:
    hidden = model.embed(torch.arange(9)[None])
    for layer in model.layers:
        hidden = hidden + layer(hidden)
    loss = F.linear(hidden, model.head.weight).sum()
    loss.backward()
    gradient = model.head.weight.grad.clone()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach(), gradient]


@same
def differentiate_between(model: Net, optimizer: memascend.AdamW) -> Any:
    loss_of(model).backward()
    loss = loss_of(model, 4)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    penalty = sum(gradient.pow(2).sum() for gradient in gradients)
    penalty.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [gradient.detach() for gradient in gradients]


@same
def differentiate_with_zeros(model: Net, _: Any) -> Any:
    loss = model.embed.weight.sum()
    return list(torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True))


@same
def scale_gradients(model: Net, optimizer: memascend.AdamW) -> Any:
    loss_of(model).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 0.5
    loss_of(model, 2).backward()
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    norms = [parameter.grad.norm() for parameter in model.parameters()]
    loss_of(model, 3).backward()
    optimizer.step()
    optimizer.zero_grad()
    return norms


@same
def write_parts_of_gradients(model: Net, optimizer: memascend.AdamW) -> Any:
    loss_of(model).backward()
    gradient = model.head.weight.grad
    gradient[0].zero_()
    gradient.view(-1)[500:].mul_(3)
    gradient.data[1:2] += 1
    values = gradient.clone()
    optimizer.step()
    optimizer.zero_grad()
    return values


@same
def clip_as_torch_does(model: Net, optimizer: memascend.AdamW) -> Any:
    loss_of(model).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    nn.utils.clip_grad_value_(model.parameters(), 0.001)
    total = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    optimizer.step()
    optimizer.zero_grad()
    return [norm, total]


@same
def zero_gradients(model: Net, optimizer: memascend.AdamW) -> Any:
    loss_of(model).backward()
    model.zero_grad(set_to_none=False)
    loss_of(model, 2).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.step()  # a step with gradients of zero
    optimizer.zero_grad()
    return gradients


@same
def zero_after_the_step(model: Net, optimizer: memascend.AdamW) -> None:
    for number in range(2):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.zero_grad()
    for number in range(2):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad.zero_()
    optimizer.zero_grad()


@same
def multiply_by_the_hessian(model: Net, _: Any) -> Any:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss_of(model), parameters, create_graph=True)
    loss_of(model, 1).backward()
    products = torch.autograd.grad(gradients, parameters, grad_outputs=[p.grad for p in parameters])
    model.zero_grad()
    return [*products, torch.zeros_like(model.head.weight.t()).stride()]


@same
def scale_losses(model: Net, optimizer: memascend.AdamW) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return [norm, scaler.get_scale()]


@same
def look_at_gradients_in_hooks(model: Net, optimizer: memascend.AdamW) -> Any:
    norms: list[float] = []
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda parameter: norms.append(float(parameter.grad.norm())))
        for parameter in model.parameters()
    ]
    loss_of(model).backward()
    loss_of(model, 3).backward()
    for hook in hooks:
        hook.remove()
    optimizer.step()
    optimizer.zero_grad()
    return sorted(norms)


@same
def sharpness_aware(model: Net, optimizer: memascend.AdamW) -> None:
    loss_of(model).backward()
    moves = []
    with torch.no_grad():
        for parameter in model.parameters():
            moves.append(parameter.grad * 0.1)
            parameter.add_(moves[-1])
    model.zero_grad()
    loss_of(model).backward()
    with torch.no_grad():
        for parameter, move in zip(model.parameters(), moves, strict=True):
            parameter.sub_(move)
    optimizer.step()
    optimizer.zero_grad()


@same
def save_by_torch(model: Net, optimizer: memascend.AdamW) -> Any:
    state = model.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    saved = torch.load(file)
    step(model, optimizer, 5)  # the state dict shows the new values, as in memory
    return [*saved.values(), *(tensor.clone() for tensor in state.values())]


@same
def copy_parameters(model: Net, _: Any) -> Any:
    return [copy.deepcopy(parameter).detach() for parameter in model.parameters()]


@same
def arrays(model: Net, _: Any) -> Any:
    return [torch.from_numpy(np.array(parameter.detach().numpy())) for parameter in model.parameters()]


@same
def replace_a_parameter(model: Net, _: Any) -> None:
    model.head.bias = nn.Parameter(torch.ones(TOKENS))


@same
def replace_the_forward(model: Net, _: Any) -> Any:
    def forward(tokens: torch.Tensor) -> torch.Tensor:  # as TRL and Liger-Kernel replace it
        return F.linear(model.layers[0](model.embed(tokens)), model.head.weight) * model.scale

    own = model.forward
    model.forward = forward
    loss = loss_of(model)
    loss.backward()
    model.zero_grad()
    model.forward = own
    return loss.detach()


@same
def write_in_inference_mode(model: Net, _: Any) -> None:
    with torch.inference_mode():
        model.layers[1][2].weight.mul_(2.0)
        model.head.weight[0] = 3
        nn.init.ones_(model.head.bias)
        model.scale.data += 1
        torch.add(model.head.bias, 1, out=model.head.bias)


@same
def exchange_gradients(model: Net, optimizer: memascend.AdamW) -> None:
    loss_of(model).backward()
    first, second = model.layers[0][0].weight, model.layers[1][0].weight
    first.grad, second.grad = second.grad, first.grad
    loss_of(model, 1).backward()
    optimizer.step()
    optimizer.zero_grad()


@same
def zero_gradients_of_others(model: Net, optimizer: memascend.AdamW) -> Any:
    loss_of(model).backward()
    first, second, third = (layer[0].weight for layer in model.layers)
    first.grad, second.grad = second.grad, first.grad
    third.grad = own = torch.ones_like(third)
    optimizer.zero_grad(set_to_none=False)
    gradients = [own, *(parameter.grad.clone() for parameter in model.parameters())]
    loss_of(model, 1).backward()
    optimizer.step()
    optimizer.zero_grad()
    return gradients


@same
def combine_weights(model: Net, _: Any) -> None:
    first, second, third = (layer[0].weight for layer in model.layers)
    with torch.no_grad():
        first.copy_(third)
        second.addmm_(first, third)
        torch.add(first, second, out=third)


@same
def freeze_before_backward(model: Net, optimizer: memascend.AdamW) -> Any:
    loss = loss_of(model)
    model.layers[0][0].weight.requires_grad_(False)
    loss.backward()
    there = [parameter.grad is not None for parameter in model.parameters()]
    model.layers[0][0].weight.requires_grad_(True)
    optimizer.step()
    optimizer.zero_grad()
    return there


@same
def checkpoint_parts(model: Net, optimizer: memascend.AdamW) -> Any:
    gradients = []
    for reentrant in (False, True):
        hidden = model.embed(torch.arange(9)[None])
        for layer in model.layers:
            hidden = hidden + checkpoint(layer, hidden, use_reentrant=reentrant)
        hidden = checkpoint(
            lambda hidden: F.linear(torch.tanh(F.linear(hidden, model.layers[0][0].weight)), model.head.weight),
            hidden,
            use_reentrant=reentrant,
        )
        hidden.square().mean().backward()
        gradients += [model.embed.weight.grad.clone(), model.head.weight.grad.clone()]
    optimizer.step()
    optimizer.zero_grad()
    return gradients


@same
def backward_to_some(model: Net, optimizer: memascend.AdamW) -> Any:
    loss_of(model).backward(inputs=[model.layers[1][0].weight])
    model.scale.backward()
    there = [parameter.grad is not None for parameter in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return there


@same
def a_function_without_a_gradient(model: Net, _: Any) -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(states, weight)
            return states @ weight.t()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            _, weight = ctx.saved_tensors
            return gradient @ weight, None

    states = torch.ones(3, WIDTH, requires_grad=True)
    Product.apply(states, model.head.weight).sum().backward()
    loss_of(model).backward()
    Product.apply(states, model.head.weight).sum().backward()
    model.zero_grad()


@pytest.mark.parametrize("name", SAME)
def test_a_program_gives_the_same_bits(pair: Callable[..., tuple[nn.Module, nn.Module]], name: str) -> None:
    results = []
    models = pair()
    for model in models:
        optimizer = memascend.AdamW(model.parameters(), lr=1e-2)
        results.append([step(model, optimizer, 1), SAME[name](model, optimizer), step(model, optimizer, 2)])
    in_memory, offloaded = results
    assert bit_equality.difference(offloaded, in_memory, "results") is None
    assert_same(*models)


def test_a_model_of_transformers(tmp_path: Path) -> None:
    expected, model = tiny_models.build("llama"), tiny_models.build("llama")
    memascend.offload(model, store=tmp_path / "store", host_memory="64MiB", keep_store=False)
    with pytest.raises(memascend.MemascendError, match=r"model\.embed_tokens\.weight is on SSD as .*before"):
        model.model.float()
    rows = model.config.vocab_size
    with pytest.raises(
        memascend.MemascendError, match=rf"{rows} rows and cannot have {rows + 8}: .*resize_token_embeddings={rows + 8}"
    ):
        model.resize_token_embeddings(rows + 2, pad_to_multiple_of=8)
    with pytest.raises(memascend.MemascendError, match=f"{rows} rows, which have room for {rows - 10} tokens: leave"):
        model.resize_token_embeddings(rows - 10)
    assert model.resize_token_embeddings(rows) is model.get_input_embeddings() is model.resize_token_embeddings()
    read = memascend.stats(model)["ssd_bytes_read"]
    assert (
        model.to("cpu").eval().train().dtype == expected.dtype and model.num_parameters() == expected.num_parameters()
    )
    assert [p._version for p in model.parameters()] == [p._version for p in expected.parameters()]
    assert memascend.stats(model)["ssd_bytes_read"] == read  # nothing of that takes a weight
    for directory, part in ("whole", lambda model: model), ("part", lambda model: model.model):
        part(model).save_pretrained(tmp_path / directory)
        saved = load_file(tmp_path / directory / "model.safetensors")
        tiny_models.assert_same_weights(saved, dict(part(expected).named_parameters()))
    assert torch.equal(model(**tiny_models.batch("llama", 0)).loss, expected(**tiny_models.batch("llama", 0)).loss)
    memascend.close(model)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_two_uses_in_one_autocast_block(pair: Callable[..., Any], twice: bool, cached: bool) -> None:
    """Where PyTorch adds gradients in bfloat16, because both uses share a converted weight, the second is refused."""
    results = []
    models = pair()
    for model in models:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached):
            loss = loss_of(model)
            if twice and cached and model is models[1]:
                with pytest.raises(memascend.MemascendError, match="cache_enabled=False"):
                    loss_of(model, 1)
                return
            if twice:
                loss = loss + loss_of(model, 1)
        loss.backward()
        results.append([loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]])
    in_memory, offloaded = results
    assert bit_equality.difference(offloaded, in_memory, "results") is None
