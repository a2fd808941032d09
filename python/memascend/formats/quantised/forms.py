"""The forms that quantised weights are published in: which one a model directory has, and whether it can be read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memascend.errors import CheckpointError, first_line
from memascend.formats.json_files import read_json

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Form:
    """A form of quantised weights."""

    #: As messages name it: "FP8 with block scales".
    name: str
    #: How the configuration names it: "quant_method 'fp8'".
    named: str
    #: The kind of `READERS` that knows its tensors; None where memascend does not read it.
    kind: str | None = None
    #: Its section of the configuration.
    described: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        """Return its name and how it was recognised."""
        return f"{self.name} ({self.named})"


#: Methods of transformers' `quantization_config` that are not read: how messages name them.
NOT_READ = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "bitnet": "BitNet",
    "eetq": "EETQ",
    "fbgemm_fp8": "FBGEMM's FP8",
    "fouroversix": "Four over Six",
    "fp_quant": "FP-Quant",
    "gemma": "Gemma's own quantisation",
    "gguf": "GGUF",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "metal": "Metal's affine quantisation",
    "modelopt": "ModelOpt's forms",
    "nvfp4": "NVFP4",
    "quanto": "Quanto",
    "quark": "Quark",
    "sinq": "SINQ",
    "spqr": "SpQR",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
#: Formats of compressed-tensors that are read: how messages name them.
COMPRESSED = {
    "float-quantized": "FP8",
    "int-quantized": "int8",
    "naive-quantized": "FP8 or int8",
    "pack-quantized": "packed integers",
    "nvfp4-pack-quantized": "NVFP4",
    "mxfp4-pack-quantized": "MXFP4",
}
#: Files beside config.json with which older tools describe the form, and the method where the file names none.
DESCRIPTIONS = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
#: Ends of names that only the tensors of a form have: the form, for a directory that describes none.
_ENDS = (
    (r"\.weight\.quant_state\.bitsandbytes__(nf4|fp4)$", "bitsandbytes 4-bit"),
    (r"\.SCB$", "bitsandbytes int8"),
    (r"\.weight_scale_inv$", "FP8"),
    (r"_blocks$", "MXFP4"),
    (r"\.weight_packed$", "compressed-tensors"),
    (r"\.qweight$", "AWQ or GPTQ"),
)
#: Remedies for forms that are not read.
_INSTEAD = (
    "use the model's checkpoint in 16 bits, or have the library that reads this form write one (in transformers, "
    "model.dequantize() and save_pretrained, where the form has it)"
)


def form_of(path: Path) -> Form | None:
    """Return the form of a model's weights; None where they are not quantised.

    `path` is the model's directory, or a configuration by itself. Raises CheckpointError where the file that names
    their form cannot be read.
    """
    directory = path if path.is_dir() else path.parent
    config_file = directory / "config.json" if path.is_dir() else path
    config = read_json(config_file) if config_file.is_file() else {}
    described = description_in(config)
    if described is not None:
        return _understood(described, config_file)
    for name, method in DESCRIPTIONS.items():
        if path.is_dir() and (directory / name).is_file():
            described = read_json(directory / name)
            if isinstance(described, dict):
                return _understood({"quant_method": method} | described, directory / name)
    return None


def _understood(described: Mapping[str, Any], file: Path) -> Form:
    try:
        return form_described(described)
    except (TypeError, ValueError, AttributeError) as error:  # a value of another kind
        raise CheckpointError(f"{file} does not describe quantised weights: {first_line(error)}") from error


def description_in(config: Any) -> Mapping[str, Any] | None:
    """Return the quantisation section of a configuration (as JSON), of the model or of its text part, or None."""
    if not isinstance(config, dict):
        return None
    for part in (config, config.get("text_config")):
        for name in ("quantization_config", "compression_config"):
            if isinstance(part, dict) and isinstance(part.get(name), dict):
                described = dict(part[name])
                if name == "compression_config":
                    described.setdefault("quant_method", "compressed-tensors")
                return described
    return None


def form_described(described: Mapping[str, Any]) -> Form:
    """Return the form that a `quantization_config` describes."""
    method = described.get("quant_method")
    if described.get("load_in_4bit") or described.get("load_in_8bit"):
        method = "bitsandbytes"
    named = f"quant_method {method!r}"
    make = _READ.get(str(method))
    if make is not None:
        return make(named, described)
    return Form(NOT_READ.get(str(method), "a quantised form"), named)


def _fp8(named: str, described: Mapping[str, Any]) -> Form:
    blocks = described.get("weight_block_size")
    name = f"FP8 with a scale for blocks of {'x'.join(map(str, blocks))}" if blocks else "FP8 with a scale per tensor"
    return Form(name, named, "fp8", described)


def _mxfp8(named: str, described: Mapping[str, Any]) -> Form:
    return Form("MXFP8", named, "fp8", described)


def _mxfp4(named: str, described: Mapping[str, Any]) -> Form:
    return Form("MXFP4", named, "mxfp4", described)


def _bitsandbytes(named: str, described: Mapping[str, Any]) -> Form:
    kind = str(described.get("bnb_4bit_quant_type", "fp4")).upper() if described.get("load_in_4bit") else "int8"
    return Form(f"bitsandbytes {kind}", named, "bitsandbytes", described)


def _compressed(named: str, described: Mapping[str, Any]) -> Form:
    groups = described.get("config_groups")
    formats = {str(described.get("format"))}
    if isinstance(groups, dict):
        own = {group.get("format") for group in groups.values() if isinstance(group, dict)} - {None}
        formats = {str(name) for name in own} or formats
    listed = ", ".join(COMPRESSED.get(name, name) for name in sorted(formats))
    name = f"compressed-tensors' {listed}"
    sparsity = described.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        return Form(f"{name} with sparsity", named)
    if described.get("transform_config"):
        return Form(f"{name} with rotated weights", named)
    return Form(name, named, "compressed-tensors" if formats <= COMPRESSED.keys() else None, described)


def _awq(named: str, described: Mapping[str, Any]) -> Form:
    bits = described.get("bits", described.get("w_bit", 4))
    version = str(described.get("version", described.get("format", "gemm"))).lower()
    name = f"AWQ in {bits} bits, {version.upper()}"
    return Form(name, named, "awq" if (bits, version) == (4, "gemm") else None, described)


def _gptq(named: str, described: Mapping[str, Any]) -> Form:
    bits = described.get("bits", 4)
    packing = str(described.get("checkpoint_format", "gptq")).lower()
    name = f"GPTQ in {bits} bits" + ("" if packing == "gptq" else f", {packing}")
    is_read = bits in (2, 4, 8) and packing in ("gptq", "gptq_v2")
    return Form(name, named, "gptq" if is_read else None, described)


#: Methods that are read -> the function that makes the form from the configuration.
_READ = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
    "mxfp8": _mxfp8,
}


def form_of_names(names: Collection[str]) -> str | None:
    """Return the form that only names of tensors show, for a directory whose configuration describes none."""
    return next((name for end, name in _ENDS if any(re.search(end, tensor) for tensor in names)), None)


def check_form(form: Form | None, named: Path, dequantize: bool) -> None:
    """Raise CheckpointError for the weights of the directory `named`, unless they can be trained.

    Weights of a form that is read pass where `dequantize` is true.
    """
    if form is None:
        return
    if form.kind is None:
        raise CheckpointError(f"{named} holds weights in {form}, which memascend does not read: {_INSTEAD}")
    if not dequantize:
        raise CheckpointError(
            f"{named} holds weights in {form}, which cannot be trained as they are: give dequantize=True "
            "(--dequantize), which reads them into the store in 16 bits, a piece at a time"
        )
