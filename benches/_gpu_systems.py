"""Systems that gpu.py trains: an offloaded model, the same one resident on the device, DeepSpeed.

The interpreter with DeepSpeed imports this too, so memascend is imported where it is used.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import torch
from _common import versions
from _gpu_where import Where
from _llama import llama_config

LEARNING_RATE, MAX_NORM = 1e-4, 1.0


def clips(job: dict) -> bool:
    """Return whether steps are clipped by their norm, which an update within the backward pass cannot know yet."""
    return job["update"] == "forward"


class MemascendRun:
    """An offloaded model, computing on the device."""

    def __init__(self, job: dict, where: Where) -> None:
        import memascend
        from memascend.session.api import offload_of

        options = {
            "store": [f"{place}/gpu-store" for place in job["store"]],
            "recompute": job["policy"] != "keep",
            "activations": None if job["policy"] == "keep" else job["policy"],
            "batch_tokens": job["batch"] * job["sequence"],
            "durability": job["durability"],
            "update": job["update"],
        }
        if job.get("tile_tokens"):
            options["tile_tokens"] = job["tile_tokens"]
        if job.get("lora"):
            # As `memascend finetune` does: from files a head is whole, and so are 12 bytes of logits a token and word.
            options["frozen"] = "store"
        if where.cuda:
            options |= {"device": str(where.device), "device_memory": job["device_memory"]}
        host_memory = job["host_memory"]
        if host_memory == "least":
            host_memory = least_host_memory(job["model_dir"], options)
        self.job = job
        self.model = memascend.from_pretrained(job["model_dir"], host_memory=host_memory, **options).train()
        self.state = offload_of(self.model)
        if job.get("compile"):
            for layer in self.model.model.layers:
                layer.compile()
        if job.get("lora"):
            self.model = with_adapters(self.model, job["lora"])
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = memascend.AdamW(trained, lr=LEARNING_RATE, states=job["states"])
        #: Seconds by kind, where the model keeps account of them.
        self.timeline = getattr(self.state, "timeline", None)

    def counters(self) -> dict:
        """Return the bytes moved so far, and how often this thread has waited for the device."""
        stats = self.state.runtime.stats()
        found = {name: stats[name] for name in ("ssd_bytes_read", "ssd_bytes_written")}
        link = self.state.runtime.device.stats() if self.state.device is not None else {}
        return found | {name: link.get(name, 0) for name in ("h2d_bytes", "d2h_bytes", "waits_python")}

    def update_bytes(self) -> int:
        """Return the bytes of host memory that one update of every parameter reads and writes."""
        planes = {
            place.name: sum(plane.bytes(place.numel) for plane in place.states.rule.planes)
            for place in self.state.places
            if place.states.rule is not None
        }
        return sum(
            2 * (place.nbytes + planes[place.name]) + place.nbytes
            for place in self.state.places
            if place.name in planes
        )

    def backward(self, loss) -> None:
        loss.backward()

    def clip(self) -> None:
        if clips(self.job):
            self.optimizer.clip_grad_norm_(MAX_NORM)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self):
        import memascend

        return memascend.parameters_of(self.model)

    def close(self) -> dict:
        import memascend

        self.optimizer.flush()
        stats, plan = self.state.stats(), memascend.plan_of(self.model)
        update_bytes = self.update_bytes()
        memascend.close(self.model)
        names = ("engine", "direct_io", "host_allocator", "host_bytes_planned", "host_bytes_budget", "parameters")
        names += ("host_bytes_reserved", "device_bytes_planned", "device_bytes_budget", "notices")
        return {name: stats.get(name) for name in names} | {"plan": plan, "update_bytes": update_bytes}


def least_host_memory(model_dir: str, options: dict) -> int:
    """Return the smallest budget that works, which the refusal of a smaller one names before anything is written."""
    import memascend

    try:
        memascend.from_pretrained(model_dir, host_memory=1, **options)
    except memascend.BudgetError as error:
        return error.smallest_bytes
    raise RuntimeError("a budget of one byte was not refused")


def with_adapters(model, rank: int):
    """Return the model with LoRA's adapters of all products of a layer."""
    import peft

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names))


class ResidentRun:
    """The transformers model on the device under memascend.AdamW without a store: the same arithmetic."""

    timeline = None

    def __init__(self, job: dict, where: Where) -> None:
        from transformers import LlamaForCausalLM

        import memascend

        self.job = job
        model = LlamaForCausalLM.from_pretrained(job["model_dir"], dtype=torch.bfloat16)
        self.model = model.to(where.device).train()
        self.optimizer = memascend.AdamW(self.model.parameters(), lr=LEARNING_RATE, states=job["states"])

    def counters(self) -> dict:
        return {}

    backward, clip = MemascendRun.backward, MemascendRun.clip
    update, weights = MemascendRun.update, MemascendRun.weights

    def close(self) -> dict:
        return {}


class FusedRun:
    """The transformers model on the device: bf16 weights, fp32 masters under torch.optim.AdamW (fused)."""

    timeline = None

    def __init__(self, job: dict, where: Where) -> None:
        from transformers import LlamaForCausalLM

        self.job = job
        model = LlamaForCausalLM.from_pretrained(job["model_dir"], dtype=torch.bfloat16)
        self.model = model.to(where.device).train()
        if job["policy"] != "keep":
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.weights_here = list(self.model.parameters())
        self.masters = [weight.detach().float().requires_grad_() for weight in self.weights_here]
        self.optimizer = torch.optim.AdamW(self.masters, lr=LEARNING_RATE, weight_decay=1e-2, fused=True)

    def counters(self) -> dict:
        return {}

    def backward(self, loss) -> None:
        loss.backward()

    def clip(self) -> None:
        for weight, master in zip(self.weights_here, self.masters, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        if clips(self.job):
            torch.nn.utils.clip_grad_norm_(self.masters, MAX_NORM)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.weights_here, self.masters)

    def close(self) -> dict:
        return {}


class DeepSpeedRun:
    """ZeRO-Infinity (parameters and states on NVMe) or ZeRO-Offload (states and the update on the CPU)."""

    timeline = None

    def __init__(self, job: dict, where: Where) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        if job["system"].endswith("-memascend"):
            import memascend.deepspeed  # noqa: F401 (its parts take the place of DeepSpeed's)
        import deepspeed
        from transformers import LlamaForCausalLM

        infinity = job["system"].startswith("zero-infinity")
        self.config = {
            "train_micro_batch_size_per_gpu": job["batch"],
            "gradient_accumulation_steps": job["accumulate"],
            "bf16": {"enabled": True},
            "gradient_clipping": MAX_NORM,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 1e-2}},
            "zero_optimization": self._infinity(job) if infinity else self._offload(),
            "aio": {
                "block_size": 1 << 20,
                "queue_depth": 32,
                "intra_op_parallelism": 1,
                "single_submit": False,
                "overlap_events": True,
            },
        }
        deepspeed.init_distributed(dist_backend="nccl" if where.cuda else "gloo")
        if infinity:
            with deepspeed.zero.Init(config_dict_or_path=self.config, dtype=torch.bfloat16):
                model = LlamaForCausalLM(llama_config(job["shape"], job["vocabulary"], job["positions"]))
            self._fill(model, Path(job["model_dir"]), deepspeed)
        else:
            model = LlamaForCausalLM.from_pretrained(job["model_dir"], dtype=torch.bfloat16)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        self.model, *_ = deepspeed.initialize(model=model, config=self.config, model_parameters=model.parameters())

    @staticmethod
    def _infinity(job: dict) -> dict:
        nvme = {"device": "nvme", "nvme_path": job["store"][0], "pin_memory": True}
        largest = job["vocabulary"] * job["shape"][0]  # elements of the embedding
        zero = {
            "stage": 3,
            "overlap_comm": True,
            "offload_param": {**nvme, "max_in_cpu": 0, "buffer_count": 5, "buffer_size": largest},
            "offload_optimizer": {**nvme, "buffer_count": 4},
            # As in peak_memory.py: with the defaults the second step ends in "Not enough buffers 0".
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": int(5e7),
        }
        return zero | (job.get("zero") or {})

    @staticmethod
    def _offload() -> dict:
        return {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu", "pin_memory": True}}

    @staticmethod
    def _fill(model, directory: Path, deepspeed) -> None:
        from safetensors import safe_open

        weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
        for name, param in model.named_parameters():
            with (
                deepspeed.zero.GatheredParameters([param], modifier_rank=0),
                safe_open(directory / weight_map[name], framework="pt") as file,
            ):
                param.data.copy_(file.get_tensor(name))

    def counters(self) -> dict:
        return {}

    def backward(self, loss) -> None:
        self.model.backward(loss)
        # It counts micro-batches itself, and does nothing in all but the last.
        self.model.step()

    def clip(self) -> None:
        pass

    def update(self) -> None:
        pass

    def close(self) -> dict:
        config = json.loads(json.dumps(self.config))
        for part in config["zero_optimization"].values():
            if isinstance(part, dict):
                part.pop("nvme_path", None)
        return {"deepspeed_config": config, "versions": versions("deepspeed", "torch", "transformers")}


RUNS = {
    "memascend": MemascendRun,
    "resident": ResidentRun,
    "resident-fused": FusedRun,
    "zero-infinity": DeepSpeedRun,
    "zero-infinity-memascend": DeepSpeedRun,
    "zero-offload": DeepSpeedRun,
    "zero-offload-memascend": DeepSpeedRun,
}
