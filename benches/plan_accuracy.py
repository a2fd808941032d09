#!/usr/bin/env python
"""Does the plan tell the truth? The memory of memascend, measured over real training runs, beside its plan.

    python benches/plan_accuracy.py                                   # five architectures
    python benches/plan_accuracy.py --models llama --json benches/results/plan_accuracy.json
    python benches/plan_accuracy.py --cgroup        # root: under memory limits that the kernel enforces (cgroup v1)
    python benches/plan_accuracy.py --models llama,qwen3-moe --base 4       # adapters over a base quantised to 4 bits

Each model runs in a process of its own: load, then phases of a few optimizer steps each (plain; sequence lengths that
vary; accumulation; evaluation between steps; an exception in mid-backward, and on). All that time a thread reads, every
few milliseconds, the process's anonymous resident memory and malloc's bytes in use. Their difference holds the arena
(mapped, not malloc'd), Python's objects, thread stacks and malloc's holes; malloc's bytes hold the framework's
activations, logits and temporaries. Both are counted above the baseline: taken after importing torch, transformers and
the model class, and after one in-memory step of a toy of the same architecture, so that one-time allocations of the
framework are not taken for memascend's. A reading counts when malloc's bytes were the same before and after it.

PyTorch's share stands beside it: the estimate of `memascend plan`, and the peak of resident memory (VmHWM) above the
baseline and the plan. It is worth looking at with many tokens: --seq-len 512.

With --base, adapters of rank 8 (PEFT) are trained over the frozen model: "16" as it is, "8" and "4" quantised as it is
opened (frozen_bits), "nf4" read in place from a directory that `memascend export --format nf4` has quantised.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from _common import machine, markdown, rss

TOLERANCE = 0.02
COMMON = {"vocab_size": 8192, "max_position_embeddings": 512, "tie_word_embeddings": False, "dtype": "bfloat16"}
DECODER = COMMON | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
#: Architectures as config.json names them; 0.15 to 0.25 billion parameters each.
MODELS = {
    "llama": ("LlamaForCausalLM", "llama", DECODER),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", DECODER),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        DECODER
        | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "head_dim": 64}
        | {"decoder_sparse_step": 1},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "gpt2",
        {"vocab_size": 8192, "n_embd": 1024, "n_layer": 12, "n_head": 16, "n_positions": 512, "dtype": "bfloat16"},
    ),
    "gemma": ("GemmaForCausalLM", "gemma", DECODER | {"head_dim": 64, "tie_word_embeddings": True}),
}
#: The same over depth, where bookkeeping weighs most: --models llama-8-layers,llama-200-layers.
MODELS |= {
    f"llama-{depth}-layers": (
        "LlamaForCausalLM",
        "llama",
        DECODER
        | {"hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
        | {"num_hidden_layers": depth},
    )
    for depth in (8, 64, 200)
}
#: How the base of adapters is opened, by --base, and the rank of adapters.
BASES = {
    "16": {"frozen": "store"},
    "8": {"frozen": "store", "frozen_bits": 8},
    "4": {"frozen": "store", "frozen_bits": 4},
    "nf4": {"frozen": "files", "dequantize": True},
}
RANK = 8
TOY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "n_embd": 64,
    "n_layer": 2,
    "vocab_size": 256,
}


# --- the child: one model, one process ---


class _Mallinfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


class Watch:
    """Reads resident and malloc'd bytes until told to stop; `take()` gives the highest difference since the last."""

    def __init__(self) -> None:
        self._mallinfo = ctypes.CDLL(None).mallinfo2
        self._mallinfo.restype = _Mallinfo
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._lock = threading.Lock()
        self._highest = self._readings = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _in_use(self) -> int:
        info = self._mallinfo()
        return info.uordblks + info.hblkhd

    def read(self) -> int | None:
        """Return the anonymous resident bytes less malloc's bytes in use; None if those changed meanwhile.

        The least of three readings a millisecond apart: glibc counts a large block as freed before it unmaps it.
        """
        least = None
        for pause in (0.001, 0.001, 0):
            value = self._read_once()
            if value is None:
                return None
            least = value if least is None else min(least, value)
            time.sleep(pause)
        return least

    def _read_once(self) -> int | None:
        before = self._in_use()
        fields = os.pread(self._statm, 200, 0).split()
        after = self._in_use()
        if abs(after - before) > 64 * 1024:
            return None
        return (int(fields[1]) - int(fields[2])) * self._page - after

    def steady(self) -> int:
        """Return a reading with nothing going on."""
        while (value := self.read()) is None:
            pass
        return value

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.001):
            value = self.read()
            if value is not None:
                with self._lock:
                    self._highest = max(self._highest, value)
                    self._readings += 1

    def take(self) -> tuple[int, int]:
        with self._lock:
            taken = self._highest, self._readings
            self._highest = self._readings = 0
        return taken

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def build_config(name: str, small: bool = False):
    from transformers import AutoConfig

    architecture, model_type, fields = MODELS[name]
    if small:
        fields = fields | {key: value for key, value in TOY.items() if key in fields}
        fields = {key: value for key, value in fields.items() if key != "head_dim"}
    return AutoConfig.for_model(model_type, architectures=[architecture], **fields)


def child(name: str, model_dir: str, scratch: str, options: dict) -> dict:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    toy = AutoModelForCausalLM.from_config(build_config(name, small=True), dtype=torch.bfloat16).train()
    tokens = torch.randint(0, 256, (1, 16))
    if options["base"]:
        import peft

        toy = peft.get_peft_model(toy, peft.LoraConfig(r=RANK, target_modules="all-linear")).train()
    toy(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    del toy
    import memascend

    watch = Watch()
    baseline, rss_baseline = watch.steady(), rss()["rss"]
    watch.start()
    store, base = f"{scratch}/store", options["base"]
    opened = BASES[base] if base else {}
    model = memascend.from_pretrained(model_dir, store=store, host_memory=options["host_memory"], **opened)
    offloaded = model
    if base:
        model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules="all-linear")).train()
    optimizer = memascend.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    seq_len, vocabulary = options["seq_len"], model.config.vocab_size
    phases = {}

    def batch(length: int) -> dict:
        tokens = torch.randint(0, vocabulary, (1, length))
        return {"input_ids": tokens, "labels": tokens, "use_cache": False}

    def step(lengths: list[int]) -> None:
        for length in lengths:
            (model(**batch(length)).loss / len(lengths)).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    def phase(title: str, *steps: list[int], between=lambda: None) -> None:
        for lengths in steps:
            step(lengths)
            between()
        highest, readings = watch.take()
        phases[title] = {"measured_bytes": highest - baseline, "readings": readings}

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            model(**batch(seq_len))
        model.train()

    class Broken(Exception):
        pass

    def fail_in_mid_backward() -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        parameter = trained[len(trained) // 2]

        def raise_here(_):
            raise Broken

        hook = parameter.register_hook(raise_here)
        try:
            step([seq_len])
        except Broken:
            pass
        else:
            raise AssertionError("the exception did not come")
        hook.remove()
        optimizer.zero_grad()

    phase("load")
    phase("plain", [seq_len], [seq_len])
    phase("lengths vary", [seq_len // 4], [seq_len], [seq_len // 2])
    phase("accumulation", [seq_len] * 2, [seq_len] * 3)
    phase("evaluation between", [seq_len], [seq_len], between=evaluate)
    fail_in_mid_backward()
    phase("after an exception", [seq_len], [seq_len])
    stats = memascend.stats(offloaded)
    optimizer.flush()
    watch.stop()
    memascend.close(offloaded)
    return {
        "model": name,
        "parameters": stats["parameters"],
        "budget_bytes": stats["host_bytes_budget"],
        "planned_bytes": stats["host_bytes_planned"],
        "arena_bytes": stats["host_bytes_reserved"],
        "allocator": stats["host_allocator"],
        "phases": phases,
        "peak_rss_above_baseline_bytes": rss()["hwm"] - rss_baseline,
    }


# --- the parent ---


def write_model(name: str, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(build_config(name), dtype=torch.bfloat16).save_pretrained(out)


def quantised(model_dir: Path) -> Path:
    """Return the directory of a model in NF4, which is made once."""
    out = model_dir.with_name(f"{model_dir.name}-nf4")
    if not out.exists():
        command = [sys.executable, "-m", "memascend", "export", str(model_dir), "--format", "nf4", "--out", str(out)]
        subprocess.run(command, check=True)
    return out


def in_process(function: str, *words: str, cgroup: Path | None = None) -> subprocess.CompletedProcess:
    def enter() -> None:
        if cgroup is not None:
            (cgroup / "cgroup.procs").write_text(str(os.getpid()))

    command = [sys.executable, __file__, "--child", function, *words]
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=enter)


def measure(name: str, model_dir: Path, options: dict) -> dict:
    if options["host_memory"] in ("smallest", "overlap"):
        planned = plan_of(model_dir, 64, options["base"])["host_memory"]
        options = options | {"host_memory": planned[f"{options['host_memory']}_bytes"]}
    with tempfile.TemporaryDirectory(dir=model_dir.parent) as scratch:
        done = in_process("run", name, str(model_dir), scratch, json.dumps(options))
    if done.returncode != 0:
        raise SystemExit(f"{name} failed ({done.returncode}):\n{done.stderr}")
    result = json.loads(done.stdout.splitlines()[-1])
    share = plan_of(model_dir, options["seq_len"], options["base"])["pytorch"]
    result["pytorch_estimated_bytes"] = None if share is None else share["estimated_bytes"]
    result["pytorch_measured_bytes"] = result["peak_rss_above_baseline_bytes"] - result["planned_bytes"]
    return result


def plan_of(model_dir: Path, seq_len: int, base: str | None) -> dict:
    command = [sys.executable, "-m", "memascend", "plan", str(model_dir), "--seq-len", str(seq_len), "--json"]
    command += ["--dtype", "bfloat16"]
    if base:
        command += ["--lora-rank", str(RANK)]  # of all linear layers
        command += ["--base-bits", base] if base in ("4", "8") else []
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def under_limits(model_dir: Path, options: dict) -> list[dict]:
    """Return the same run in a memory cgroup: at the baseline plus the plan plus 5%, and below the plan."""
    root = Path("/sys/fs/cgroup/memory")
    if not (root / "memory.limit_in_bytes").exists():
        raise SystemExit("--cgroup needs cgroup v1's memory controller")
    free = measure("llama", model_dir, options)
    baseline = int(in_process("baseline", "llama").stdout)
    results = []
    for title, limit in (
        ("baseline + plan + 5%", baseline + int(free["planned_bytes"] * 1.05)),
        ("half of the plan", baseline + free["planned_bytes"] // 2),
    ):
        group = root / f"memascend-bench-{os.getpid()}"
        group.mkdir()
        try:
            (group / "memory.limit_in_bytes").write_text(str(limit))
            with tempfile.TemporaryDirectory(dir=model_dir.parent) as scratch:
                done = in_process("run", "llama", str(model_dir), scratch, json.dumps(options), cgroup=group)
            told = [line for line in done.stderr.splitlines() if "BudgetError" in line]
            results.append(
                {
                    "limit": title,
                    "limit_bytes": limit,
                    "baseline_bytes": baseline,
                    "planned_bytes": free["planned_bytes"],
                    "usage_max_bytes": int((group / "memory.max_usage_in_bytes").read_text()),
                    "exit_code": done.returncode,
                    "said": told[-1] if told else done.stderr.strip().splitlines()[-1:],
                }
            )
        finally:
            time.sleep(0.5)
            group.rmdir()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama,qwen2,qwen3-moe,gpt2,gemma", help="of " + ", ".join(MODELS))
    help_text = "budget: a size, or smallest, or overlap (the least that reads ahead) (default: %(default)s)"
    parser.add_argument("--host-memory", default="1GiB", help=help_text)
    parser.add_argument("--seq-len", type=int, default=64, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--base", choices=BASES, help="train adapters over the frozen model, which is opened so")
    parser.add_argument("--workdir", type=Path, help="where models and stores go, and models stay")
    parser.add_argument("--cgroup", action="store_true", help="run under memory limits instead (root)")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--check", action="store_true", help=f"exit 1 if one is off by more than {TOLERANCE:.0%}")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return run_child(*arguments.child)

    workdir = arguments.workdir or Path(tempfile.mkdtemp(prefix="memascend-plan-"))
    workdir.mkdir(parents=True, exist_ok=True)
    options = {"host_memory": arguments.host_memory, "seq_len": arguments.seq_len, "base": arguments.base}
    names = ["llama"] if arguments.cgroup else arguments.models.split(",")
    results, rows, off = [], [], []
    try:
        for name in names:
            model_dir = workdir / f"plan-{name}"
            if not model_dir.exists():
                subprocess.run([sys.executable, __file__, "--child", "write", name, str(model_dir)], check=True)
            if arguments.base == "nf4":
                model_dir = quantised(model_dir)
            if arguments.cgroup:
                results = under_limits(model_dir, options)
                break
            result = measure(name, model_dir, options)
            results.append(result)
            highest = max(phase["measured_bytes"] for phase in result["phases"].values())
            error = highest / result["planned_bytes"] - 1
            if abs(error) > TOLERANCE or highest > result["budget_bytes"]:
                off.append(name)
            rows.append(
                [
                    name,
                    f"{result['parameters'] / 1e6:.0f}M",
                    f"{result['budget_bytes'] / 2**20:.1f}",
                    f"{result['planned_bytes'] / 2**20:.1f}",
                    f"{highest / 2**20:.1f}",
                    f"{error:+.2%}",
                    f"{result['peak_rss_above_baseline_bytes'] / 2**20:.1f}",
                    f"{(result['pytorch_estimated_bytes'] or 0) / 2**20:.1f}",
                    f"{result['pytorch_measured_bytes'] / 2**20:.1f}",
                ]
            )
            for title, phase in result["phases"].items():
                print(f"  {name}: {title}: {phase['measured_bytes'] / 2**20:.1f} MiB ({phase['readings']} readings)")
    finally:
        if arguments.workdir is None:
            shutil.rmtree(workdir)
    if arguments.cgroup:
        for result in results:
            print(json.dumps(result, indent=1))
    else:
        header = ["model", "parameters", "budget MiB", "plan MiB", "measured MiB", "off by", "peak RSS MiB"]
        header += ["PyTorch's MiB, estimated", "measured"]
        print(markdown(header, rows))
    if arguments.json:
        where = Path(tempfile.gettempdir()) if arguments.workdir is None else workdir
        record = {"machine": machine(where), "options": options, "results": results}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    if arguments.check and off:
        sys.exit(f"off by more than {TOLERANCE:.0%}, or past the budget: {', '.join(off)}")


def run_child(function: str, name: str, *words: str) -> None:
    if function == "write":
        write_model(name, Path(words[0]))
    elif function == "baseline":
        import torch  # noqa: F401
        from transformers import AutoModelForCausalLM

        import memascend  # noqa: F401

        AutoModelForCausalLM.from_config(build_config(name, small=True))
        print(rss()["rss"])
    else:
        model_dir, scratch, options = words
        print(json.dumps(child(name, model_dir, scratch, json.loads(options))))


if __name__ == "__main__":
    main()
