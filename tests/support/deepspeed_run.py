"""Trains small Llamas with DeepSpeed ZeRO-3, each in a process of its own, and records the results.

`python deepspeed_run.py FILE` does the runs of a JSON file, a list of the options of `Run`, and writes a list of the
results of each rank of each run. Slow imports happen once, in the process that the others are forked from.

`python deepspeed_run.py --scripts FILE` runs scripts in the same way: a JSON list of their `words`, the number of
`ranks`, the `folder` for their output, and whether `python -m memascend.deepspeed` has `launched` them.

`python deepspeed_run.py --alone FILE` does one run in this process, as a training script of a user's would: it imports
memascend first of all, and ends as its errors have it end.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import socket
import sys
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import faults

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import LlamaConfig

#: Runs at the same time.
AT_ONCE = 2


@dataclass
class Run:
    """The model, options and data of a run."""

    #: For swap files and checkpoints.
    folder: str
    #: Parts as in MEMASCEND_DEEPSPEED_TIERS; without any, DeepSpeed runs without memascend.
    tiers: str = "ABC"
    #: Where parameters and optimizer states are: on "nvme", "cpu", or "none" for ZeRO-3 without offload and PyTorch's
    #: AdamW.
    device: str = "nvme"
    #: Whether DeepSpeed's own Adam, which it compiles, updates.
    compiled_adam: bool = False
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
    #: After so many batches the same come again; 0: all are new.
    batches: int = 0
    ranks: int = 1
    save: str = ""
    #: Checkpoints to begin with.
    load: str = ""
    #: The number of steps after which the swap files of this kind are cut to half their length.
    cut_after: int = 0
    cut: str = ""
    #: After that many steps, the file behind the drive that shrinks, and the bytes that are left of it.
    backing: str = ""
    left: int = 0
    #: Leave this many bytes of the drive free before the first step.
    leave_free: int = -1
    #: For swap files, if not in `folder`.
    swap: str = ""
    #: "host_memory" and "keep_blocks" of the section "memascend".
    host_memory: str = ""
    keep_blocks: bool = True
    #: Chunks that are under way in the streaming step, if not as many as suit the model.
    slots: int = 0

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
            device: dict[str, Any] = {"device": self.device, "pin_memory": True}
            zero["offload_param"] = dict(device)
            if self.device == "nvme":
                device["nvme_path"] = self.swap or f"{self.folder}/swap"
                zero["offload_param"] |= device | {"max_in_cpu": self.in_memory}
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
        section = {"host_memory": self.host_memory} if self.host_memory else {}
        section |= {} if self.keep_blocks else {"keep_blocks": False}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.accumulated,
            "gradient_clipping": self.clip,
            "optimizer": {"type": "AdamW", "params": adam},
            "zero_optimization": zero,
            "aio": {"block_size": 1 << 17, "queue_depth": 64},
            **modes[self.dtype],
            **({"memascend": section} if section else {}),
        }


@dataclass
class Found:
    """The results of a rank."""

    losses: list[float]
    norms: list[float]
    #: Steps that were left out because of an overflow.
    skipped: int = 0
    #: Parts of memascend that are in force.
    parts: list[str] = field(default_factory=list)
    #: Sub-groups, and the ones that memascend updates in a stream.
    sub_groups: int = 0
    streams: int = 0
    #: Chunks that were under way.
    slots: int = 0
    #: The output of deepspeed.initialize on stderr.
    told: str = ""
    #: Bytes of masters and moments that stay in memory.
    kept_bytes: int = 0
    #: Bytes of a tensor of 8 MiB that malloc still had once it was freed.
    block_bytes: int = 0
    #: A digest of each parameter after the last step.
    weights: dict[str, str] | None = None
    #: Peak of resident memory during the run above its start.
    peak_bytes: int = 0
    #: The traceback if the run has failed.
    error: str = ""


def model_config(run: Run) -> LlamaConfig:
    """Return the configuration of the model."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=run.hidden,
        intermediate_size=2 * run.hidden,
        num_hidden_layers=run.layers,
        num_attention_heads=run.hidden // 64,
        num_key_value_heads=run.hidden // 64,
        vocab_size=512,
        tie_word_embeddings=False,
        max_position_embeddings=64,
    )


def build(run: Run) -> nn.Module:
    """Return the model; its weights do not depend on how it is offloaded."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(model_config(run))


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
    if run.compiled_adam and run.tiers:
        use_compiled_adam()
    if run.slots:
        from memascend.integrations.deepspeed import streaming_step

        streaming_step.slots = lambda sub_groups: run.slots
    before = memory("VmRSS")
    found = Found([], [])
    torch.manual_seed(0)
    configuration = run.configuration()
    # Not with `dtype=`: on processors that do not compute in float16 DeepSpeed takes it for bfloat16, whatever it is.
    with deepspeed.zero.Init(config_dict_or_path=configuration):
        model = build(run)
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=configuration)
    found.told = told.getvalue()
    if run.load:
        engine.load_checkpoint(run.load, tag="checkpoint")
    if run.leave_free >= 0:
        faults.Mounted(Path(run.swap)).fill(run.leave_free)
    generator = torch.Generator().manual_seed(run.seed * 1000 + rank)
    for step in range(run.steps):
        for micro_step in range(run.accumulated):
            if run.batches and (step * run.accumulated + micro_step) % run.batches == 0:
                generator.manual_seed(run.seed * 1000 + rank)
            tokens = torch.randint(0, 512, (1, 32), generator=generator)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
        found.losses.append(loss.item())
        found.norms.append(float(engine.get_global_grad_norm() or 0))
        if run.cut_after == step + 1:
            damage(run)
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
        if found.streams:
            found.kept_bytes = optimizer.optimizer_swapper.kept.nbytes
            found.slots = len(optimizer.optimizer_swapper.slots)
    found.peak_bytes = memory("VmHWM") - before
    block = torch.ones(2 << 20)
    resident = memory("VmRSS")
    del block
    found.block_bytes = (8 << 20) - (resident - memory("VmRSS"))
    found.weights = {name: digest(parameter) for name, parameter in model.named_parameters()}
    return found


def use_compiled_adam() -> None:
    """Have DeepSpeed's own Adam update in place of memascend's, also within the streaming step."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    import memascend.integrations.deepspeed.adam as ours

    CPUAdamBuilder._loaded_ops.pop("cpu_adam", None)
    operator = CPUAdamBuilder().load()

    def scalars(decoupled: bool, step: int, options: Any, bias_correction: bool, grad_scale: float = 1.0) -> Any:
        return (step, *options, bias_correction), grad_scale

    def step_masters(with_scalars: Any, tensors: Any) -> None:
        options, grad_scale = with_scalars
        p, g, m, v = tensors
        # The first optimizer of a process has the number 0.
        operator.adam_update(0, *options, p, g.mul_(grad_scale), m, v)

    vars(ours).update(scalars=scalars, step_masters=step_masters)


def damage(run: Run) -> None:
    """Have swap files lose their second half, or the drive everything beyond a place."""
    for file in Path(run.swap or run.folder).rglob(run.cut) if run.cut else ():
        os.truncate(file, file.stat().st_size // 2)
    if run.backing:
        backing = os.open(run.backing, os.O_RDWR)
        faults.LoopDevice(Path(), backing, 0, -1).shrink(run.left)
        os.close(backing)


def installed() -> list[str]:
    """Return the parts of memascend that are in force."""
    import memascend.deepspeed

    return memascend.deepspeed.installed()


def digest(parameter: torch.Tensor) -> str:
    """Return a digest of the bits of a parameter."""
    import hashlib

    import deepspeed
    import torch

    with deepspeed.zero.GatheredParameters([parameter]):
        bits = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(bits).hexdigest()[:16]


def environment(**variables: str) -> dict[str, str]:
    """Return the variables of a process that finds the same modules and has this machine's processor alone."""
    ours = {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join(filter(None, sys.path))
    kept = {name: value for name, value in os.environ.items() if name != "MEMASCEND_DEEPSPEED_TIERS"}
    return kept | ours | {"PYTHONPATH": path} | variables


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
    """Do all runs, some at a time; return the results of each rank of each."""
    waiting = [(run, index) for index, run in enumerate(runs)]
    found: list[list[Path]] = []
    running: dict[int, int] = {}
    for run, index in waiting:
        Path(run.folder).mkdir(parents=True, exist_ok=True)
        found.append([Path(run.folder) / f"found-{index}-{rank}" for rank in range(run.ranks)])
        # Checkpoints come from earlier runs.
        while running and (run.load or len(running) + run.ranks > AT_ONCE):
            ended(running)
        for rank, to in enumerate(found[-1]):
            running[forked(run, rank, to)] = index
    while running:
        ended(running)
    return [[json.loads(file.read_text()) for file in files] for files in found]


def run_scripts(scripts: list[dict[str, Any]]) -> None:
    """Run scripts one after another, each on all of its ranks; the first that fails ends it."""
    import accelerate  # noqa: F401
    import transformers.integrations.deepspeed
    import transformers.trainer  # noqa: F401

    for number, script in enumerate(scripts):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            script["port"] = free.getsockname()[1]
        running = {script_rank(script, rank): number for rank in range(script["ranks"])}
        while running:
            ended(running)


def script_rank(script: dict[str, Any], rank: int) -> int:
    """Start one rank of a script; the process."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        for stream, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"{script['folder']}/{name}-{rank}", os.O_WRONLY | os.O_CREAT, 0o600), stream)
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(script["port"])}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(script["ranks"])} | address
        if script["launched"]:
            from memascend.integrations.deepspeed.launch import main as launch

            launch(script["words"])
        else:
            sys.argv = script["words"]
            runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def ended(running: dict[int, int]) -> None:
    """Wait for one process to end."""
    process, status = os.wait()
    index = running.pop(process)
    if status:
        raise RuntimeError(f"run {index} has ended with status {os.waitstatus_to_exitcode(status)}")


def preload() -> None:
    """Import and prepare the needs of every run."""
    import cpuinfo
    import deepspeed
    import float32_products
    import transformers.models.llama.modeling_llama  # noqa: F401

    with contextlib.suppress(ImportError):
        # Has functions compiled, for which most of PyTorch's compiler is imported.
        import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
    about = cpuinfo.get_cpu_info()
    cpuinfo.get_cpu_info = lambda: about
    # Imports of memascend's parts; each run installs the parts itself.
    for name in ("deepspeed.module_inject", "deepspeed.runtime.zero.stage3", "memascend"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # With and without memascend alike.
    float32_products.install()
    # No collection of a run looks at, and so copies, present objects.
    gc.collect()
    gc.freeze()


def gloo_alone() -> None:
    """Have DeepSpeed compile no collectives.

    All runs of a user on a machine share the memory of these, by the name of their master's address and port: two runs
    without such variables, or the leftovers of one, stop each other.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    type(builder).is_compatible = lambda self, verbose=False: False
    # Before 0.19.8 DeepSpeed asked when it was imported.
    deepspeed.ops.__compatible_ops__[builder.NAME] = False


def main() -> None:
    """Run as the arguments say."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1"}
    if sys.argv[1] == "--alone":
        import memascend.deepspeed  # noqa: F401

        # Not within zero.Init, which changes the same functions.
        preload()
        (run,) = (Run(**options) for options in json.loads(Path(sys.argv[2]).read_text()))
        print(json.dumps(asdict(train(run))))
        return
    preload()
    gloo_alone()
    if sys.argv[1] == "--scripts":
        run_scripts(json.loads(Path(sys.argv[2]).read_text()))
        return
    runs = [Run(**options) for options in json.loads(Path(sys.argv[1]).read_text())]
    Path(sys.argv[1]).with_suffix(".found").write_text(json.dumps(results(runs)))


if __name__ == "__main__":
    main()
