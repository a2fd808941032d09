"""DeepSpeed ZeRO-Infinity with and without `import memascend.deepspeed`: host memory, tokens per second, SSD bytes.

The same program in separate processes, on the terms of MemAscend's public code (arXiv 2505.23254): random tokens, the
first iteration dropped, tokens/s = batch x sequence / mean latency, peak = most of (MemTotal - MemAvailable) less its
value at the start. That peak counts other programs too: VmHWM above imports, the process's own, stands beside it.

    python benches/zero_infinity.py --model 0.5b --tokens 128 --json benches/results/zero_infinity.json

needs an interpreter with deepspeed (0.19.8), transformers and memascend; ninja, a compiler and libaio for stock. The
first run compiles DeepSpeed's operators; a warm-up of a tiny model does that before anything is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import socket
import statistics
import sys
import threading
import time
from pathlib import Path

from _common import (
    GB,
    ChildFailed,
    block_io,
    finish,
    fio,
    in_workdir,
    instruction_sets,
    machine,
    markdown,
    mem_available,
    rss,
    run,
    start,
)
from _llama import SEED, llama_config, parameter_count

#: (hidden, intermediate, layers, heads, key/value heads), vocabulary. 0.5b, 1b and 1.6b are near Qwen2.5-0.5B,
#: Llama 3.2 1B and Qwen2.5-1.5B in parameters, with dimensions for which stock's NVMe path is right.
SHAPES = {
    "tiny": ((512, 1408, 4, 8, 4), 8192),
    "0.5b": ((1024, 2816, 24, 16, 8), 65_536),
    "1b": ((2048, 5632, 16, 32, 8), 32_768),
    "1.6b": ((2560, 6784, 20, 40, 20), 32_768),
    "3b": ((3072, 8192, 28, 24, 8), 32_768),
}
#: DeepSpeed alone, and memascend's operators (A), pools and gradients (B) and streaming step (C) behind it: where
#: malloc keeps no blocks ("least"), with moments in bfloat16, and with `--share` of the memory that DeepSpeed takes in
#: the same case.
VARIANTS = ("stock", "A", "AB", "ABC-least", "ABC", "ABC-memory", "ABC-bfloat16", "ABC-bfloat16-memory")
GROUPS = Path("/sys/fs/cgroup/memory")


def configuration(name: str, folder: str, dtype: str) -> dict:
    """Return DeepSpeed's configuration: `author` as in MemAscend's public code, `defaults` DeepSpeed's own."""
    nvme = {"device": "nvme", "nvme_path": folder}
    zero: dict = {"stage": 3, "offload_param": dict(nvme), "offload_optimizer": dict(nvme)}
    if name == "author":
        zero |= {
            "sub_group_size": 0,
            "reduce_bucket_size": int(1e5),
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
        }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.01}},
        "zero_optimization": zero,
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "overlap_events": True},
        "memascend": {},
    }
    if dtype != "float32":
        config["bf16" if dtype == "bfloat16" else "fp16"] = {"enabled": True}
    return config


class SystemPeak:
    """Peak of the machine's memory in use above the start, sampled every 5 ms."""

    def __init__(self) -> None:
        self.start, self.least, self._stop = mem_available(), mem_available(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.least = min(self.least, mem_available())

    def end(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.start - min(self.least, mem_available())


def child(job: dict) -> None:
    if job["group"]:
        (Path(job["group"]) / "cgroup.procs").write_text(str(os.getpid()))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1"}
    if job["variant"] != "stock":
        os.environ["MEMASCEND_DEEPSPEED_TIERS"] = job["variant"].split("-")[0]
        import memascend.deepspeed  # noqa: F401
    import deepspeed
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from transformers import LlamaForCausalLM

    torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))  # starts the threads
    DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(8))])  # loads the operator
    gc.collect()
    baseline, peak = rss()["hwm"], SystemPeak()
    shape, vocabulary = job["shape"]
    config = configuration(job["configuration"], job["folder"], job["dtype"])
    if "bfloat16" in job["variant"]:
        config["memascend"]["states"] = "bfloat16"
    if "least" in job["variant"]:
        config["memascend"]["keep_blocks"] = False
    if job["host_memory"] is not None:
        config["memascend"]["host_memory"] = job["host_memory"]
    dtype = getattr(torch, job["dtype"])
    if dtype == torch.float16:
        # DeepSpeed refuses it where the processor has no instructions for it; PyTorch computes it everywhere.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(SEED)
    deepspeed.init_distributed(dist_backend="gloo")
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=dtype):
        model = LlamaForCausalLM(llama_config(shape, vocabulary))
    model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    after_start = {"hwm_bytes": rss()["hwm"] - baseline}
    generator = torch.Generator().manual_seed(SEED)
    losses, seconds, moved = [], [], []
    for _ in range(job["steps"]):
        row = torch.randint(0, vocabulary, (1, job["tokens"]), generator=generator)
        before, begin = block_io(), time.perf_counter()
        loss = engine(input_ids=row, labels=row).loss
        engine.backward(loss)
        engine.step()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
        moved.append([after - earlier for after, earlier in zip(block_io(), before, strict=True)])
        del loss
    mean = sum(seconds[1:]) / len(seconds[1:])
    result = {
        "losses": losses,
        "seconds": [round(value, 3) for value in seconds],
        "tokens_per_second": job["tokens"] / mean,
        "system_peak_bytes": peak.end(),
        "hwm_bytes": rss()["hwm"] - baseline,
        "after_start": after_start,
        "planned_bytes": sum(line.ours for line in engine.optimizer._memascend_plan.lines)
        if job["variant"] not in ("stock", "A")
        else None,
        "baseline_bytes": baseline,
        "ssd_bytes_read": sum(read for read, _ in moved[1:]) / len(moved[1:]),
        "ssd_bytes_written": sum(written for _, written in moved[1:]) / len(moved[1:]),
        "overflow": overflow(engine) if job["overflow"] else None,
    }
    Path(job["result"]).write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's threads and process group must not hold the exit up


def overflow(engine) -> dict[str, float]:
    """Return the seconds of the overflow check of a model's fp16 gradients, and its peak allocation."""
    import torch

    optimizer = engine.optimizer
    numel = sum(int(numel) for numel in optimizer.fp16_partitioned_groups_flat_numel)
    if optimizer.grad_partitions_flat_buffer is None and hasattr(optimizer, "_memascend_non_finite"):
        # Found as gradients appear, in the pass that takes the norm: only the result remains to be read.
        pass
    elif optimizer.grad_partitions_flat_buffer.numel() != numel:
        raise RuntimeError("the gradients are not those of the whole model")
    before = rss()["rss"]
    watched, stop = [before], threading.Event()

    def watch() -> None:
        while not stop.wait(0.0005):
            watched.append(rss()["rss"])

    thread = threading.Thread(target=watch)
    thread.start()
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        optimizer.has_overflow()
        seconds.append(time.perf_counter() - begin)
    stop.set()
    thread.join()
    gradient = torch.zeros(min(numel, 1 << 26), dtype=torch.bfloat16)
    begin = time.perf_counter()
    optimizer._constant_buffered_norm2(gradient)
    norm = (time.perf_counter() - begin) / gradient.numel()
    return {
        "seconds": sorted(seconds)[2],
        "temporary_bytes": max(watched) - before,
        "norm_seconds_per_element": norm,
        "numel": numel,
    }


def measure(
    workdir: Path,
    args: argparse.Namespace,
    case: tuple[str, int, str],
    variant: str,
    host_memory: int | None = None,
) -> dict:
    model, tokens, configuration = case
    folder = workdir / "nvme"
    folder.mkdir()
    job = {
        "variant": variant,
        "shape": SHAPES[model],
        "tokens": tokens,
        "configuration": configuration,
        "dtype": args.dtype,
        "steps": args.steps,
        "folder": str(folder),
        "overflow": args.overflow,
        "host_memory": host_memory,
        "group": None,
    }
    group = GROUPS / f"memascend-bench-{os.getpid()}"
    try:
        if args.limit_gib is not None:
            group.mkdir()
            (group / "memory.limit_in_bytes").write_text(str(int(args.limit_gib * 2**30)))
            job["group"] = str(group)
        command = [sys.executable, __file__, "--child"]
        return start(command, job, f"{model}-{tokens}-{configuration}-{variant}", workdir, args.limit_s, {})
    except ChildFailed as error:
        return {"failed": str(error)}
    finally:
        shutil.rmtree(folder)
        if group.exists():
            group.rmdir()


def whole(runs: list[dict]) -> dict:
    """Return the medians of several rounds of one variant; the first failure if there was one."""
    if failed := [run for run in runs if "failed" in run]:
        return failed[0]
    keys = ("hwm_bytes", "system_peak_bytes", "tokens_per_second", "ssd_bytes_read", "ssd_bytes_written")
    return {key: statistics.median(run[key] for run in runs) for key in keys} if runs else {}


def compare(workdir: Path, args: argparse.Namespace) -> int:
    for variant in {"stock", *args.variants}:
        warm = argparse.Namespace(**{**vars(args), "steps": 2, "overflow": False})
        measure(workdir, warm, ("tiny", 64, "defaults"), variant)  # compiles operators and bytecode
    rows, entries = [], []
    for model in args.model:
        numel = parameter_count(*SHAPES[model])
        for tokens in args.tokens:
            for configuration in args.configuration:
                stock: dict = {}
                least: dict = {}
                runs: dict[str, list[dict]] = {variant: [] for variant in args.variants}
                # By turns, because drives change their speed within minutes.
                for _ in range(args.rounds):
                    for variant in args.variants:
                        host_memory = None
                        if variant.endswith("-memory"):
                            if "hwm_bytes" not in stock or "hwm_bytes" not in least:
                                continue  # They say how much that is.
                            # Activations, logits and Python are not in the plan and come on top.
                            beside = least["hwm_bytes"] - least["planned_bytes"]
                            host_memory = int(args.share * stock["hwm_bytes"] - beside)
                        got = measure(workdir, args, (model, tokens, configuration), variant, host_memory)
                        stock = stock or (got if variant == "stock" else {})
                        least = least or (got if variant == "ABC" else {})
                        runs[variant].append({"host_memory": host_memory, **got})
                        print(variant, got.get("failed", got.get("seconds")), flush=True)
                stock = whole(runs.get("stock", []))
                for variant in args.variants:
                    if not runs[variant]:
                        continue
                    got = whole(runs[variant])
                    case = {"model": model, "numel": numel, "tokens": tokens, "configuration": configuration}
                    entries.append({**case, "variant": variant, **got, "rounds": runs[variant]})
                    name = [model, str(tokens), configuration, variant]
                    if "failed" in got:
                        rows.append([*name, got["failed"], "", "", "", "", "", ""])
                    else:
                        per = (got["ssd_bytes_read"] + got["ssd_bytes_written"]) / numel
                        figures = [
                            ("hwm_bytes", GB, ".2f"),
                            ("system_peak_bytes", GB, ".2f"),
                            ("tokens_per_second", 1, ".1f"),
                        ]
                        for key, unit, form in figures:
                            ratio = f"{got[key] / stock[key]:.2f}" if key in stock else ""
                            name += [f"{got[key] / unit:{form}}", ratio]
                        rows.append([*name, f"{per:.1f}"])
                    print(markdown(HEADER, rows[-1:]).splitlines()[-1], flush=True)
    print("\n" + markdown(HEADER, rows))
    results = {
        "machine": machine(workdir) | {"instruction_sets": instruction_sets()},
        "fio": fio(workdir),
        "dtype": args.dtype,
        "steps": args.steps,
        "rounds": args.rounds,
        "memory_cgroup_gib": args.limit_gib,
        "share": args.share,
        "runs": entries,
    }
    return finish(results, args.json, [])


HEADER = [
    "model",
    "tokens",
    "configuration",
    "variant",
    "VmHWM above imports, GB",
    "of stock's",
    "system peak, GB",
    "of stock's",
    "tokens/s",
    "times stock's",
    "SSD bytes a parameter",
]


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=["0.5b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[128])
    parser.add_argument("--configuration", nargs="+", choices=["author", "defaults"], default=["author", "defaults"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--steps", type=int, default=4, help="iterations, of which the first is dropped")
    parser.add_argument("--rounds", type=int, default=1, help="of all variants by turns; medians are shown")
    parser.add_argument("--overflow", action="store_true", help="time the overflow check too (float16)")
    parser.add_argument(
        "--share", type=float, default=0.38, help='of the peak of "stock" that "-memory" may have; after "stock", "ABC"'
    )
    parser.add_argument("--limit-gib", type=float, help="GiB of a memory cgroup for each run (root, cgroup v1)")
    parser.add_argument("--limit-s", type=float, default=3600)
    parser.add_argument("--workdir", type=Path, help="on the drive to measure; empty (default: made here)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    return in_workdir(args.workdir, lambda workdir: compare(workdir, args))


if __name__ == "__main__":
    run(main)
