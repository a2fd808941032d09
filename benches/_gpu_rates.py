"""Rates of a machine's parts: copies of ours beside plain ones, host memory, drives, and passes of a resident model."""

from __future__ import annotations

import statistics
import tempfile
import traceback
from contextlib import contextmanager
from pathlib import Path

import torch
from _gpu_where import Where
from _llama import llama_config

#: Size of a measured copy: units of a model are about so large.
PIECES = 8


def compute(job: dict, keep) -> dict:
    """Return the seconds of a pass with everything on the device: of a layer with recomputation, and of the rest.

    From models of one layer and of three: their difference is two layers, and the remainder of the first is embedding,
    head and loss.
    """
    from transformers import LlamaForCausalLM

    where, seconds = Where(job["device"]), {}
    where.settle()
    hidden, intermediate, _, heads, kv_heads = job["shape"]
    ids = torch.randint(0, job["vocabulary"], (job["batch"], job["sequence"])).to(where.device)
    for layers in (1, 3):
        config = llama_config((hidden, intermediate, layers, heads, kv_heads), job["vocabulary"], job["positions"])
        with where.device:
            model = LlamaForCausalLM(config).to(torch.bfloat16).train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

        def once(model=model) -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            model.zero_grad()

        seconds[layers] = where.seconds(once, job["repeats"])
        del model, once
    layer = (seconds[3] - seconds[1]) / 2
    ends = seconds[1] - layer
    return {"layer_seconds": layer, "ends_seconds": ends, "pass_seconds": ends + job["shape"][2] * layer}


def rates(job: dict, keep) -> dict:
    """Return the bytes per second of copies each way, of host memory and of the store's drives, by `parts`."""
    parts = {
        "copies": lambda: copies(job, Where(job["device"])),
        "dram_bytes_per_s": lambda: dram(job["bytes"], job["repeats"]),
        "ssd": lambda: ssd(job),
    }
    found: dict = {}
    for name, measure in parts.items():
        if name in job["parts"]:
            found[name] = measure()
            keep(found)
    return found


def dram(nbytes: int, repeats: int) -> float:
    """Return the rate as STREAM counts a copy: each byte is read and written."""
    source, target = (torch.ones(nbytes // 4, dtype=torch.float32) for _ in range(2))
    return 2 * nbytes / Where("cpu").seconds(lambda: target.copy_(source), repeats)


def ssd(job: dict) -> dict:
    """Return the rate that `memascend bench` measures, of all the store's places together."""
    from memascend.hardware.drives import measure

    told = [measure(place, size=job["ssd_bytes"], seconds=job["ssd_seconds"]) for place in job["store"]]
    return {
        name: sum(one["workloads"][name]["bytes_per_second"] for one in told) for name in ("read", "write", "mix")
    } | {"direct_io": all(one["direct_io"] for one in told)}


def copies(job: dict, where: Where) -> dict:
    """Return the medians of bytes per second, ours beside a plain copy with PyTorch's pinned memory, each way.

    Where ours fails, `error` says why, and the plain copies are measured alone.
    """
    nbytes = job["bytes"]
    device = torch.ones(nbytes, dtype=torch.uint8, device=where.device)
    plain = torch.ones(nbytes, dtype=torch.uint8, pin_memory=where.cuda)
    theirs = {
        "h2d": lambda: device.copy_(plain, non_blocking=True),
        "d2h": lambda: plain.copy_(device, non_blocking=True),
    }

    def by_turns(ours: dict) -> dict:
        found = {}
        for direction, copy in theirs.items():
            functions = {"memascend": ours[direction]} if ours else {}
            functions["plain"] = copy
            speeds: dict[str, list[float]] = {name: [] for name in functions}
            for _ in range(job["repeats"]):
                for name, function in functions.items():
                    speeds[name].append(nbytes / where.seconds(function, 1))
            found[direction] = {name: statistics.median(values) for name, values in speeds.items()} | {"bytes": nbytes}
        return found

    try:
        with (
            tempfile.TemporaryDirectory(dir=job["store"][0]) as store,
            link_of(job, where, Path(store), device) as ours,
        ):
            found = by_turns(ours)
            for row in found.values():
                row["ratio"] = row["memascend"] / row["plain"]
            found["d2h"]["measured_on_device"] = ours["measured_on_device"]
            return found
    except Exception as error:  # whatever it is: the steps' floors need the plain rates
        traceback.print_exc()
        return by_turns({}) | {"error": f"{type(error).__name__}: {error}"}


@contextmanager
def link_of(job: dict, where: Where, store: Path, device: torch.Tensor):
    """Yield the two ways of a run: leases uploaded, gradients downloaded. On the CPU, host copies stand in."""
    if not where.cuda:
        host = torch.ones_like(device)
        yield {"h2d": lambda: device.copy_(host), "d2h": lambda: host.copy_(device), "measured_on_device": None}
        return
    from memascend._memascend import Runtime
    from memascend.hardware.cuda import open_device
    from memascend.memory_plan.arena import Arena
    from memascend.memory_plan.transfers import CHUNK_ELEMENTS_MAX, STAGING_CHUNKS

    nbytes, chunk_bytes = job["bytes"], 2 * CHUNK_ELEMENTS_MAX
    chunks = nbytes // chunk_bytes + STAGING_CHUNKS
    runtime = Runtime(
        [store / "link"],
        Arena([("weights", nbytes, 1)], [], chunk_bytes, chunks, CHUNK_ELEMENTS_MAX, 65_536, 1),
        device=where.device.index or 0,
    )
    opened = open_device("cuda")
    opened.link = link = runtime.device
    leases = [runtime.memory.lease_unit(nbytes)]
    try:
        unit = runtime.units.add_unit()
        torch.frombuffer(leases[0], dtype=torch.uint8).fill_(1)
        piece = nbytes // PIECES
        pieces = device.view(torch.bfloat16).chunk(PIECES)
        # Measured once, as the gradient appears; here the copy alone counts.
        sums = [opened.block_sums(each) for each in pieces]
        gradients = [
            runtime.gradients.create_gradient(unit, f"piece {number}", "bfloat16", each.numel())
            for number, each in enumerate(pieces)
        ]

        def upload() -> None:
            ready = opened.record()
            for number in range(PIECES):
                offset = number * piece
                event = link.upload(leases[0], offset, piece, device.data_ptr() + offset, [ready])
            event.wait()

        def capture() -> None:
            ready = opened.record()
            captures = [
                runtime.gradients.capture_from_device(
                    gradient, 0, each.data_ptr(), each.numel(), False, ready, None if one is None else one.addresses
                )
                for gradient, each, one in zip(gradients, pieces, sums, strict=True)
            ]
            for one in captures:
                one.wait_copied()
            for one, gradient in zip(captures, gradients, strict=True):
                one.wait()
                runtime.gradients.clear_gradient(gradient)

        yield {"h2d": upload, "d2h": capture, "measured_on_device": sums[0] is not None}
    finally:
        leases.clear()
        runtime.close(keep=False)
