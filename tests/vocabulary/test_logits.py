"""Deferred logits: the loss of a model ends in pieces, and every other use gives the results of computed logits."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from tables_in_blocks import StoredTable
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast

from memascend.errors import MemascendError
from memascend.vocabulary import logits as logits_module
from memascend.vocabulary.gradient import TableGradient
from memascend.vocabulary.logits import DeferredLogits, deferred_linear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROWS, WIDTH, BLOCK = 67, 8, 16


@pytest.fixture
def tensors() -> tuple[torch.Tensor, nn.Parameter, nn.Parameter]:
    torch.manual_seed(0)
    hidden = torch.randn(2, 9, WIDTH, requires_grad=True)
    return hidden, nn.Parameter(torch.randn(ROWS, WIDTH)), nn.Parameter(torch.randn(ROWS))


def deferred(tensors: tuple[torch.Tensor, nn.Parameter, nn.Parameter]) -> DeferredLogits:
    hidden, weight, bias = tensors
    return deferred_linear(hidden, weight, bias, StoredTable(weight, BLOCK))


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Count losses in pieces, and heads whose logits were computed."""
    counts = {"pieces": 0, "computed": 0}
    in_pieces, compute = logits_module.loss_in_pieces, logits_module._Head.compute

    def count_pieces(*args: Any) -> torch.Tensor:
        counts["pieces"] += 1
        return in_pieces(*args)

    def count_computed(head: Any) -> torch.Tensor:
        counts["computed"] += 1
        return compute(head)

    with (
        mock.patch.object(logits_module, "loss_in_pieces", count_pieces),
        mock.patch.object(logits_module._Head, "compute", count_computed),
    ):
        yield counts


LABELS = torch.arange(18).view(2, 9) * 3 % ROWS
LABELS[0, 2] = -100
FLAT = LABELS.flatten()

LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "causal": lambda logits: ForCausalLMLoss(logits, LABELS, ROWS),
    "causal, by items": lambda logits: ForCausalLMLoss(logits, LABELS, ROWS, torch.tensor(7)),
    "masked": lambda logits: ForMaskedLMLoss(logits, LABELS, ROWS),
    "module": lambda logits: nn.CrossEntropyLoss(label_smoothing=0.1)(logits.view(-1, ROWS), FLAT),
    "none": lambda logits: F.cross_entropy(logits.flatten(0, 1), FLAT, reduction="none").square().sum(),
    "shifted by slices": lambda logits: F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, ROWS), LABELS[..., 1:].contiguous().view(-1)
    ),
    "capped": lambda logits: ForCausalLMLoss(torch.tanh(logits / 3.0) * 3.0, LABELS, ROWS),
    "scaled": lambda logits: ForCausalLMLoss(logits * 0.25, LABELS, ROWS),
    "divided": lambda logits: ForCausalLMLoss(logits / 8, LABELS, ROWS),
    "divided by an upcast": lambda logits: ForCausalLMLoss(logits.to(torch.float32) / 0.7, LABELS, ROWS),
    "one sequence": lambda logits: F.cross_entropy(logits[1], LABELS[1]),
    "last tokens": lambda logits: F.cross_entropy(logits[:, -3:, :].reshape(-1, ROWS), LABELS[:, -3:].reshape(-1)),
    "every second": lambda logits: F.cross_entropy(logits[1, ::2], LABELS[1, ::2]),
    "two losses": lambda logits: ForCausalLMLoss(logits, LABELS, ROWS) + F.cross_entropy(logits[0, 3:], LABELS[0, 3:]),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_models_end_in_pieces(loss: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = tuple(torch.randn(shape).to(dtype).requires_grad_() for shape in [(2, 9, WIDTH), (ROWS, WIDTH), (ROWS,)])
    expected = LOSSES[loss](F.linear(*tensors))
    gradients = torch.autograd.grad(expected, tensors)
    with counting() as counts:
        found = LOSSES[loss](deferred(tensors))
        assert found.dtype == expected.dtype
        assert type(found) is torch.Tensor
        found_gradients = torch.autograd.grad(found, tensors)
    assert counts == {"pieces": 2 if loss == "two losses" else 1, "computed": 0}
    assert isinstance(found_gradients[1], TableGradient)
    exact = dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6 if exact else 2**-7, atol=1e-6)
    for ours, theirs in zip(found_gradients, gradients, strict=True):
        bound = (1e-5 if exact else 2**-6) * theirs.float().abs().max()
        assert (ours.float() - theirs.float()).abs().max() <= bound


@pytest.mark.parametrize("cast", [False, True])
def test_autocast(cast: bool, tensors: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), counting() as counts:
        expected, logits = F.linear(*tensors), deferred(tensors)
        assert logits.dtype == expected.dtype == torch.bfloat16
        if cast:
            expected, logits = expected.float(), logits.float()
        expected = F.cross_entropy(expected.view(-1, ROWS), FLAT)
        found = F.cross_entropy(logits.view(-1, ROWS), FLAT)
    assert counts == {"pieces": 1, "computed": 0}
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2**-7 if expected.dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    gradients = torch.autograd.grad(expected, tensors)
    for ours, theirs in zip(torch.autograd.grad(found, tensors), gradients, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).abs().max() <= 2**-6 * theirs.abs().max()


WHOLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda logits: logits.sum(),
    "softmax": lambda logits: logits.softmax(-1)[..., :3].log().sum(),
    "transposed": lambda logits: F.cross_entropy(logits.transpose(1, 2), LABELS),
    "weights": lambda logits: F.cross_entropy(logits.view(-1, ROWS), FLAT, weight=torch.linspace(0.5, 1, ROWS)),
    "probabilities": lambda logits: F.cross_entropy(logits.view(-1, ROWS), torch.full((18, ROWS), 1 / ROWS)),
    "part of the vocabulary": lambda logits: F.cross_entropy(logits[..., :40].reshape(-1, 40), FLAT % 40),
    "by a mask": lambda logits: F.cross_entropy(logits[LABELS > 5], LABELS[LABELS > 5]),
    "times a tensor": lambda logits: ForCausalLMLoss(logits * torch.tensor(0.3), LABELS, ROWS),
    "loss and another": lambda logits: ForCausalLMLoss(logits, LABELS, ROWS) + logits.logsumexp(-1).square().mean(),
    "after a write": lambda logits: ForCausalLMLoss(logits.index_fill_(-1, torch.tensor([3]), -1e4), LABELS, ROWS),
    "divided in place": lambda logits: ForCausalLMLoss(logits.div_(3), LABELS, ROWS),
    "after a write to a slice": lambda logits: (logits[:, 2].zero_(), ForCausalLMLoss(logits, LABELS, ROWS))[1],
    "written after it was scaled": lambda logits: (lambda twice: (logits.zero_(), twice.sum() + logits.sum())[1])(
        logits * 2
    ),
    "element": lambda logits: logits[1, 2, 3] * 2,
    "function of a program": lambda logits: _Double.apply(logits.tanh()).sum(),
    "clone": lambda logits: logits.clone().square().sum(),
    "cut": lambda logits: F.cross_entropy(logits.detach().view(-1, ROWS), FLAT) * logits.sum(),
    "stacked": lambda logits: torch.stack([logits, logits * 2]).square().sum(),
}


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


@pytest.mark.parametrize("use", WHOLE)
def test_other_functions_run_on_computed_logits(tensors: Any, use: str) -> None:
    expected = WHOLE[use](F.linear(*tensors))
    gradients = torch.autograd.grad(expected, tensors)
    found = WHOLE[use](deferred(tensors))
    torch.testing.assert_close(found + 0, expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(torch.autograd.grad(found, tensors), gradients, strict=True):
        torch.testing.assert_close(ours + 0, theirs, rtol=1e-4, atol=1e-5)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda logits: torch.from_numpy(logits.detach().cpu().numpy()),
    "numpy, force": lambda logits: torch.from_numpy(logits.numpy(force=True)),
    "list": lambda logits: torch.tensor(logits.tolist()),
    "item": lambda logits: torch.tensor(logits[0, 0, 0].item()),
    "deepcopy": lambda logits: copy.deepcopy(logits.detach()),
    "pickle": lambda logits: pickle.loads(pickle.dumps(logits)),
    "save": lambda logits: _saved(logits),
    "argmax": lambda logits: logits.argmax(-1),
    "greedy": lambda logits: logits[:, -1, :].to(copy=True, dtype=torch.float32, device="cpu"),
    "data": lambda logits: logits.data + 0,
    "double": lambda logits: logits.double() + 0,
    "pytree": lambda logits: pytree.tree_map(lambda leaf: leaf.float(), {"logits": [logits]})["logits"][0] + 0,
    "index": lambda logits: logits[torch.tensor([1]), torch.tensor([2, 3])],
    "comparison": lambda logits: logits > 0,
    "isfinite": lambda logits: torch.isfinite(logits),
    "cat": lambda logits: torch.cat([logits, logits]),
}


def _saved(logits: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(logits.detach(), file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("grad", [False, True])
def test_reads_give_computed_logits(tensors: Any, read: str, grad: bool) -> None:
    with torch.set_grad_enabled(grad):
        expected, found = READS[read](F.linear(*tensors)), READS[read](deferred(tensors))
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.detach() + 0, expected.detach() + 0, rtol=1e-5, atol=1e-6)


def test_it_answers_what_a_tensor_is_asked(tensors: Any) -> None:
    expected = F.linear(*tensors)
    with counting() as counts:
        logits = deferred(tensors)
        assert isinstance(logits, torch.Tensor)
        assert logits.shape == expected.shape and logits.stride() == expected.stride()
        assert (logits.dtype, logits.device, logits.ndim) == (expected.dtype, expected.device, 3)
        assert logits.requires_grad and not logits.is_leaf and logits.grad_fn is not None
        assert logits.is_contiguous() and len(logits) == 2 and logits.numel() == expected.numel()
        output = CausalLMOutputWithPast(logits=logits)
        assert output["logits"] is logits and output.to_tuple()[0] is logits
        part = logits[..., :-1, :]
        assert (part.shape, part.stride()) == (expected[..., :-1, :].shape, expected[..., :-1, :].stride())
        assert isinstance(part.contiguous().view(-1, ROWS), DeferredLogits)
        assert logits.cpu() is logits
        with torch.no_grad():
            assert not deferred(tensors).requires_grad
    assert counts["computed"] == 0
    assert repr(logits).startswith("tensor(")


def test_evaluation_in_inference_mode(tensors: Any) -> None:
    with torch.inference_mode(), counting() as counts:
        expected = ForCausalLMLoss(F.linear(*tensors), LABELS, ROWS)
        logits = deferred(tensors)
        torch.testing.assert_close(ForCausalLMLoss(logits, LABELS, ROWS), expected)
        assert counts == {"pieces": 1, "computed": 0}
        torch.testing.assert_close(logits + 0, F.linear(*tensors))


def test_a_program_that_asks_for_the_gradient_of_logits_gets_it(tensors: Any) -> None:
    kept, seen = [], []
    for logits in (F.linear(*tensors), deferred(tensors)):
        logits.retain_grad()
        logits.register_hook(lambda gradient: seen.append(gradient))
        ForCausalLMLoss(logits, LABELS, ROWS).backward()
        kept.append(logits.grad)
    torch.testing.assert_close(kept[1], kept[0], rtol=1e-5, atol=1e-7)
    assert len(seen) == 2


def test_hooks_of_logits_that_went_out_of_scope_run(tensors: Any) -> None:
    seen = []
    logits = deferred(tensors).flatten(0, 1) * 2
    logits.register_hook(seen.append)
    logits = logits / 3
    F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.int64)).backward()
    assert [gradient.shape for gradient in seen] == [(18, ROWS)]


@pytest.mark.parametrize("backward", [False, True])
def test_soft_capped_logits_are_freed(tensors: Any, backward: bool) -> None:
    """The node of a tanh saves its result, which must not hold the node."""
    hidden, weight, _ = tensors
    inner = hidden * 1
    freed = weakref.ref(inner)
    logits = (deferred_linear(inner, weight, None, StoredTable(weight, BLOCK)).flatten(0, 1) / 3).tanh() * 3
    loss = F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.int64))
    if backward:
        loss.backward()
    del inner, logits, loss
    assert freed() is None


def test_detached_logits_outlive_a_change_of_the_weights(tensors: Any) -> None:
    expected, logits = F.linear(*tensors).detach(), deferred(tensors).detach()
    with torch.no_grad():
        tensors[1].mul_(2)
    assert type(logits) is torch.Tensor
    torch.testing.assert_close(logits, expected)


def test_logits_are_computed_once(tensors: Any) -> None:
    with counting() as counts:
        logits = deferred(tensors)
        capped = torch.tanh(logits / 3) * 3
        for _ in range(2):
            assert (capped.sum() + logits.sum() + logits[0].sum()).isfinite()
    assert counts["computed"] == 1


def test_changed_weights_and_hidden_states_are_noticed(tensors: Any) -> None:
    hidden, weight, bias = tensors
    logits = deferred(tensors)
    with torch.no_grad():
        weight.mul_(2)
    for use in (lambda: logits + 1, lambda: ForCausalLMLoss(logits, LABELS, ROWS)):
        with pytest.raises(MemascendError, match="fused_loss=False"):
            use()
    states = hidden.detach().clone()
    logits = deferred_linear(states, weight, bias, StoredTable(weight, BLOCK))
    states.zero_()
    with pytest.raises(MemascendError, match="in place"):
        logits.sum()


# ---- models ------------------------------------------------------------------------------------------------------

SMALL = {"vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
T5 = T5Config(vocab_size=120, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2, decoder_start_token_id=0)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, **HEADS)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, **HEADS, head_dim=16, final_logit_softcapping=5.0)),
    "cohere2": lambda: Cohere2ForCausalLM(Cohere2Config(**SMALL, **HEADS, logit_scale=0.25)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SMALL, **HEADS, logits_scaling=8.0)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=120, n_embd=32, n_layer=1, n_head=2, n_positions=32)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SMALL, num_attention_heads=2)),
    "t5": lambda: T5ForConditionalGeneration(T5),
}


class _Head(nn.Module):
    """A head whose logits are deferred."""

    def __init__(self, head: nn.Linear, table: StoredTable) -> None:
        super().__init__()
        self.weight, self.bias, self.table = head.weight, head.bias, table

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return deferred_linear(hidden, self.weight, self.bias, self.table)


def _put_head(model: nn.Module) -> None:
    head = model.get_output_embeddings()
    owner = next(module for module in model.modules() if head in module._modules.values())
    name = next(name for name, module in owner._modules.items() if module is head)
    owner._modules[name] = _Head(head, StoredTable(head.weight, 32))


@pytest.mark.parametrize("name", MODELS)
def test_losses_of_models(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    ids = torch.randint(3, 120, (2, 12))
    expected = model(input_ids=ids, labels=ids)
    expected.loss.backward()
    gradients = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    model.zero_grad()
    _put_head(model)
    with counting() as counts:
        found = model(input_ids=ids, labels=ids)
        found.loss.backward()
    assert counts == {"pieces": 1, "computed": 0}
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.logits + 0, expected.logits, rtol=1e-5, atol=1e-5)
    named = {id(parameter): key for key, parameter in model.named_parameters()}
    assert len(named) >= len(gradients)
    for key, parameter in model.named_parameters():
        if key in gradients:
            torch.testing.assert_close(parameter.grad + 0, gradients[key], rtol=1e-4, atol=1e-6)


def test_generate(tensors: Any) -> None:
    torch.manual_seed(0)
    model = MODELS["gemma2"]().eval()
    ids = torch.randint(3, 120, (2, 5))
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    _put_head(model)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)
