"""Small models in the published forms of quantised weights, and their values by their own libraries in memory."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import requirements
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    GptOssConfig,
    LlamaConfig,
    Mxfp4Config,
    Qwen3MoeConfig,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

WEIGHTS = "model.safetensors"
_SMALL: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
_EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}


def llama(**sizes: int) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**_SMALL | sizes), dtype=torch.bfloat16)


def moe() -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**_SMALL, **_EXPERTS), dtype=torch.bfloat16)


def gpt_oss(**changed: int) -> nn.Module:
    torch.manual_seed(0)
    sizes = _SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96} | changed
    layers = ["sliding_attention", "full_attention"] * (sizes["num_hidden_layers"] // 2)
    config = GptOssConfig(**sizes, layer_types=layers)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def rewritten(model: nn.Module, directory: Path, described: dict[str, Any], pack: Callable[..., Any]) -> Path:
    """Save a model, replace its matrices by `pack(name, value)`, and describe the form."""
    model.save_pretrained(directory)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in load_file(directory / WEIGHTS).items():
        is_linear = value.ndim == 2 and "embed" not in name and "lm_head" not in name and "mlp.gate." not in name
        tensors |= pack(name, value) if is_linear or value.ndim == 3 else {name: value}
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    config_file = directory / "config.json"
    config = json.loads(config_file.read_text()) | {"quantization_config": described}
    config_file.write_text(json.dumps(config))
    return directory


# ---- FP8 ------------------------------------------------------------------------------------------------------


def to_blocks(value: torch.Tensor, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix to FP8 as DeepSeek does: a scale for each block; the last ones may be smaller."""
    grid = torch.empty(-(-value.shape[0] // rows), -(-value.shape[1] // width))
    codes = torch.empty(value.shape, dtype=torch.float8_e4m3fn)
    for row in range(grid.shape[0]):
        for column in range(grid.shape[1]):
            block = slice(row * rows, (row + 1) * rows), slice(column * width, (column + 1) * width)
            scale = value[block].float().abs().max() / 448
            grid[row, column] = scale
            codes[block] = (value[block].float() / scale).to(torch.float8_e4m3fn)
    return codes, grid


def fp8(directory: Path, model: nn.Module, block: int = 64) -> Path:
    def pack(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        codes, grid = to_blocks(value, block, block)
        return {name: codes, f"{name}_scale_inv": grid}

    described = {
        "quant_method": "fp8",
        "weight_block_size": [block, block],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head"],
    }
    return rewritten(model, directory, described, pack)


def mxfp4(directory: Path, powers: tuple[int, int] = (118, 123), **sizes: int) -> Path:
    """Write gpt-oss with random numbers, whose scales are of the bytes `powers[0] .. powers[1]`."""
    generator = torch.Generator().manual_seed(1)

    def pack(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        if value.ndim == 2:
            return {name: value}
        experts, width, rows = value.shape  # the model's is the transpose of the stored one
        blocks = torch.randint(0, 256, (experts, rows, width // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(*powers, (experts, rows, width // 32), generator=generator, dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    described = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    return rewritten(gpt_oss(**sizes), directory, described, pack)


# ---- bitsandbytes ---------------------------------------------------------------------------------------------


def bitsandbytes(directory: Path, **options: Any) -> Path:
    """Let transformers quantise a model with bitsandbytes, and save it."""
    from transformers import BitsAndBytesConfig

    plain = directory.with_name(f"{directory.name}-16")
    llama().save_pretrained(plain)
    config = BitsAndBytesConfig(**options)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16, quantization_config=config)
    model.save_pretrained(directory)
    return directory


# ---- compressed-tensors ---------------------------------------------------------------------------------------


def compressed(directory: Path, form: str, model: nn.Module | None = None, **weights: Any) -> Path:
    """Let compressed-tensors compress a model's matrices; `weights` are of its `QuantizationArgs`."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    compressor = BaseCompressor.get_value_from_registry(form)

    def pack(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {"weight": value}
        groups = value
        if args.strategy == "tensor":
            low, high = value.min().view(1), value.max().view(1)
        elif args.strategy == "block":
            rows, width = args.block_structure
            padded = torch.nn.functional.pad(value, (0, -value.shape[1] % width, 0, -value.shape[0] % rows))
            groups = padded.unflatten(1, (-1, width)).unflatten(0, (-1, rows))
            low, high = groups.amin((1, 3)), groups.amax((1, 3))
        else:
            groups = value.unflatten(1, (-1, args.group_size or value.shape[1]))
            low, high = groups.amin(-1), groups.amax(-1)
        options = {}
        if form.startswith("nvfp4"):
            options["global_scale"] = state["weight_global_scale"] = 6 * 448 / value.abs().max().float().view(1)
        state["weight_scale"], zero = calculate_qparams(low, high, args, **options)
        if not args.symmetric:
            state["weight_zero_point"] = zero
        module = name.removesuffix(".weight")
        return {f"{module}.{part}": tensor for part, tensor in compressor.compress(state, scheme).items()}

    group = {"targets": ["Linear"], "weights": args.model_dump(mode="json"), "format": form}
    described = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    return rewritten(model or llama(), directory, described, pack)


# ---- AWQ and GPTQ ---------------------------------------------------------------------------------------------

#: Where AWQ puts the columns of a word.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _words(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack numbers along the last dimension into words of 32 bits, the first one lowest."""
    count = 32 // bits
    grouped = numbers.long().unflatten(-1, (-1, count))[..., list(order or range(count))]
    words = (grouped << (torch.arange(count) * bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _numbers(value: torch.Tensor, bits: int, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise a matrix (out, in); returns numbers (in, out), zeros and scales (groups, out) of the groups `order`."""
    of_rows = value.t().float()
    groups = [of_rows[order == group] for group in range(int(order.max()) + 1)]
    low, high = (torch.stack([getattr(group, name)(0) for group in groups]) for name in ("amin", "amax"))
    scales = ((high - low) / ((1 << bits) - 1)).half()
    zeros = (-low / scales.float()).round().clamp(1, (1 << bits) - 1)
    numbers = (of_rows / scales.float()[order] + zeros[order]).round().clamp(0, (1 << bits) - 1)
    return numbers.int(), zeros.int(), scales


def awq(directory: Path, wanted: dict[str, torch.Tensor]) -> Path:
    """Pack a model as autoawq does; `wanted` gets the result of its `dequantize_gemm`."""

    def pack(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        order = torch.arange(value.shape[1]) // 32
        numbers, zeros, scales = _numbers(value, 4, order)
        wanted[name] = ((numbers - zeros[order]) * scales[order]).t().bfloat16()
        module = name.removesuffix(".weight")
        return {
            f"{module}.qweight": _words(numbers, 4, _AWQ_ORDER),
            f"{module}.qzeros": _words(zeros, 4, _AWQ_ORDER),
            f"{module}.scales": scales,
        }

    described = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    return rewritten(llama(), directory, described, pack)


def gptq(
    directory: Path, wanted: dict[str, torch.Tensor], bits: int = 4, packing: str = "gptq", in_order: bool = False
) -> Path:
    """Pack a model as gptqmodel does; `wanted` gets the result of its kernel.

    Columns are ordered by activations unless they are `in_order`.
    """
    generator = torch.Generator().manual_seed(2)

    def pack(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        order = torch.arange(value.shape[1]) // 32
        if not in_order:
            order = order[torch.randperm(len(order), generator=generator)]
        numbers, zeros, scales = _numbers(value, bits, order)
        wanted[name] = (scales[order] * (numbers - zeros[order])).t().bfloat16()
        module = name.removesuffix(".weight")
        return {
            f"{module}.qweight": _words(numbers.t(), bits).t(),
            f"{module}.qzeros": _words(zeros - int(packing == "gptq"), bits),
            f"{module}.scales": scales,
            f"{module}.g_idx": order.int(),
        }

    described = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": 32,
        "desc_act": not in_order,
        "checkpoint_format": packing,
    }
    return rewritten(llama(), directory, described, pack)


# ---- all of them ----------------------------------------------------------------------------------------------


def dequantised_by_transformers(directory: Path, config: Any = None) -> nn.Module:
    """Load a directory with transformers and dequantise it in memory: as `config` asks for, or afterwards."""
    options = {} if config is None else {"quantization_config": config}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, loading = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, output_loading_info=True, **options
        )
    assert not any(loading.values()), loading
    if config is None:
        model.dequantize(torch.bfloat16)
    return model.train()


_INTEGERS: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "channel"}
_FLOATS: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
_FOUR: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
#: Formats of compressed-tensors, with its options for weights.
COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8-rows": ("float-quantized", _FLOATS | {"strategy": "channel"}),
    "fp8-whole": ("float-quantized", _FLOATS | {"strategy": "tensor"}),
    "fp8-blocks": ("float-quantized", _FLOATS | {"strategy": "block", "block_structure": [48, 80]}),
    "int8": ("int-quantized", _INTEGERS | {"symmetric": True}),
    "int8-zeros": ("naive-quantized", _INTEGERS | {"symmetric": False}),
    "int2": ("pack-quantized", _FOUR | {"num_bits": 2, "symmetric": True}),
    "int4": ("pack-quantized", _FOUR | {"symmetric": True}),
    "int4-zeros": ("pack-quantized", _FOUR | {"symmetric": False}),
    "packed-int8": ("pack-quantized", _INTEGERS | {"symmetric": False}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        _FLOATS | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        _FLOATS | {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
    ),
}
BITSANDBYTES: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4-stored-as-bfloat16": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": torch.bfloat16,
    },
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
#: Forms that a library need not be installed for.
BY_THEMSELVES = ("fp8", "fp8-experts", "mxfp4", "mxfp4-all-powers", "awq", "gptq-4", "gptq-8", "gptq-2")
#: Every form that `made` writes.
FORMS = (
    *BY_THEMSELVES,
    *(f"bitsandbytes:{name}" for name in BITSANDBYTES),
    *(f"compressed:{name}" for name in COMPRESSED),
)


def made(kind: str, directory: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a small model in a form; returns its directory, and all its weights as the form's library has them."""
    wanted: dict[str, torch.Tensor] = {}
    if kind.startswith("fp8"):
        fp8(directory, moe() if kind == "fp8-experts" else llama())
        model = dequantised_by_transformers(directory, FineGrainedFP8Config(dequantize=True))
    elif kind.startswith("mxfp4"):
        powers = (0, 255) if kind == "mxfp4-all-powers" else (118, 123)
        model = dequantised_by_transformers(mxfp4(directory, powers), Mxfp4Config(dequantize=True))
    elif kind.startswith("bitsandbytes:"):
        requirements.package("bitsandbytes")
        bitsandbytes(directory, **BITSANDBYTES[kind.partition(":")[2]])
        model = dequantised_by_transformers(directory)
    elif kind.startswith("compressed:"):
        requirements.package("compressed_tensors")
        from transformers import CompressedTensorsConfig

        form, weights = COMPRESSED[kind.partition(":")[2]]
        compressed(directory, form, **weights)
        model = dequantised_by_transformers(directory, CompressedTensorsConfig(dequantize=True))
    else:
        bits, in_order = 4 if kind == "awq" else int(kind.split("-")[1]), kind.endswith("in-order")
        packing = "gptq_v2" if bits == 8 else "gptq"
        awq(directory, wanted) if kind == "awq" else gptq(directory, wanted, bits, packing, in_order)
        model = llama()
        for name, value in wanted.items():
            model.get_parameter(name).data.copy_(value)
    return directory, dict(model.named_parameters())


def without_weights(directory: Path) -> nn.Module:
    """Build the model that a directory's configuration describes, in 16 bits and with other weights."""
    config = AutoConfig.from_pretrained(directory)
    del config.quantization_config
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
