"""Lightning's Trainer over offloaded models: importing this module registers the strategy "memascend".

Of Lightning's names this module overrides methods of `SingleDeviceStrategy` and of the precision plugins, all of them
public. Tested with lightning 2.6. `pytorch_lightning` is used where `lightning` is not installed.
"""

from __future__ import annotations

import importlib
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memascend.autograd.dispatch import refuse_foreign
from memascend.errors import CheckpointError, MemascendError
from memascend.integrations import named_checkpoints as named
from memascend.optim import OffloadedOptimizer
from memascend.ranks.group import refuse_group
from memascend.recovery.resume import resume
from memascend.session.api import offload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from memascend.options import StorePaths
    from memascend.session.session import Session


def _import(name: str) -> Any:
    """Import a module of Lightning, under whichever of its names is installed."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            missing = error
            continue
        return importlib.import_module(f"{package}.{name}")
    raise ImportError(
        f"memascend.integrations.lightning needs lightning ({missing}): pip install 'memascend[lightning]'"
    )


_strategies, _plugins = _import("strategies"), _import("plugins.precision")
_Single: Any = _strategies.SingleDeviceStrategy
_Plain: Any = _plugins.Precision
_Half: Any = _plugins.HalfPrecision
_Mixed: Any = _plugins.MixedPrecision

#: Options of `memascend.offload` that a run in a store keeps.
_KEPT_BY_RUN = ("fused_loss", "gradients")


class _ClipsInUpdate:
    """A precision plugin that leaves clipping by norm to the optimizer, which does it within the update."""

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Scale gradients so that their 2-norm is at most `clip_val`."""
        inner = _unwrapped(optimizer)
        if isinstance(inner, OffloadedOptimizer):
            inner.clip_grad_norm_(clip_val)
        else:
            super().clip_grad_by_norm(optimizer, clip_val)  # type: ignore[misc]


class _Precision(_ClipsInUpdate, _Plain):
    """Weights and computation in the dtype that the model has."""


class _HalfPrecision(_ClipsInUpdate, _Half):
    """Weights and computation in bfloat16."""


class _MixedPrecision(_ClipsInUpdate, _Mixed):
    """Computation under autocast."""


def _adapted(plugin: Any) -> Any:
    """Return the plugin of memascend that takes the place of a plugin of Lightning.

    Raises MemascendError for one whose arithmetic an offloaded model cannot have.
    """
    if plugin is None or isinstance(plugin, _ClipsInUpdate):
        return plugin
    kind, precision = type(plugin), getattr(plugin, "precision", "32-true")
    if kind is _Plain:
        return _Precision()
    if kind is _Half and precision == "bf16-true":
        return _HalfPrecision(precision)
    if kind is _Mixed and precision == "bf16-mixed":
        return _MixedPrecision(precision, plugin.device)
    raise MemascendError(
        f"precision={precision!r} ({kind.__name__}) is not one that an offloaded model trains in: use '32-true', "
        "'bf16-true' or 'bf16-mixed'"
    )


class MemascendStrategy(_Single):
    """A strategy for a LightningModule that is offloaded, or that has an offloaded model as a part.

    With `store` and `host_memory` the module itself is offloaded when training is set up, unless it, or a part of it,
    is offloaded already. Without them it has to be.

    A checkpoint is a directory of kilobytes that names a checkpoint in the model's store; they are removed together.
    `ckpt_path=` goes back to one: later steps of the run are discarded. With `store`, a new process may give a module
    with any weights, and the run goes on from its store.

    `memascend.close(module)` gives memory and files back after training, as usual.
    """

    strategy_name = "memascend"
    optimizers: Any

    def __init__(
        self,
        store: StorePaths | None = None,
        host_memory: str | int | None = None,
        *,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        """Offload the module to `store`, with the options of `memascend.offload`.

        Raises ValueError where only one of `store` and `host_memory` is given, or options without them.
        """
        if (store is None) != (host_memory is None) or (store is None and options):
            raise ValueError(
                "MemascendStrategy(...) offloads the module: give both store= and host_memory=, or neither"
            )
        super().__init__("cpu", accelerator, checkpoint_io, precision_plugin)
        self._where = None if store is None else {"store": store, "host_memory": host_memory, **options}
        self._devices: list[torch.device] = []
        #: The optimizers of a checkpoint, until the module's have been made.
        self._restored: list[OffloadedOptimizer] = []

    # ---- where it computes ------------------------------------------------------------------------------

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The device that the Trainer was given; empty until it gives one."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices is not None and len(devices) > 1:
            raise MemascendError(f"devices={len(devices)}: an offloaded model computes on one device; use devices=1")
        if devices:
            self._devices, self._root_device = list(devices), devices[0]

    @property
    def num_nodes(self) -> int:
        """One."""
        return 1

    @num_nodes.setter
    def num_nodes(self, nodes: int) -> None:
        if nodes != 1:
            raise MemascendError(f"num_nodes={nodes}: an offloaded model trains in one process; use num_nodes=1")

    @property
    def precision_plugin(self) -> Any:
        """The plugin that Lightning asks for precision and clipping."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = _adapted(plugin)

    def model_to_device(self) -> None:
        """Offload the module, if it is to be, and move its parts in memory to the device."""
        module = self.lightning_module
        if named.open_session(module) is None:
            if self._where is None:
                raise MemascendError(
                    f"{type(module).__name__} is not offloaded: give MemascendStrategy(store=..., host_memory=...), "
                    "or offload the model before"
                )
            refuse_group("MemascendStrategy", "use devices=1 and num_nodes=1, or a loop around memascend.offload")
            offload(module, **self._where)
        session = self._session
        if session.torch_device.type != self.root_device.type:
            raise MemascendError(
                f"the model computes on {session.torch_device}, and the Trainer on {self.root_device}: use "
                f"Trainer(accelerator='{session.torch_device.type}'), or device='{self.root_device.type}' where the "
                "model is offloaded"
            )
        super().model_to_device()

    @property
    def _session(self) -> Session:
        session = named.open_session(self.lightning_module)
        assert session is not None, "the module was offloaded at set-up"
        return session

    def setup_optimizers(self, trainer: Any) -> None:
        """Have the module make its optimizers. Raises MemascendError for one that cannot train weights on SSD."""
        super().setup_optimizers(trainer)
        for optimizer in map(_unwrapped, self.optimizers):
            trained = (parameter for group in optimizer.param_groups for parameter in group["params"])
            refuse_foreign(optimizer, [parameter for parameter in trained if parameter.requires_grad])

    # ---- steps ------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `training_step` as one pass over its weights."""
        with self.precision_plugin.train_step_context():
            return self._as_pass("training_step")(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `validation_step` as one pass over its weights."""
        with self.precision_plugin.val_step_context():
            return self._as_pass("validation_step")(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `test_step` as one pass over its weights."""
        with self.precision_plugin.test_step_context():
            return self._as_pass("test_step")(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `predict_step` as one pass over its weights."""
        with self.precision_plugin.predict_step_context():
            return self._as_pass("predict_step")(*args, **kwargs)

    def _as_pass(self, name: str) -> Callable[..., Any]:
        """Return a method of the module as a pass, where the module itself is offloaded and not only a part of it."""
        method: Callable[..., Any] = getattr(self.lightning_module, name)
        session = self._session
        if session.model() is not self.lightning_module or session.attachment is None:
            return method
        return session.attachment.as_pass(method)

    # ---- checkpoints ------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the part of the module's state that is not on the store."""
        return named.state_in_memory(self.lightning_module)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the states of an optimizer; of one whose states are on the store, nothing."""
        return {} if self._is_stored(optimizer) else super().optimizer_state(optimizer)

    def _is_stored(self, optimizer: Any) -> bool:
        return named.belongs_to(_unwrapped(optimizer), self._session)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Keep a checkpoint in the store, and write the directory that names it.

        One that is there under this name stays until the new one is whole. Raises as `memascend.save_checkpoint`
        does.
        """
        directory = Path(filepath)
        before = [named.read_name(directory)] if named.has_names(directory) else []
        tag = named.keep(self._session, directory.stem)
        part = _part_of(directory, tag)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.checkpoint_io.save_checkpoint(checkpoint, part, storage_options=storage_options)
            named.write_names(directory, {0: (self._session, tag)})
        except BaseException:
            named.forget(self.lightning_module, {tag})
            raise
        for old in before:
            if old != tag:
                named.forget(self.lightning_module, {old})
                _part_of(directory, old).unlink(missing_ok=True)

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None) -> Any:
        """Read a checkpoint's directory. Raises CheckpointError for anything else."""
        directory = Path(checkpoint_path)
        if not directory.is_dir():
            raise CheckpointError(
                f"{directory} is no checkpoint of an offloaded model, which is a directory: load a file's weights into "
                "the module (load_from_checkpoint) before it is offloaded"
            )
        tag = named.read_name(directory)
        # Before 2.6 Lightning neither has this argument nor gives it.
        options = {} if weights_only is None else {"weights_only": weights_only}
        checkpoint = super().load_checkpoint(_part_of(directory, tag), **options)
        return {**checkpoint, "memascend": tag}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Go back to the checkpoint in the store, and load the module's parts in memory.

        Lightning calls this before set-up: a module that is not offloaded yet resumes the run of `store`.
        """
        module, tag = self.lightning_module, checkpoint["memascend"]
        session = named.open_session(module)
        if tag is not None:
            self._restored = self._resume(module, tag) if session is None else named.go_back(session, tag)
        # Without a name nothing on the store is trained: the module brings its frozen weights itself.
        named.load_state_in_memory(module, checkpoint["state_dict"], frozen_elsewhere=tag is None)

    def _resume(self, module: nn.Module, tag: str) -> list[OffloadedOptimizer]:
        if self._where is None:
            raise MemascendError(
                f"{type(module).__name__} is not offloaded, and its weights are in the store of the run: give "
                "MemascendStrategy(store=..., host_memory=...), or the module that memascend.resume returns"
            )
        options = {name: value for name, value in self._where.items() if name not in _KEPT_BY_RUN}
        return resume(**options, model=module, tag=tag).optimizers

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Have the checkpoint's optimizers take the place of those on the store; load the states of the others."""
        optimizers = []
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            new = optimizer
            if self._is_stored(optimizer):
                new = named.successor(_unwrapped(optimizer), self._restored)
                self._session.commit_log.leave(_unwrapped(optimizer))
                for config in self.lr_scheduler_configs:
                    named.follow(config.scheduler, _unwrapped(optimizer), new)
            else:
                optimizer.load_state_dict(state)
            optimizers.append(new)
        self.optimizers = optimizers
        self._restored = []

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint's directory, and the checkpoint that it names in the store."""
        path = Path(filepath)
        if path.is_symlink():  # ModelCheckpoint(save_last="link")
            path.unlink()
            return
        with suppress(CheckpointError):
            named.forget(self.lightning_module, {named.read_name(path)})
        shutil.rmtree(path, ignore_errors=True)

    def teardown(self) -> None:
        """Release the accelerator. The model stays offloaded until `memascend.close`."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _part_of(directory: Path, tag: str | None) -> Path:
    """Return where a checkpoint's directory has Lightning's part, by the name of the checkpoint in the store."""
    return directory / f"{tag or 'lightning'}.ckpt"


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that Lightning's wraps."""
    return getattr(optimizer, "optimizer", optimizer)


_strategies.StrategyRegistry.register(
    MemascendStrategy.strategy_name, MemascendStrategy, description=MemascendStrategy.__doc__, override=True
)
