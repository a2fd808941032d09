"""The device that computes, its clock and its memory, and how far host memory falls: shared by the tasks of gpu.py."""

from __future__ import annotations

import statistics
import threading
import time

import torch
from _common import mem_available
from _llama import llama_config


class Where:
    """The device that computes."""

    def __init__(self, name: str) -> None:
        self.cuda = name != "cpu"
        self.device = torch.device(name)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, function, repeats: int) -> float:
        """Return the median time of a call, after one that warms up; with nothing else going on."""
        taken = []
        for _ in range(repeats + 1):
            self.synchronize()
            began = time.perf_counter()
            function()
            self.synchronize()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[1:])

    def settle(self) -> None:
        """Take a step of a toy: contexts, handles and one-time allocations of libraries are not counted."""
        from transformers import LlamaForCausalLM

        config = llama_config((64, 128, 2, 4, 2), 256)
        toy = LlamaForCausalLM(config).to(self.device, torch.bfloat16)
        ids = torch.zeros(1, 64, dtype=torch.long, device=self.device)
        toy(input_ids=ids, labels=ids).loss.backward()
        self.synchronize()
        del toy
        if self.cuda:
            torch.cuda.empty_cache()

    def in_use(self) -> int | None:
        """Return the bytes of the device in use by any process, by the driver."""
        if not self.cuda:
            return None
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def peaks(self) -> dict:
        if not self.cuda:
            return {"allocated_bytes": None, "reserved_bytes": None}
        return {
            "allocated_bytes": torch.cuda.max_memory_allocated(self.device),
            "reserved_bytes": torch.cuda.max_memory_reserved(self.device),
        }


class HostMemory:
    """How far MemAvailable falls: pinned memory may be in no process's resident set, but it is not available."""

    def __init__(self) -> None:
        self.before = self.least = mem_available()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(0.05):
            self.least = min(self.least, mem_available())

    def stop(self) -> int:
        """Return the most bytes that were taken from the system since this began."""
        self._end.set()
        self._thread.join()
        return self.before - min(self.least, mem_available())
