"""DeepSpeed's configuration file, as far as a plan depends on it.

Defaults and rules follow DeepSpeed 0.19.8 (runtime/config.py, runtime/zero/config.py and offload_config.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memascend.errors import CheckpointError, DataError
from memascend.forecast import zero_infinity as stock
from memascend.forecast.deepspeed.options import Options
from memascend.forecast.deepspeed.plan import Shapes
from memascend.formats.json_files import read_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

#: Value that the Trainer and Accelerate replace by their own arguments.
AUTO = "auto"
#: `max_in_cpu` of `offload_param`; and where weights are not on NVMe, which all stay in memory.
MAX_IN_CPU, ALL_IN_CPU = 1_000_000_000, 1 << 60
_ITEMSIZES = {"bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2, "float32": 4, "fp32": 4}
_REMEDY = 'set "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": ...}}'


@dataclass
class Configuration:
    """The options of a configuration file, with values in place of "auto"."""

    source: Path
    dtype: str
    gradient_dtype: str
    #: Backward passes of a step.
    passes: int
    sub_group_size: int
    buffer_count: int
    buffer_size: int
    max_in_cpu: int
    swaps_states: bool
    #: Sub-groups whose masters have fewer bytes stay in memory.
    swappable_bytes: int
    options: Options
    #: Notes on values taken for "auto".
    notes: list[str] = field(default_factory=list)

    def shapes(self, numels: Sequence[int], ranks: int) -> Shapes:
        """Return the shapes of a plan for parameters of these sizes: each is cut into as many parts as ranks."""
        parts = [-(-numel // ranks) for numel in numels]
        sub_groups = stock.sub_groups(parts, self.sub_group_size)
        sizes = map(sum, sub_groups) if self.swaps_states else ()
        streamed = sum(numel for numel in sizes if numel * stock.MASTER_BYTES >= self.swappable_bytes)
        return Shapes(
            params=parts,
            sub_groups=sub_groups,
            itemsize=_ITEMSIZES[self.dtype],
            buffer_count=self.buffer_count,
            buffer_size=self.buffer_size,
            max_in_cpu=self.max_in_cpu,
            gradient_itemsize=_ITEMSIZES[self.gradient_dtype],
            accumulates=self.passes > 1,
            streamed_states=streamed * (stock.MASTER_BYTES + 2 * _ITEMSIZES[self.options.states]),
            swaps_states=self.swaps_states,
        )


def read_configuration(path: Path, *, ranks: int, dtype: str | None, passes: int) -> Configuration:
    """Read a file; `dtype` ("bfloat16", "float16", "float32") and `passes` take the place of "auto".

    Raises DataError, naming the file and the option, where DeepSpeed refuses it, or offloads without memascend.
    """
    return _Reader(path).configuration(ranks, dtype, passes)


class _Reader:
    """Takes values out of one file, and names it in errors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        if not path.is_file():
            raise DataError(f"--deepspeed {path} is not a file: give the JSON file of DeepSpeed's configuration")
        try:
            self.whole = read_json(path)
        except CheckpointError as error:
            raise DataError(f"--deepspeed {error}") from None
        if not isinstance(self.whole, dict):
            raise self.wrong("it does not hold a JSON object")

    def wrong(self, what: str) -> DataError:
        return DataError(f"--deepspeed {self.path}: {what}")

    def section(self, *names: str) -> dict[str, Any]:
        """Return a section, empty where it is left out."""
        found = self.whole
        for name in names:
            found = found.get(name) or {}
            if not isinstance(found, dict):
                raise self.wrong(f"{'.'.join(names)} is not an object")
        return found

    def number(self, section: Sequence[str], name: str, default: int) -> int:
        """Return a whole number; DeepSpeed takes 1e8 for one too."""
        value = self.section(*section).get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value % 1:
            why = ", and memascend has no option in its place" if value == AUTO else ""
            raise self.wrong(f"{'.'.join([*section, name])} is {value!r}{why}: write a whole number")
        return int(value)

    def configuration(self, ranks: int, dtype: str | None, passes: int) -> Configuration:
        swaps_params, swaps_states = self.check_offload()
        chosen = self.dtype(dtype)
        named = self.section("data_types").get("grad_accum_dtype") or chosen
        if named not in _ITEMSIZES:
            raise self.wrong(f"data_types.grad_accum_dtype is {named!r}: write bf16, fp16 or fp32")
        try:
            options = Options.of(self.whole)
        except ValueError as error:
            raise self.wrong(str(error)) from None
        offload = ("zero_optimization", "offload_param")
        return Configuration(
            source=self.path,
            dtype=chosen,
            gradient_dtype=named,
            passes=self.passes(ranks, passes),
            sub_group_size=self.number(("zero_optimization",), "sub_group_size", stock.SUB_GROUP_ELEMENTS),
            buffer_count=self.number(offload, "buffer_count", stock.PARAMETER_BUFFERS) if swaps_params else 0,
            buffer_size=self.number(offload, "buffer_size", stock.PARAMETER_BUFFER_ELEMENTS) if swaps_params else 0,
            max_in_cpu=self.number(offload, "max_in_cpu", MAX_IN_CPU) if swaps_params else ALL_IN_CPU,
            swaps_states=swaps_states,
            swappable_bytes=max(stock.SWAPPABLE_BYTES, self.number(("aio",), "block_size", 0)),
            options=options,
            notes=self.notes,
        )

    def check_offload(self) -> tuple[bool, bool]:
        """Return whether weights, and whether optimizer states, are on NVMe, where memascend takes care of them."""
        zero = self.section("zero_optimization")
        stage = zero.get("stage", 0)
        if stage != 3:
            raise self.wrong(f"zero_optimization.stage is {stage!r}, but only stage 3 offloads to NVMe: {_REMEDY}")
        devices = []
        for part in ("offload_param", "offload_optimizer"):
            device = self.section("zero_optimization", part).get("device", "none")
            if device not in ("none", "cpu", "nvme"):
                raise self.wrong(f"zero_optimization.{part}.device is {device!r}: write none, cpu or nvme")
            devices.append(device)
        if "nvme" not in devices:
            raise self.wrong(f"it offloads nothing to NVMe, so memascend has no host memory to save: {_REMEDY}")
        if devices[1] == "none":
            raise self.wrong(f"it offloads weights alone, which memascend leaves to DeepSpeed: {_REMEDY}")
        optimizer = self.section("zero_optimization", "offload_optimizer")
        theirs = {
            "zero_optimization.zenflow": zero.get("zenflow"),
            "zero_optimization.offload_optimizer.super_offload": optimizer.get("super_offload"),
            "aio.use_gds": self.section("aio").get("use_gds"),
            "optimizer.type Muon": str(self.section("optimizer").get("type", "")).lower() == "muon",
        }
        kept = [name for name, used in theirs.items() if used]
        if kept:
            raise self.wrong(f"with {' and '.join(kept)} DeepSpeed's own step is used, which memascend cannot plan")
        return devices[0] == "nvme", devices[1] == "nvme"

    def dtype(self, given: str | None) -> str:
        """Return the dtype of the weights."""
        values = {
            "bfloat16": (self.section("bf16") or self.section("bfloat16")).get("enabled", False),
            "float16": self.section("fp16").get("enabled", False),
        }
        for name, value in values.items():
            if value not in (True, False, AUTO):
                raise self.wrong(f'"enabled" of {name} is {value!r}: write true, false or "auto"')
        enabled = [name for name, value in values.items() if value is True]
        if len(enabled) == 2:
            raise self.wrong("bf16 and fp16 are both enabled, which DeepSpeed refuses: enable one of them")
        if enabled or AUTO not in values.values():
            found = enabled[0] if enabled else "float32"
            if given not in (None, found):
                raise self.wrong(f"it trains in {found}, not in {given}: leave --dtype out, or change bf16 or fp16")
            return found
        found = given or next(name for name, value in values.items() if value == AUTO)
        why = "by --dtype" if given else "--dtype takes another"
        self.notes.append(f'the dtype is left to the Trainer or Accelerate ("auto"): planned for {found} ({why})')
        return found

    def passes(self, ranks: int, given: int) -> int:
        """Return the number of backward passes of a step, as DeepSpeed derives it."""
        names = ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")
        values = {name: self.whole.get(name) for name in names}
        if values[names[0]] == AUTO or (values[names[0]] is None and AUTO in values.values()):
            self.notes.append(f'{names[0]} is left to the Trainer or Accelerate ("auto"): planned for {given}')
            return given
        stated = [None if value in (None, AUTO) else self.number((), name, 1) for name, value in values.items()]
        passes, batch, micro = stated
        if batch is not None and micro is not None:
            each = micro * ranks * (passes or 1)
            if not each or not batch or batch % each or (passes is not None and batch != each):
                raise self.wrong(
                    f"train_batch_size {batch} is not {names[2]} {micro} x {names[0]} {passes or '?'} x {ranks} ranks, "
                    "which DeepSpeed refuses: give --ranks, or change one of them"
                )
            passes = batch // (micro * ranks)
        found = passes or 1
        if given not in (1, found):
            raise self.wrong(f"a step has {found} backward passes, not {given}: leave --grad-accum out")
        return found
