"""Lightning's Trainer over an offloaded module gives the bits of the same Trainer in memory, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import forked
import pytest
import requirements
import tiny_models
import torch
from torch.utils.data import DataLoader

import memascend

lightning = requirements.package("lightning", "lightning.pytorch")

from memascend.integrations.lightning import MemascendStrategy  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

pytestmark = [
    # Warnings of Lightning for every small run: no workers, no data to validate on, a directory that is there.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]
WHERE: dict[str, Any] = {"host_memory": "256MiB", "allocator": "pageable"}


def batches(first: int, last: int) -> Any:
    rows = [tiny_models.batch("qwen2", number) for number in range(first, last)]
    return DataLoader(rows, collate_fn=lambda given: given[0])


class Module(lightning.LightningModule):
    """A language model that notes its losses."""

    def __init__(self, model: nn.Module, by_value: bool = False) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("seen", torch.zeros(()))
        self.losses: list[torch.Tensor] = []
        self.evaluated: list[torch.Tensor] = []

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        self.seen += 1
        loss = self.model(**batch).loss
        self.losses.append(loss.detach().clone())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        loss = self.model(**batch).loss
        self.evaluated.append(loss.clone())
        self.log("evaluated", loss)

    test_step = validation_step

    def predict_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        return self.model(**batch).logits

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        # A reference of its own, which outlives the Trainer's where a run goes on.
        optimizer = self.made = memascend.AdamW(trained, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class InMemory(Module):
    """The reference, which clips as memascend's optimizers do."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if gradient_clip_val and gradient_clip_algorithm != "value":
            optimizer.clip_grad_norm_(gradient_clip_val)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


def trainer(folder: Path, strategy: Any = "auto", **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    usual = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "enable_checkpointing": False}
    return lightning.Trainer(strategy=strategy, default_root_dir=folder, **quiet | usual | options)


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """Close modules after the test."""
    modules: list[Any] = []

    def note(module: Any) -> Any:
        modules.append(module)
        return module

    yield note
    for module in modules:
        memascend.close(module)


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(memascend.parameters_of(module)) | {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_same(ours: Module, theirs: Module, last: int | None = None) -> None:
    expected = theirs.losses if last is None else theirs.losses[-last:]
    assert len(ours.losses) == len(expected) > 0
    assert [float(loss) for loss in ours.losses] == [float(loss) for loss in expected]
    tiny_models.assert_same_weights(weights(ours), weights(theirs))


@pytest.mark.core
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("by", ["strategy", "name", "part"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_is_that_of_memory(
    store: Path, tmp_path: Path, closing: Callable[[Any], Any], precision: str, by: str, accumulate: int
) -> None:
    options = {
        "precision": precision,
        "accumulate_grad_batches": accumulate,
        "gradient_clip_val": 0.5,
        "val_check_interval": 2,
    }
    build = lambda: tiny_models.build("qwen2", torch.float32)  # noqa: E731
    expected = InMemory(build())
    trainer(tmp_path, **options).fit(expected, batches(0, 5), batches(90, 92))

    ours = closing(Module(build()))
    strategy: Any = "memascend"
    if by == "strategy":
        strategy = MemascendStrategy(store=store, **WHERE)
    elif precision == "bf16-true":
        ours.to(torch.bfloat16)
    if by != "strategy":
        memascend.offload(ours if by == "name" else ours.model, store=store, **WHERE)
    own = trainer(tmp_path, strategy, **options)
    own.fit(ours, batches(0, 5), batches(90, 92))
    assert_same(ours, expected)
    assert [float(loss) for loss in ours.evaluated] == [float(loss) for loss in expected.evaluated]
    assert memascend.stats(ours)["generation"] > 0  # its steps are durable
    assert own.global_step == 2 * -(-5 // accumulate)


def test_evaluation_and_prediction(store: Path, tmp_path: Path, closing: Callable[[Any], Any]) -> None:
    expected, ours = Module(tiny_models.build("qwen2")), closing(Module(tiny_models.build("qwen2")))
    results = []
    for module, strategy in ((expected, "auto"), (ours, MemascendStrategy(store=store, **WHERE))):
        own = trainer(tmp_path, strategy)
        results.append(
            [
                own.validate(module, batches(90, 92), verbose=False),
                own.test(module, batches(90, 92), verbose=False),
                torch.stack(own.predict(module, batches(90, 92))),
            ]
        )
    assert results[0][:2] == results[1][:2] and torch.equal(results[0][2], results[1][2])


def test_a_step_is_one_pass(store: Path, tmp_path: Path, closing: Callable[[Any], Any]) -> None:
    """So that units are read ahead and steps committed beside the backward pass, as where the model is called."""
    depths = []

    class Noting(Module):
        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            depths.append(memascend.offload_of(self).streamer.depth)
            return super().training_step(batch, index)

        def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
            depths.append(memascend.offload_of(self).streamer.depth)
            super().validation_step(batch, index)

    module = closing(Noting(tiny_models.build("qwen2")))
    own = trainer(tmp_path, MemascendStrategy(store=store, **WHERE), max_epochs=1)
    own.fit(module, batches(0, 2), batches(90, 91))
    assert depths == [1] * 4


def test_clipping_by_value(store: Path, tmp_path: Path, closing: Callable[[Any], Any]) -> None:
    options = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value", "max_epochs": 1}
    expected, ours = Module(tiny_models.build("qwen2")), closing(Module(tiny_models.build("qwen2")))
    trainer(tmp_path, **options).fit(expected, batches(0, 3))
    trainer(tmp_path, MemascendStrategy(store=store, **WHERE), **options).fit(ours, batches(0, 3))
    assert_same(ours, expected)


def test_manual_optimization(store: Path, tmp_path: Path, closing: Callable[[Any], Any]) -> None:
    class Manual(Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)
            self.automatic_optimization = False

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
            optimizer = self.optimizers()
            loss = self.model(**batch).loss
            self.losses.append(loss.detach().clone())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.optimizer.clip_grad_norm_(0.5)
            optimizer.step()

    expected, ours = Manual(tiny_models.build("qwen2")), closing(Manual(tiny_models.build("qwen2")))
    trainer(tmp_path).fit(expected, batches(0, 3))
    trainer(tmp_path, MemascendStrategy(store=store, **WHERE)).fit(ours, batches(0, 3))
    assert_same(ours, expected)


# ---- checkpoints --------------------------------------------------------------------------------------------------


def tags(module: nn.Module) -> list[str]:
    return [tag for tag, _, _ in memascend.checkpoints(module)]


class Interrupt(lightning.Callback):
    """End a run in the middle of a backward pass."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise ZeroDivisionError


@pytest.mark.core
@pytest.mark.parametrize("by", ["strategy", "part"])
def test_an_interrupted_run_goes_on_in_another_process(
    store: Path, tmp_path: Path, closing: Callable[[Any], Any], by: str
) -> None:
    expected = InMemory(tiny_models.build("qwen2"))
    options = {"gradient_clip_val": 0.5, "max_epochs": 2}
    trainer(tmp_path, **options).fit(expected, batches(0, 4))

    def saving() -> Any:
        # At the end of an epoch: Lightning begins the data of an epoch anew.
        return lightning.callbacks.ModelCheckpoint(tmp_path / "kept", every_n_epochs=1, save_last=True)

    strategy = MemascendStrategy(store=store, **WHERE) if by == "strategy" else "memascend"
    first = closing(Module(tiny_models.build("qwen2")))
    if by == "part":
        memascend.offload(first.model, store=store, **WHERE)
    own = trainer(tmp_path, strategy, callbacks=[saving(), Interrupt(5)], enable_checkpointing=True, **options)
    with pytest.raises(ZeroDivisionError):
        own.fit(first, batches(0, 4))
    memascend.close(first)

    again = closing(Module(tiny_models.build("qwen2", seed=1)))  # whatever its weights are
    strategy = MemascendStrategy(store=store, **WHERE) if by == "strategy" else "memascend"
    if by == "part":
        again.model = memascend.resume(store, **WHERE).model
    own = trainer(tmp_path, strategy, callbacks=[saving()], enable_checkpointing=True, **options)
    own.fit(again, batches(0, 4), ckpt_path="last")
    assert_same(again, expected, last=4)
    assert len(own.optimizers) == 1 and own.optimizers[0] is own.lr_scheduler_configs[0].scheduler.optimizer
    session = memascend.offload_of(again)
    assert session.commit_log.optimizers == own.optimizers


def test_checkpoints_are_removed_with_their_directories(
    store: Path, tmp_path: Path, closing: Callable[[Any], Any]
) -> None:
    kept = tmp_path / "kept"
    saving = lightning.callbacks.ModelCheckpoint(
        kept, monitor="loss", save_top_k=2, save_last="link", every_n_train_steps=1, filename="{step}"
    )
    module = closing(Module(tiny_models.build("qwen2")))
    own = trainer(
        tmp_path, MemascendStrategy(store=store, **WHERE), callbacks=[saving], enable_checkpointing=True, max_epochs=1
    )
    own.fit(module, batches(0, 5))
    directories = sorted(path for path in kept.iterdir() if not path.is_symlink())
    assert len(directories) == 2 == len(tags(module))
    assert sum(file.stat().st_size for path in directories for file in path.iterdir()) < 100 * 1024
    stems = {path.stem for path in directories}
    assert {tag.rpartition("-")[0] for tag in tags(module)} == stems
    own.save_checkpoint(tmp_path / "mine.ckpt")
    own.save_checkpoint(tmp_path / "mine.ckpt")
    assert len(tags(module)) == 3 and len(list((tmp_path / "mine.ckpt").iterdir())) == 2
    best = weights(module)
    own.fit_loop.max_epochs = 2
    own.fit(module, batches(0, 5))
    own.test(module, batches(90, 91), ckpt_path=tmp_path / "mine.ckpt", verbose=False)
    tiny_models.assert_same_weights(weights(module), best)
    own.strategy.remove_checkpoint(kept / "last.ckpt")  # the link alone
    assert len(tags(module)) == 3


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_in_memory_over_a_frozen_model(store: Path, tmp_path: Path, closing: Callable[[Any], Any]) -> None:
    peft = requirements.package("peft")

    def adapted(model: nn.Module) -> Module:
        torch.manual_seed(5)
        return Module(peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])))

    expected = adapted(tiny_models.build("qwen2"))
    trainer(tmp_path).fit(expected, batches(0, 3))
    base = memascend.offload(tiny_models.build("qwen2").requires_grad_(False), store=store, **WHERE)
    ours = closing(adapted(base))
    own = trainer(tmp_path, "memascend", max_epochs=1)
    own.fit(ours, batches(0, 3))
    own.save_checkpoint(tmp_path / "one.ckpt")
    assert tags(ours) == []
    own = trainer(tmp_path, "memascend", max_epochs=2)
    own.fit(ours, batches(0, 3), ckpt_path=tmp_path / "one.ckpt")
    assert_same(ours, expected)


def test_what_is_no_checkpoint_of_an_offloaded_model_is_refused(
    store: Path, tmp_path: Path, closing: Callable[[Any], Any]
) -> None:
    own = trainer(tmp_path, max_epochs=1)
    own.fit(Module(tiny_models.build("qwen2")), batches(0, 1))
    own.save_checkpoint(tmp_path / "memory.ckpt")
    module = closing(Module(tiny_models.build("qwen2")))
    own = trainer(tmp_path, MemascendStrategy(store=store, **WHERE))
    with pytest.raises(memascend.CheckpointError, match=r"memory\.ckpt is no checkpoint of an offloaded model"):
        own.fit(module, batches(0, 1), ckpt_path=tmp_path / "memory.ckpt")


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["16-true", "64-true"])
def test_precisions_that_are_refused(tmp_path: Path, precision: str) -> None:
    with pytest.raises(memascend.MemascendError, match=f"precision='{precision}'.*use '32-true'"):
        trainer(tmp_path, "memascend", precision=precision)


def test_what_set_up_refuses(store: Path, tmp_path: Path, closing: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match="both store= and host_memory="):
        MemascendStrategy(store=store)
    with pytest.raises(ValueError, match="both store= and host_memory="):
        MemascendStrategy(recompute=False)
    with pytest.raises(memascend.MemascendError, match="devices=2"):
        trainer(tmp_path, "memascend", devices=2)
    with pytest.raises(memascend.MemascendError, match="num_nodes=2"):
        trainer(tmp_path, "memascend", num_nodes=2)
    with pytest.raises(memascend.MemascendError, match="Module is not offloaded: give MemascendStrategy"):
        trainer(tmp_path, "memascend").fit(Module(tiny_models.build("qwen2")), batches(0, 1))

    class Foreign(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = closing(Foreign(tiny_models.build("qwen2")))
    with pytest.raises(memascend.MemascendError, match=r"use memascend\.SGD"):
        trainer(tmp_path, MemascendStrategy(store=store, **WHERE)).fit(module, batches(0, 1))


def test_pytorch_lightning_alone(store: Path, tmp_path: Path) -> None:
    """With the older of the two packages, in a process that cannot import the other."""
    requirements.package("lightning", "pytorch_lightning")
    done = forked.run(["-c", _ALONE, store, tmp_path], env=forked.variables())
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("trained\n")


_ALONE = """
import sys, warnings
sys.modules["lightning"] = None
warnings.simplefilter("ignore")
import torch, pytorch_lightning as pl, memascend, memascend.integrations.lightning

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(300, 300)
    def training_step(self, batch, _):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return memascend.SGD(self.parameters(), lr=0.1)

module = Module()
before = module.layer.weight.detach().clone()
memascend.offload(module, store=sys.argv[1], host_memory="64MiB", allocator="pageable")
quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
trainer = pl.Trainer(strategy="memascend", accelerator="cpu", max_steps=2, default_root_dir=sys.argv[2], **quiet)
trainer.fit(module, torch.utils.data.DataLoader(torch.ones(2, 300)))
assert not torch.equal(module.layer.weight.detach().clone(), before)
memascend.close(module)
print("trained")
"""


class Unfreezing(lightning.callbacks.BaseFinetuning):
    """Lightning's gradual unfreezing: the layers before the last are trained from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.model, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.model.layers[-1], optimizer, lr=1e-3)


@pytest.mark.filterwarnings("ignore:The provided params to be frozen:UserWarning")
def test_layers_that_are_unfrozen_later(tmp_path: Path, closing: Callable[[Any], Any]) -> None:
    def run(module: Any, strategy: Any = "auto") -> Any:
        module.configure_optimizers = lambda: memascend.AdamW(
            [parameter for parameter in module.parameters() if parameter.requires_grad], lr=1e-2
        )
        trainer(tmp_path, strategy, callbacks=[Unfreezing()]).fit(module, batches(0, 2))
        return module

    ours = closing(Module(tiny_models.build("qwen2")))
    run(ours, MemascendStrategy(store=tmp_path / "store", keep_store=False, **WHERE))
    expected = run(InMemory(tiny_models.build("qwen2")))
    assert len(expected.losses) == 4
    assert all(torch.equal(one, other) for one, other in zip(ours.losses, expected.losses, strict=True))
    tiny_models.assert_same_weights(weights(ours), weights(expected))
    assert not torch.equal(weights(ours)["model.model.layers.2.mlp.up_proj.weight"], initial("layers.2.mlp.up_proj"))


def initial(name: str) -> torch.Tensor:
    return dict(tiny_models.build("qwen2").named_parameters())[f"model.{name}.weight"]
