"""Two copies of a small model, one offloaded and one in memory, on which the same code runs.

A failing program of `session/test_differential.py` is printed as a script that uses `Twins`: run it from
tests/support/.
"""

from __future__ import annotations

import ast
import collections
import copy
import functools
import gc
import io
import re
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tiny_models
import torch
from bit_equality import difference
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import memascend

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

#: 147 KB in float32: a matrix of WIDTH x WIDTH is not packed.
WIDTH = 192
#: Rows of the embedding: packed with the small modules, and above 1 MiB, so that it is a unit of its own.
SMALL, LARGE = 40, 1400


class Gate(torch.autograd.Function):
    """A function of a user's own, which saves a weight, and gives none for another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gain: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, gain = ctx.saved_tensors
        return gradient * gain, (gradient * x).sum(dim=tuple(range(x.dim() - 1))), None


class Block(nn.Module):
    """A residual block with a buffer that it writes in training, dropout, and a function of its own."""

    average: torch.Tensor

    def __init__(self, norm: str, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if norm == "layer" else nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Parameter(torch.zeros(3))
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute (rows, columns, WIDTH) from the same."""
        y = self.norm(x.flatten(0, -2)).view(x.shape)
        y = functional.gelu(self.up(y))
        if self.training:
            with torch.no_grad():
                self.average.lerp_(y.detach().mean((0, 1)).to(self.average.dtype), 0.1)
        return x + self.down(self.dropout(Gate.apply(y, self.gain, self.unused)))


class Body(nn.Module):
    """The base model, as transformers calls it."""

    def __init__(self, twins: Twins) -> None:
        super().__init__()
        self.embedding = nn.Embedding(twins.vocabulary, WIDTH, max_norm=twins.max_norm)
        self.layers = nn.ModuleList(Block(twins.norm, twins.dropout) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Compute (rows, columns, WIDTH) from (rows, columns)."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@dataclass
class Output:
    """The result of a forward pass."""

    loss: torch.Tensor
    logits: torch.Tensor


class Model(nn.Module):
    """A body, a head that may be tied to the embedding, and a scale of one element."""

    def __init__(self, twins: Twins) -> None:
        super().__init__()
        self.body = Body(twins)
        self.head = nn.Linear(WIDTH, twins.vocabulary, bias=False)
        if twins.tied:
            self.head.weight = self.body.embedding.weight
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> Output:
        """Compute loss and logits from two tensors of (rows, columns)."""
        h = self.body(ids)
        # The gain of a block, outside of that block.
        logits = self.head(h) * self.scale.exp() + 0.01 * self.body.layers[1].gain.sum()
        return Output(functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten()), logits)


class StopHere(Exception):
    """An error of the program that runs on both copies."""


#: Allowed refusals where PyTorch in memory works: a pattern of the message, and whether it comes in the middle of a
#: pass, which may then have written buffers and some of the gradients. The copy in memory leaves it out, and both go on
#: equal: after a refusal in a pass with ours' buffers, and without gradients.
REFUSED = {
    "used twice in one autocast block": True,
    "no buffer of .* is free for .* raise host_memory to": True,
    "was consumed by optimizer.step": True,
    "this gradient of .* is gone": True,
    "the values of the gradient of .* are gone": False,
    "changed since the forward pass whose gradients were asked for": True,
    "has written to its own weights": True,
    "recomputing a module of .* saved": True,
    r"backward\(create_graph=True\) gives": True,
    r"load_state_dict\(assign=True\) would replace": False,
    "is on SSD as .* cannot become": False,
    "cannot share their values on SSD": False,
    r"cannot be used within torch\.func's transforms": True,
    "a module of an offloaded model cannot be copied": False,
    r"cannot update .*: use memascend\.": False,
}


#: A gradient that ours no longer has after a step, where in memory it stays until `zero_grad`.
CONSUMED = "consumed by a step"


class Different(AssertionError):
    """The copies differ."""


class Side:
    """One copy of the model, the names that the program has, and random numbers of its own."""

    def __init__(self, model: nn.Module, optimizer: Any, twins: Twins, reopen: Any, flush: Any) -> None:
        self.twins, self.reopen = twins, reopen
        self.shown: list[Any] = []
        torch.manual_seed(3)
        self.random = torch.get_rng_state()
        self.given = {
            "torch": torch,
            "nn": nn,
            "F": functional,
            "memascend": memascend,
            "copy": copy,
            "io": io,
            "in_a_thread": in_a_thread,
            "StopHere": StopHere,
            "batch": twins.batch,
            "show": self.show,
            "stop": stop,
            "flush": flush,
            "reopen": self.begin_again,
        }
        self.names: dict[str, Any] = {}
        self.take(model, optimizer)

    @property
    def model(self) -> Model:
        """The model as it is now."""
        return self.names["model"]

    def take(self, model: nn.Module, optimizer: Any) -> None:
        """Begin anew with these, without anything that was kept."""
        self.names.clear()
        self.names |= self.given | {"model": model, "optimizer": optimizer, "kept": {}, "hooks": []}
        self.original = [] if model is None else [id(parameter) for parameter in model.parameters()]

    def begin_again(self) -> None:
        """Close and resume; all that the program kept is gone, and random numbers begin anew.

        A parameter that the program has put into the model is not on the store: then nothing is done.
        """
        if self.original != [id(parameter) for parameter in self.names["model"].parameters()]:
            return
        for hook in self.names["hooks"]:
            hook.remove()
        model, optimizer = self.names["model"], self.names["optimizer"]
        self.take(None, None)  # type: ignore[arg-type]
        self.take(*self.reopen(model, optimizer))
        torch.manual_seed(4)

    def show(self, *values: Any) -> None:
        """Note values for the comparison, as they are now."""
        self.shown.append(pytree.tree_map(_copy, values))

    def run(self, code: CodeType) -> BaseException | None:
        """Run a statement, and return the exception that ended it, without its traceback."""
        self.shown = []
        torch.set_rng_state(self.random)
        try:
            exec(code, self.names)
        except BaseException as error:
            _strip(error)
            return error
        finally:
            self.random = torch.get_rng_state()
        return None

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the copies of all parameters, read as a program reads them."""
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def gradients(self) -> dict[str, torch.Tensor | str | None]:
        """Return the copies of all gradients, but of those that a step has consumed."""
        return {name: _gradient(parameter) for name, parameter in self.model.named_parameters()}

    def cheap(self) -> dict[str, Any]:
        """Return values that can be compared without reading a weight."""
        return {
            **{f"buffer {name}": buffer.clone() for name, buffer in self.model.named_buffers()},
            **{f"requires_grad of {name}": p.requires_grad for name, p in self.model.named_parameters()},
            **{f"whether {name} has a gradient": p.grad is not None for name, p in self.model.named_parameters()},
            "random numbers": self.random,
        }


@functools.cache
def _statements(code: str) -> list[CodeType]:
    body = ast.parse(code).body
    return [compile(ast.Module([statement], []), "<program>", "exec") for statement in body]


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _gradient(parameter: nn.Parameter) -> torch.Tensor | str | None:
    try:
        return None if parameter.grad is None else parameter.grad.detach().clone()
    except memascend.MemascendError as error:
        if "is gone" not in str(error):
            raise
        return CONSUMED


def _strip(error: BaseException | None) -> None:
    """Release the objects that the frames of an exception hold."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def stop(kind: type[BaseException] = StopHere) -> Any:
    """Return a hook, of any kind, that raises."""

    def hook(*_: Any) -> None:
        raise kind

    return hook


def in_a_thread(work: Callable[[], None]) -> None:
    """Run a function in another thread, and raise its exception."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


@dataclass
class Twins:
    """An offloaded model and the same in memory, with an optimizer each.

    `twins(code)` runs a piece of a program on both, and raises Different where they part. Ours runs first. Where it
    refuses by one of the patterns in `REFUSED`, the copy in memory leaves the piece out. Any other exception must be
    one in memory too.
    """

    norm: str = "layer"
    tied: bool = False
    max_norm: float | None = None
    dropout: float = 0.0
    vocabulary: int = SMALL
    dtype: str = "float32"
    optimizer: str = "AdamW"
    budget: str = "least"
    recompute: bool = True
    durability: str = "step"
    #: Whether all weights and gradients are read and compared after every piece, or at the end only.
    watched: bool = True

    def __post_init__(self) -> None:
        # In memory where that is possible: faults of drives are tested elsewhere.
        memory = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="twins", dir=memory if memory.is_dir() else None))
        self.counts = collections.Counter(same=0, refused=0)
        self.refusals: collections.Counter[str] = collections.Counter()
        self.ours = self.theirs = None  # type: ignore[assignment]
        try:
            ours, theirs = self.build(), self.build()
            self._offload(ours)
            make = getattr(memascend, self.optimizer)
            options = {"momentum": 0.9} if self.optimizer == "SGD" else {}
            self.ours: Side = Side(
                ours, make(ours.parameters(), lr=1e-2, **options), self, self._resumed, self._flushed
            )
            self.theirs: Side = Side(
                theirs, make(theirs.parameters(), lr=1e-2, **options), self, _as_if_resumed, _nothing
            )
        except BaseException:
            self.close()
            raise

    def build(self) -> Model:
        """Return the model as both begin."""
        return copy.deepcopy(_prototype(**{name: getattr(self, name) for name in _OF_MODEL}))

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and targets (2, 5), always the same for a number."""
        generator = torch.Generator().manual_seed(number)
        both = torch.randint(self.vocabulary, (2, 2, 5), generator=generator)
        return both[0], both[1]

    def _offload(self, model: nn.Module) -> None:
        budget = {
            "least": tiny_models.smallest_budget,
            "overlapping": tiny_models.overlapping_budget,
            "ample": lambda _: 1 << 28,
        }
        memascend.offload(
            model,
            store=self.folder / "store",
            host_memory=budget[self.budget](model),
            recompute=self.recompute,
            durability=self.durability,
            keep_store=True,
            **_OPTIONS,
        )

    # ---- running ----------------------------------------------------------------------------------------

    def __enter__(self) -> Twins:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            if kind is None:
                self.compare_all()
        finally:
            self.close()

    def close(self) -> None:
        """Close the offloaded model, whatever became of the program, and remove its store."""
        if self.ours is not None and self.ours.names.get("model") is not None:
            memascend.close(self.ours.model)
        gc.collect(0)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __call__(self, code: str) -> str:
        """Run a piece of a program on both, statement by statement; return "same", "refused" or "both raise"."""
        result = "same"
        for statement in _statements(code):
            result = self._run(statement)
            if result != "same":
                break  # An exception ends the piece.
        self._raise(difference(self.ours.cheap(), self.theirs.cheap()))
        if self.watched:
            self._raise(self._all())
        self.counts[result] += 1
        return result

    def _run(self, statement: CodeType) -> str:
        before = self.ours.random
        error = self.ours.run(statement)
        if isinstance(error, memascend.MemascendError) and (known := _refusal(error)):
            self.ours.random = before
            self._leave_out(known)
            return "refused"
        expected = self.theirs.run(statement)
        self._compare_errors(error, expected)
        self._raise(difference(self.ours.shown, self.theirs.shown, "shown"))
        return "same" if expected is None else "both raise"

    def _leave_out(self, refusal: str) -> None:
        self.refusals[refusal] += 1
        if REFUSED[refusal]:
            self.forget_pass()

    def forget_pass(self) -> None:
        """Go on equal after a pass that ours refused in the middle: without gradients, with written buffers."""
        for side in (self.ours, self.theirs):
            side.model.zero_grad()
            if "hook" in side.names:
                side.names["hook"].remove()  # which the rest of the piece does, if it raises
        with torch.no_grad():
            for ours, theirs in zip(self.ours.model.buffers(), self.theirs.model.buffers(), strict=True):
                theirs.copy_(ours)
            if self.max_norm is not None:
                ours, theirs = (side.model.body.embedding.weight for side in (self.ours, self.theirs))
                theirs.copy_(ours.clone())
        self.theirs.random = self.ours.random

    def compare_all(self) -> None:
        """Compare every weight, read in both ways, every gradient, and the optimizers' states."""
        self._raise(self._all())
        stored = dict(memascend.parameters_of(self.ours.model))
        theirs = self.theirs.parameters()
        self._raise(difference(stored, {name: theirs[name] for name in stored}, "stored "))
        ours, theirs = (side.names["optimizer"].state_dict() for side in (self.ours, self.theirs))
        self._raise(difference(ours["state"], theirs["state"], "state of the optimizer"))

    def _all(self) -> str | None:
        ours = self.ours.gradients()
        consumed = {name: CONSUMED for name, gradient in ours.items() if gradient is CONSUMED}
        return difference(ours, self.theirs.gradients() | consumed, "gradient ") or difference(
            self.ours.parameters(), self.theirs.parameters(), "weight "
        )

    def _compare_errors(self, error: BaseException | None, expected: BaseException | None) -> None:
        if (error is None) != (expected is None):
            self._raise(f"ours: {_told(error)}; in memory: {_told(expected)}")
        if not isinstance(error, memascend.MemascendError) and type(error) is not type(expected):
            self._raise(f"ours: {_told(error)}; in memory: {_told(expected)}")

    def _raise(self, found: str | None) -> None:
        if found is not None:
            raise Different(found)

    # ---- closing and resuming ---------------------------------------------------------------------------

    def _resumed(self, model: nn.Module, _optimizer: Any) -> tuple[nn.Module, Any]:
        # Within a step a run goes back to the step before (durability/test_whole_steps.py). The copy in memory cannot:
        # both go on from their present state.
        memascend.offload_of(model).commit_log._drop_snapshot()
        memascend.close(model)
        given = self.build()
        with torch.no_grad():
            for tensor in (*given.parameters(), *given.buffers()):
                tensor.fill_(3)
        resumed = memascend.resume(
            self.folder / "store", model=given, keep_store=True, durability=self.durability, **_OPTIONS
        )
        return resumed.model, resumed.optimizer

    def _flushed(self) -> None:
        memascend.flush(self.ours.model)

    # ---- text -------------------------------------------------------------------------------------------

    def changed_options(self) -> dict[str, Any]:
        """Return the options that are not as usual."""
        return {name: value for name, value in asdict(self).items() if value != getattr(type(self), name)}


_OF_MODEL = ("norm", "tied", "max_norm", "dropout", "vocabulary", "dtype")
_OPTIONS: dict[str, Any] = {"allocator": "pageable", "compute_threads": 1}


@functools.cache
def _prototype(**options: Any) -> Model:
    random = torch.get_rng_state()
    torch.manual_seed(0)
    wanted = type("Wanted", (), options)
    model = Model(wanted).to(getattr(torch, options["dtype"])).train()  # type: ignore[arg-type]
    torch.set_rng_state(random)
    return model


def _as_if_resumed(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    """Return the model as if resumed: without gradients, and in training mode."""
    model.zero_grad()
    model.train()
    return model, optimizer


def _nothing() -> None:
    """Do nothing: ours has something to flush, a model in memory has not."""


def _told(error: BaseException | None) -> str:
    return "no error" if error is None else f"{type(error).__name__}: {error}"


def _refusal(error: BaseException) -> str | None:
    return next((pattern for pattern in REFUSED if re.search(pattern, str(error))), None)


def program_text(options: dict[str, Any], pieces: list[str]) -> str:
    """Return a script that runs a program."""
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    lines = ["from differential import Twins", "", f"with Twins({given}) as run:"]
    for piece in pieces:
        lines.append(f'    run("""\\\n{piece}\n""")' if "\n" in piece else f"    run({piece!r})")
    return "\n".join(lines)
