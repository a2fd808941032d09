"""The settings of one fine-tuning run, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from memascend.cli.metrics import METRICS_NAME
from memascend.options import Activations, Experts, Gradients, OffloadOptions, SpareFor, Update


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One fine-tuning run. The defaults are the command line's."""

    model_dir: Path
    data: Sequence[Path]
    out: Path
    store: Sequence[Path] = ()
    host_memory: int | str | None = None  # bytes, or "auto"
    device: str | None = None  # a device of CUDA to compute on; None is the CPU
    device_memory: int | None = None  # bytes
    in_memory: bool = False
    steps: int | None = None  # optimizer steps; without it, `epochs` passes over the data
    epochs: int = 1
    batch_size: int = 1
    micro_batch_size: int | None = None  # sequences of a batch that a layer computes at once; None is all
    tile_tokens: int | str | None = None  # tokens that an MLP or a norm computes at once, or "auto"; None is all
    seq_len: int = 512
    grad_accum: int = 1
    lr: float = 2e-5
    warmup_steps: int = 0
    schedule: str = "cosine"
    max_grad_norm: float = 1.0  # 0 turns clipping off
    weight_decay: float = 0.01
    seed: int = 0
    dtype: str = "auto"  # of the training
    save_dtype: str | None = None  # of the weights written; None is the training's. "auto" sets it
    optimizer: str = "adamw"
    states: str = "float32"
    master: bool = True
    gradients: Gradients = OffloadOptions.gradients  # the dtype that they are put aside in
    update: Update = OffloadOptions.update  # in the next forward pass, or in the backward pass
    spare_memory: SpareFor = OffloadOptions.spare_memory  # the use of memory beyond the least
    on_nan: str = "stop"
    durability: str = OffloadOptions.durability
    resume: bool = False
    change: bool = False  # a resumed run may have other options than before
    keep_store: bool = False
    replace_store: bool = False  # of an earlier run
    save_every: int | None = None  # steps between checkpoints in the store
    keep_last: int | None = None  # of these checkpoints; None is all
    recompute: bool = OffloadOptions.recompute
    activations: Activations | None = None
    metrics: Path | None = None
    weights: Sequence[float] = ()  # how often documents of each of `data` are taken, beside the others'
    text_field: str = "text"
    tokenizer: Path | None = None  # the directory of the tokenizer; None is the model's
    bytes: bool = False  # train on the bytes of the text, without a tokenizer
    as_text: bool = False  # every file of data is trained on as the text that it is
    show_data: int | None = None  # sequences that are printed before the training
    loss_on: str = "completion"  # of prompts with completions and of conversations; "all" is every token
    packing: bool = True  # documents end to end; else one in each sequence
    boundaries: str = "auto"  # on: packed documents do not see each other; off: each sees those before it
    evaluation: float | Sequence[Path] = ()  # data to evaluate on, or the fraction of documents held out for it
    eval_steps: int | None = None  # between evaluations; None is a tenth of the run
    dequantize: bool = False  # read quantised weights into the store in `dtype`
    lora_rank: int | None = None  # train adapters of this rank instead of the model
    lora_alpha: int | None = None  # their scale times the rank; None is twice the rank
    lora_dropout: float = 0.0
    lora_targets: Sequence[str] = ()  # the modules that get them; none is every linear layer but the head
    dora: bool = False
    rslora: bool = False
    modules_to_save: Sequence[str] = ()  # trained whole, as copies
    adapter: Path | None = None  # the directory of adapters that are trained further; has their options
    base_bits: int | None = None  # quantise the linear weights that adapters are trained over
    experts: Experts = OffloadOptions.experts  # of a mixture under adapters: with their layer, or one by one
    report_to: Sequence[str] = ()  # reporters of transformers, such as tensorboard
    temporary: Path | None = None  # the caller removes this directory with its contents
    tbw: float | None = None  # terabytes that each drive is rated to be written in its life
    tbw_share: float = 10.0  # percent of that, above which a run begins with a warning
    processes: int = 1  # over which the model is divided; each takes its own batches of every step
    force: bool = False  # begin although the machine has less memory than the run takes

    @property
    def offload_options(self) -> OffloadOptions:
        """The options that the model is opened with. Raises ValueError where they do not go together."""
        return OffloadOptions(
            store=list(self.store),
            host_memory=self.host_memory,
            gradients=self.gradients,
            durability=self.durability,
            **self.computing,
        )

    @property
    def computing(self) -> dict[str, Any]:
        """Where and how the model computes, as `memascend.offload` takes it."""
        names = ("device", "device_memory", "recompute", "activations", "update", "experts", "spare_memory")
        return {name: getattr(self, name) for name in names} | {
            "batch_tokens": (self.batch_size, self.seq_len),
            "micro_batch_size": self.micro_batch_size,
            "tile_tokens": self.tile_tokens,
        }

    @property
    def tokenizer_dir(self) -> Path:
        """Where the tokenizer is."""
        return self.tokenizer or self.model_dir

    @property
    def has_boundaries(self) -> bool:
        """Whether packed documents are apart in attention; `memascend.cli.boundaries` settles "auto" before."""
        return self.packing and self.boundaries == "on"

    @property
    def sequences_per_step(self) -> int:
        """The sequences that a step takes, over all processes."""
        return self.batch_size * self.grad_accum * self.processes

    @property
    def keeps_store(self) -> bool:
        """Whether the store of an unfinished run outlives the command."""
        return self.temporary is None or not any(path.is_relative_to(self.temporary) for path in self.store)

    @property
    def leaves_store(self) -> bool:
        """Whether the store of a run that has finished stays, with its steps. Adapters leave nothing there."""
        return (self.keep_store or self.save_every is not None) and not self.lora_rank

    @property
    def keeps_out(self) -> bool:
        """Whether the model that is written outlives the command."""
        return self.temporary is None or not self.out.is_relative_to(self.temporary)

    @property
    def metrics_file(self) -> Path:
        """Where the metrics are when the run has ended."""
        return self.metrics or self.out / METRICS_NAME

    @property
    def decisive(self) -> dict[str, Any]:
        """The settings that a resumed run must share with the run in the store, so that the result is the same."""
        names = (
            *(
                "batch_size",
                "micro_batch_size",
                "tile_tokens",
                "seq_len",
                "grad_accum",
                "lr",
                "warmup_steps",
                "schedule",
                "max_grad_norm",
                "weight_decay",
            ),
            *("seed", "dtype", "optimizer", "states", "master", "gradients", "text_field", "as_text"),
            *("loss_on", "packing", "boundaries", "steps", "epochs", "lora_rank", "base_bits", "processes"),
            *("lora_alpha", "lora_dropout", "dora", "rslora", "experts"),
        )
        return {name: getattr(self, name) for name in names} | {
            "eval": self.held_out,
            "weights": list(self.weights),
            "lora_targets": list(self.lora_targets),
            "modules_to_save": list(self.modules_to_save),
            "adapter": None if self.adapter is None else str(self.adapter.resolve()),
        }

    @property
    def held_out(self) -> float | None:
        """The fraction of the documents that is not trained on."""
        return self.evaluation if isinstance(self.evaluation, float) else None

    def as_record(self) -> dict[str, Any]:
        """Return the settings as JSON can hold them."""
        record = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        record["data"] = [str(path) for path in self.data[:16]]
        record["data_paths"] = len(self.data)
        if self.held_out is None:
            record["evaluation"] = [str(path) for path in self.evaluation[:16]]  # type: ignore[index]
        record["report_to"] = list(self.report_to)
        for name in ("weights", "lora_targets", "modules_to_save"):
            record[name] = list(getattr(self, name))
        record["store"] = [str(path) for path in self.store]
        return record


@dataclass
class Result:
    """The result of a run: steps, losses, time, memory and SSD traffic."""

    steps: int = 0
    steps_planned: int = 0
    steps_skipped: int = 0
    steps_before: int = 0  # of the run that was resumed
    losses: list[float] = field(default_factory=list)  # the first and the latest
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # the first and the best: step, loss
    seconds: float = 0.0
    signal_number: int | None = None  # set when the user ended the run early
    baseline_rss_bytes: int = 0
    peak_rss_bytes: int = 0
    ssd_bytes_read: int = 0
    ssd_bytes_written: int = 0
    parameters: int = 0

    @property
    def peak_above_baseline_bytes(self) -> int:
        """Peak memory of the run itself, without the memory of importing torch and transformers."""
        return max(0, self.peak_rss_bytes - self.baseline_rss_bytes)
