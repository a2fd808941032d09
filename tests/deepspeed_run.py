"""Trains small Llamas with DeepSpeed ZeRO-3, each in a process of its own, and notes what came of them.

`python deepspeed_run.py FILE` does the runs of a JSON file, a list of the options of `Run`, and writes a list of what
each rank of each run has found. What takes seconds is imported once, in the process that the others are forked from.

`python deepspeed_run.py --alone FILE` does one run in this process, as a training script of a user's would: it imports
memascend first of all, and ends as its errors have it end.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lab

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Runs at the same time.
AT_ONCE = 2


@dataclass
class Run:
    """What is trained, how, and on what."""

    #: For swap files and checkpoints.
    folder: str
    #: Those of MEMASCEND_DEEPSPEED_TIERS; without any, DeepSpeed runs without memascend.
    tiers: str = "ABC"
    #: Where parameters and optimizer states are: on "nvme", or "none" for ZeRO-3 without offload and PyTorch's AdamW.
    device: str = "nvme"
    #: "cpu" keeps optimizer states in memory: before 0.19.4 DeepSpeed swaps them only from memory that CUDA has pinned.
    optimizer: str = "nvme"
    dtype: str = "bfloat16"
    hidden: int = 576
    layers: int = 1
    steps: int = 4
    accumulated: int = 1
    clip: float = 0.9
    sub_group: int = 1_000_000_000
    persistent: int = 0
    initial_scale_power: int = 8
    weight_decay: float = 0.01
    pipelined: bool = False
    #: Elements of parameters that are not on the drive.
    in_memory: int = 0
    #: Elements of each buffer of parameters, if not DeepSpeed's 100 millions.
    buffer_size: int = 700_000
    seed: int = 1
    ranks: int = 1
    save: str = ""
    #: Checkpoints to begin with.
    load: str = ""
    #: The number of steps after which the swap files of this kind are cut to half their length.
    cut_after: int = 0
    cut: str = ""
    #: Leave this many bytes of the drive free before the first step.
    leave_free: int = -1
    #: For swap files, if not in `folder`.
    swap: str = ""

    def configuration(self) -> dict[str, Any]:
        """Return the contents of DeepSpeed's JSON file."""
        zero: dict[str, Any] = {
            "stage": 3,
            "sub_group_size": self.sub_group,
            "stage3_param_persistence_threshold": self.persistent,
        }
        adam: dict[str, Any] = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": self.weight_decay}
        if self.device == "none":
            # The fused one: memascend gives its bits, square roots included.
            adam |= {"torch_adam": True, "fused": True}
        else:
            device = {"device": self.device, "nvme_path": self.swap or f"{self.folder}/swap", "pin_memory": True}
            zero["offload_param"] = device | {"max_in_cpu": self.in_memory}
            if self.buffer_size:
                zero["offload_param"]["buffer_size"] = self.buffer_size
            if "B" not in self.tiers:
                # DeepSpeed's own swapper needs a buffer for each parameter, and fails if one is read ahead twice.
                zero["offload_param"]["buffer_count"] = 32 if self.buffer_size else 5
                zero["stage3_prefetch_bucket_size"] = 0
            zero["offload_optimizer"] = (device | {"device": self.optimizer}) | (
                {"pipeline_read": True, "pipeline_write": True, "buffer_count": 12} if self.pipelined else {}
            )
        modes = {
            "bfloat16": {"bf16": {"enabled": True}},
            "float16": {"fp16": {"enabled": True, "initial_scale_power": self.initial_scale_power, "hysteresis": 1}},
            "float32": {},
        }
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accumulated,
            "gradient_clipping": self.clip,
            "optimizer": {"type": "AdamW", "params": adam},
            "zero_optimization": zero,
            "aio": {"block_size": 1 << 17, "queue_depth": 64},
            **modes[self.dtype],
        }


@dataclass
class Found:
    """What a rank has found."""

    losses: list[float]
    norms: list[float]
    #: Steps that were left out because of an overflow.
    skipped: int = 0
    #: Those of memascend that are in force.
    parts: list[str] = field(default_factory=list)
    #: Sub-groups, and those of them that memascend updates in a stream.
    sub_groups: int = 0
    streams: int = 0
    #: A digest of each parameter after the last step.
    weights: dict[str, str] | None = None
    #: The most memory that was resident while the run went on beyond what was there at its start.
    peak_bytes: int = 0
    #: The traceback if the run has failed.
    error: str = ""


def build(run: Run) -> nn.Module:
    """Return the model; its weights do not depend on how it is offloaded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=run.hidden,
            intermediate_size=2 * run.hidden,
            num_hidden_layers=run.layers,
            num_attention_heads=run.hidden // 64,
            num_key_value_heads=run.hidden // 64,
            vocab_size=512,
            tie_word_embeddings=False,
            max_position_embeddings=64,
        )
    )


def train(run: Run, rank: int = 0) -> Found:
    """Train in this process."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    torch.set_num_threads(1)
    # DeepSpeed refuses float16 where the processor has no instructions for it; PyTorch computes it everywhere.
    get_accelerator().is_fp16_supported = lambda: True
    meeting = f"file://{run.folder}/meeting"
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(run.ranks)}
    deepspeed.init_distributed(init_method=meeting, rank=rank, world_size=run.ranks, auto_mpi_discovery=False)
    before = memory("VmRSS")
    found = Found([], [])
    torch.manual_seed(0)
    configuration = run.configuration()
    # Not with `dtype=`: on processors that do not compute in float16 DeepSpeed takes it for bfloat16, whatever it is.
    with deepspeed.zero.Init(config_dict_or_path=configuration):
        model = build(run)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=configuration)
    if run.load:
        engine.load_checkpoint(run.load, tag="checkpoint")
    if run.leave_free >= 0:
        lab.Mounted(Path(run.swap)).fill(run.leave_free)
    generator = torch.Generator().manual_seed(run.seed * 1000 + rank)
    for step in range(run.steps):
        for _ in range(run.accumulated):
            tokens = torch.randint(0, 512, (1, 32), generator=generator)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
        found.losses.append(loss.item())
        found.norms.append(float(engine.get_global_grad_norm() or 0))
        if run.cut_after == step + 1:
            for file in Path(run.swap or run.folder).rglob(run.cut):
                os.truncate(file, file.stat().st_size // 2)
    if run.save:
        engine.save_checkpoint(run.save, tag="checkpoint")
    optimizer = engine.optimizer
    found.skipped = engine.skipped_steps
    found.sub_groups = len(optimizer.fp16_groups)
    if run.tiers:
        found.parts = installed()
    if "streaming step" in found.parts:
        from memascend.integrations.deepspeed import streaming

        found.streams = sum(streaming.streams(optimizer, group) for group in range(found.sub_groups))
    found.peak_bytes = memory("VmHWM") - before
    found.weights = {name: digest(parameter) for name, parameter in model.named_parameters()}
    return found


def installed() -> list[str]:
    """Return the parts of memascend that are in force."""
    import memascend.deepspeed

    return memascend.deepspeed.installed()


def digest(parameter: torch.Tensor) -> str:
    """Return what stands for the bits of a parameter."""
    import hashlib

    import deepspeed
    import torch

    with deepspeed.zero.GatheredParameters([parameter]):
        bits = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(bits).hexdigest()[:16]


def memory(name: str) -> int:
    """Return a line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) << 10


def forked(run: Run, rank: int, to: Path) -> int:
    """Start one rank of a run; the process."""
    process = os.fork()
    if process:
        return process
    try:
        if run.tiers:
            os.environ["MEMASCEND_DEEPSPEED_TIERS"] = run.tiers
            import memascend.deepspeed  # noqa: F401
        found = train(run, rank)
    except BaseException:
        found = Found([], [], error=traceback.format_exc())
    to.write_text(json.dumps(asdict(found)))
    # Nothing of the process that this one was forked from is ended here.
    os._exit(0)


def results(runs: list[Run]) -> list[list[dict[str, Any]]]:
    """Do all runs, some at a time; what each rank of each has found."""
    waiting = [(run, index) for index, run in enumerate(runs)]
    found: list[list[Path]] = []
    running: dict[int, int] = {}
    for run, index in waiting:
        Path(run.folder).mkdir(parents=True, exist_ok=True)
        found.append([Path(run.folder) / f"found-{index}-{rank}" for rank in range(run.ranks)])
        # Checkpoints are those of earlier runs.
        while running and (run.load or len(running) + run.ranks > AT_ONCE):
            ended(running)
        for rank, to in enumerate(found[-1]):
            running[forked(run, rank, to)] = index
    while running:
        ended(running)
    return [[json.loads(file.read_text()) for file in files] for files in found]


def ended(running: dict[int, int]) -> None:
    """Wait for one process to end."""
    process, status = os.wait()
    index = running.pop(process)
    if status:
        raise RuntimeError(f"run {index} has ended with status {os.waitstatus_to_exitcode(status)}")


def preload() -> None:
    """Import, and find out, what every run needs."""
    import cpuinfo
    import deepspeed
    import transformers.models.llama.modeling_llama  # noqa: F401

    with contextlib.suppress(ImportError):
        # Has functions compiled, for which most of PyTorch's compiler is imported.
        import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
    about = cpuinfo.get_cpu_info()
    cpuinfo.get_cpu_info = lambda: about


def gloo_alone() -> None:
    """Have DeepSpeed compile no collectives.

    All runs of a user on a machine share the memory of these, by the name of their master's address and port: two runs
    without such variables, or what one has left behind, stop each other.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    type(builder).is_compatible = lambda self, verbose=False: False
    # Before 0.19.8 DeepSpeed asked when it was imported.
    deepspeed.ops.__compatible_ops__[builder.NAME] = False


def main() -> None:
    """Do what the arguments say."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1"}
    if sys.argv[1] == "--alone":
        import memascend.deepspeed  # noqa: F401

        # Not within zero.Init, which changes what these change.
        preload()
        (run,) = (Run(**options) for options in json.loads(Path(sys.argv[2]).read_text()))
        print(json.dumps(asdict(train(run))))
        return
    preload()
    gloo_alone()
    runs = [Run(**options) for options in json.loads(Path(sys.argv[1]).read_text())]
    Path(sys.argv[1]).with_suffix(".found").write_text(json.dumps(results(runs)))


if __name__ == "__main__":
    main()
