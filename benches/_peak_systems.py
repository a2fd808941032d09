"""The systems that peak_memory.py compares, and its child: one configuration in a process of its own.

The interpreter with DeepSpeed imports this too.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from _common import block_io, enter, rss, versions
from _llama import SEED, llama_config, write_model

VOCABULARY, TOKENS, LEARNING_RATE, MAX_NORM = 32_000, 128, 1e-4, 1.0
WORDS = {"vocabulary": 131_072}  # the others have VOCABULARY


class MemascendRun:
    """`from_pretrained` into a store; every byte the run reads and writes is counted by the engine."""

    label = "forward incl. the deferred update"

    def __init__(self, model_dir: str, scratch: str, options: dict):
        import memascend

        self.memascend = memascend
        self.model = memascend.from_pretrained(
            model_dir,
            store=f"{scratch}/store",
            host_memory=options["host_memory"],
            dtype=options.get("dtype", "bfloat16"),
            durability=options.get("durability", "auto"),
            recompute=options.get("recompute", True),
            update=options.get("update", "forward"),
            **{
                name: options[name]
                for name in ("huge_pages", "allocator", "micro_batch_size", "spare_memory")
                if name in options
            },
        )
        self.clips = options.get("clips", True)
        self.model.train()
        if options.get("optimizer", "adamw") == "adamw":
            self.optimizer = memascend.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        else:
            make = memascend.Apollo if options["optimizer"] == "apollo" else memascend.ApolloMini
            self.optimizer = make(memascend.apollo_groups(self.model, options["rank"]), lr=LEARNING_RATE)

    def backward(self, loss):
        loss.backward()

    def step(self):
        if self.clips:
            self.optimizer.clip_grad_norm_(MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def ssd_bytes(self):
        stats = self.memascend.stats(self.model)
        return stats["ssd_bytes_read"], stats["ssd_bytes_written"]

    def ssd_busy(self):
        return max(volume["busy_seconds"] for volume in self.memascend.stats(self.model)["volumes"])

    def close(self):
        self.optimizer.flush()
        stats = self.memascend.stats(self.model)
        self.memascend.close(self.model)
        return {
            "host_memory_bytes": stats["host_bytes_budget"],
            "pool_peak_bytes": stats["host_bytes_peak"],
            "engine": stats["engine"],
            "direct_io": stats["direct_io"],
            "notices": stats["notices"],
            "layers_kept": stats["layers_kept"],
            "layers_recomputed": stats["layers_recomputed"],
            "activation_bytes_kept_peak": stats["activation_bytes_kept_peak"],
        }


def words(model: str) -> int:
    return WORDS.get(model, VOCABULARY)


def budgets(model_dir: str, tokens: int, update: str = "forward", dtype: str = "bfloat16") -> dict[str, int]:
    """Return the least that works, and the least with which the next layer is read while one computes."""
    from memascend.forecast.forecast import forecast

    host = forecast(Path(model_dir), seq_len=tokens, batch_size=1, update=update, dtype=dtype)["host_memory"]
    return {"smallest": host["smallest_bytes"], "overlapping": host["overlap_bytes"]}


class TorchRun:
    """In memory: bf16 weights, fp32 masters under torch.optim.AdamW (fused)."""

    label = "forward"

    def __init__(self, model_dir: str, scratch: str, options: dict):
        import torch
        from transformers import LlamaForCausalLM

        self.torch = torch
        self.model = LlamaForCausalLM.from_pretrained(model_dir, dtype=options.get("dtype", "bfloat16")).train()
        self.params = list(self.model.parameters())
        self.masters = [p.detach().float().requires_grad_() for p in self.params]
        self.optimizer = torch.optim.AdamW(self.masters, lr=LEARNING_RATE, weight_decay=1e-2, fused=True)
        self.clips = options.get("clips", True)

    def backward(self, loss):
        loss.backward()

    def step(self):
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad, param.grad = param.grad.float(), None
        if self.clips:
            self.torch.nn.utils.clip_grad_norm_(self.masters, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with self.torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                param.copy_(master)

    def ssd_bytes(self):
        return None

    def close(self):
        return {}


class ExactRun(TorchRun):
    """In memory under memascend.AdamW without a store: the offloaded losses must equal these bit for bit."""

    def __init__(self, model_dir: str, scratch: str, options: dict):
        from transformers import LlamaForCausalLM

        import memascend

        self.model = LlamaForCausalLM.from_pretrained(model_dir, dtype=options.get("dtype", "bfloat16")).train()
        memascend.fuse_loss(self.model)
        self.optimizer = memascend.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def step(self):
        self.optimizer.clip_grad_norm_(MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()


class ZeroInfinityRun:
    """DeepSpeed ZeRO-3, parameters and optimizer states on NVMe, nothing cached in host memory."""

    label = "forward"
    offload = "nvme"

    def __init__(self, model_dir: str, scratch: str, options: dict):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        import deepspeed
        import torch
        from safetensors import safe_open
        from transformers import LlamaForCausalLM

        shape = options["shape"]
        Path(scratch, "nvme").mkdir()
        nvme = {"device": self.offload, "nvme_path": f"{scratch}/nvme"}
        largest = words(options["model"]) * shape[0]  # elements of the embedding
        zero = {
            "stage": 3,
            "sub_group_size": int(5e7),
            "offload_param": {**nvme, "max_in_cpu": 0, "buffer_count": 5, "buffer_size": largest},
            "offload_optimizer": {**nvme, "buffer_count": 4},
            # By default ZeRO-3 keeps up to 1e9 live parameters: this model whole. Released after use instead,
            # which also takes less memory; without it the second step fails with "Not enough buffers 0".
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": int(5e7),
        }
        zero.update(options.get("zero") or {})
        self.config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": options.get("accumulate", 1),
            "bf16": {"enabled": True},
            "gradient_clipping": MAX_NORM if options.get("clips", True) else 0.0,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 1e-2}},
            "zero_optimization": zero,
            "aio": {
                "block_size": 1 << 20,
                "queue_depth": 32,
                "intra_op_parallelism": 1,
                "single_submit": False,
                "overlap_events": True,
            },
        }
        deepspeed.init_distributed(dist_backend="gloo")
        with deepspeed.zero.Init(config_dict_or_path=self.config, dtype=torch.bfloat16):
            model = LlamaForCausalLM(llama_config(shape, words(options["model"])))
        weight_map = json.loads(Path(model_dir, "model.safetensors.index.json").read_text())["weight_map"]
        for name, param in model.named_parameters():
            with (
                deepspeed.zero.GatheredParameters([param], modifier_rank=0),
                safe_open(f"{model_dir}/{weight_map[name]}", framework="pt") as file,
            ):
                param.data.copy_(file.get_tensor(name))
        self.model, *_ = deepspeed.initialize(model=model, config=self.config, model_parameters=model.parameters())

    def backward(self, loss):
        self.model.backward(loss)

    def step(self):
        self.model.step()

    def ssd_bytes(self):
        return block_io()  # its engine counts nothing; O_DIRECT traffic is in the kernel's account

    def close(self):
        config = json.loads(json.dumps(self.config))
        for part in ("offload_param", "offload_optimizer"):
            del config["zero_optimization"][part]["nvme_path"]
        return {"deepspeed_config": config, "versions": versions("deepspeed", "torch", "transformers")}


class ZeroOffloadRun(ZeroInfinityRun):
    """DeepSpeed ZeRO-3, parameters and optimizer states in host memory."""

    offload = "cpu"


RUNS = {
    "memascend": MemascendRun,
    "in-memory": TorchRun,
    "in-memory-exact": ExactRun,
    "zero-infinity": ZeroInfinityRun,
    "zero-offload": ZeroOffloadRun,
}


def child(job: dict) -> dict:
    enter(job.get("cgroup"))
    import torch
    import transformers  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401

    baseline = rss()["hwm"]
    if job["task"] == "import":
        return {"baseline_bytes": baseline}
    if job["task"] == "budget":
        chosen = job.get("update", "forward"), job.get("dtype", "bfloat16")
        return budgets(job["model_dir"], job["tokens"], *chosen)
    if job["task"] == "write":
        write_model(llama_config(job["shape"], words(job["model"])), Path(job["model_dir"]))
        return {}

    started = time.perf_counter()
    run = RUNS[job["system"]](job["model_dir"], job["scratch"], job)
    setup_s, setup = time.perf_counter() - started, rss()
    ids = torch.randint(0, words(job["model"]), (1, job["tokens"]), generator=torch.Generator().manual_seed(SEED))
    steps = []
    ssd_busy = getattr(run, "ssd_busy", lambda: 0.0)
    boundary, ssd, disk, busy = time.perf_counter(), run.ssd_bytes(), block_io(), ssd_busy()
    for number in range(job["warmup"] + job["steps"]):
        loss = run.model(input_ids=ids, labels=ids).loss
        forward = time.perf_counter()
        run.backward(loss)
        backward = time.perf_counter()
        run.step()
        end, ssd_now, disk_now, busy_now = time.perf_counter(), run.ssd_bytes(), block_io(), ssd_busy()
        steps.append(
            {
                "measured": number >= job["warmup"],
                "loss": float(loss.detach()),
                "step_s": end - boundary,
                "forward_s": forward - boundary,
                "backward_s": backward - forward,
                "optimizer_s": end - backward,
                "ssd": [b - a for a, b in zip(ssd, ssd_now, strict=True)] if ssd else None,
                "ssd_busy_s": busy_now - busy,
                "disk": [b - a for a, b in zip(disk, disk_now, strict=True)],
                **rss(),
            }
        )
        # As in `memascend finetune`: a loss kept into the next step would hold its whole graph beside the next one.
        del loss
        print(f"step {number}: {steps[-1]}", flush=True)
        boundary, ssd, disk, busy = time.perf_counter(), ssd_now, disk_now, busy_now
    details = run.close()
    return {
        "baseline_bytes": baseline,
        "setup_s": setup_s,
        "setup_hwm_bytes": setup["hwm"],
        "hwm_bytes": rss()["hwm"],
        "steps": steps,
        **details,
    }
