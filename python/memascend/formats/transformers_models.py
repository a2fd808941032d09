"""Models of transformers without their weights, and how their checkpoints map to their parameters.

The only file that uses private names of transformers, except `layout.experts`, which uses names of fused experts:
`conversion_mapping`, `core_model_loading`, and attributes of models that begin with an underscore. It needs
transformers 5.20 or newer and is tested with 5.23. Where a later version lacks a module or a function, opening a model
raises the ImportError that names it; attributes of models are optional.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memascend.errors import CheckpointError, first_line
from memascend.formats.field_kinds import GENERATION, check_fields
from memascend.formats.json_files import read_json
from memascend.formats.untouched import UntouchedZeros

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator


#: Models in transformers' mapping of causal ones, beside decoders of encoder-decoders, that compare each position's
#: logits with the label there, not with the next one.
_LABELS_NOT_SHIFTED = ("cpmant", "musicgen", "musicgen_melody", "trocr", "whisper", "xlm", "xlnet")

#: Layers that no model has: making them would take hours.
LAYERS_MAX = 10_000


def load_any_config(directory: Path) -> Any:
    """Return the configuration of a model directory of any task.

    Raises CheckpointError where there is none that transformers can use.
    """
    try:
        import transformers  # noqa: F401 (asked for by name below)
    except ImportError as error:
        raise CheckpointError("model directories need transformers: pip install 'memascend[hf]'") from error
    if not directory.is_dir():
        raise CheckpointError(f"model directory {directory} does not exist")
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} has no config.json: it is not a Hugging Face model directory")
    return read_config(directory / "config.json", named=directory)


def read_config(config_file: Path, named: Path) -> Any:
    """Return the transformers configuration in `config_file`, or in the directory `named` that holds it.

    It says nothing of quantisation: `memascend.formats.quantised` reads that from the file.

    Raises CheckpointError where transformers cannot use it, or only with code that lies beside it.
    """
    from transformers import AutoConfig

    described = read_json(config_file)
    model_type = described.get("model_type") if isinstance(described, dict) else None
    try:
        config = AutoConfig.from_pretrained(named, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a configuration it does not know
        raise CheckpointError(
            explained_code(error, config_file)
            or f"{config_file}: transformers cannot use it (model_type {model_type!r}): {first_line(error)}"
        ) from error
    if isinstance(text := config.get_text_config(), dict):
        raise CheckpointError(f"{config_file}: a {model_type} model has no text_config: remove it from the file")
    for part in {id(part): part for part in (config, text)}.values():
        layers = getattr(part, "num_hidden_layers", None)
        if isinstance(layers, int) and layers > LAYERS_MAX:
            raise CheckpointError(
                f"{config_file}: num_hidden_layers is {layers:,}, and no model has more than {LAYERS_MAX:,} layers: "
                "correct the file"
            )
        for name in ("quantization_config", "compression_config"):
            if name in vars(part):
                delattr(part, name)
    return config


def explained_code(error: Exception, source: Path | str) -> str | None:
    """Return a message for an error of transformers that says that `source` needs code of its own; or None."""
    if "trust_remote_code" not in str(error):
        return None
    return (
        f"{source} needs Python code that comes with the model (auto_map), and memascend runs none: use a model that "
        "transformers itself has, or make yours with its own code and give it to memascend.offload"
    )


def is_causal(config: Any) -> bool:
    """Return whether transformers has a causal language model for a configuration."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return not config.is_encoder_decoder and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


def why_not_trained_causally(config: Any) -> str | None:
    """Return why `model(input_ids, labels=input_ids).loss` is not the loss of a next token that was not seen, or None.

    The class that a directory names may be of another task. Encoders have a class in the mapping of causal models too,
    whose attention looks ahead unless the configuration says is_decoder; and the decoders of encoder-decoders expect
    labels that were shifted already. tests/cli/test_causal.py compares this with the attention of the models.
    """
    import transformers
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    )

    kind, named = type(config), config.architectures or []
    architecture = next((name for name in named if hasattr(transformers, name)), None)
    causal: set[str] = set()
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        classes = mapping.get(kind, ())
        causal |= {cls.__name__ for cls in (classes if isinstance(classes, tuple) else (classes,))}
    if architecture is not None and architecture not in causal:
        return f"a {architecture}, which is no causal language model"
    what = architecture or f"{config.model_type} model"
    if config.model_type in _LABELS_NOT_SHIFTED or kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        return f"a {what}, whose loss expects labels that were shifted before"
    encoder = kind in MODEL_FOR_MASKED_LM_MAPPING or config.model_type == "bert-generation"
    if encoder and not getattr(config, "is_decoder", False):
        return f"a {what} with is_decoder=false, whose attention sees the tokens that it is to predict"
    text = config.get_text_config()
    bidirectional = getattr(text, "use_bidirectional_attention", None)
    if bidirectional in (True, "all") or not getattr(text, "is_causal", True):
        return f"a {what} with bidirectional attention, which sees the tokens that it is to predict"
    return None


def load_generation_config(model: nn.Module, directory: Path) -> None:
    """Give the model the generation options of its directory, if there are any."""
    file = directory / "generation_config.json"
    if file.is_file():
        from transformers import GenerationConfig

        check_fields(read_json(file), file, GENERATION)
        try:
            options: Any = GenerationConfig.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # it checks the options against one another too
            raise CheckpointError(f"{file}: transformers cannot use it: {first_line(error)}") from error
        model.generation_config = options


def empty_model(config: Any, directory: Path | str, dtype: torch.dtype) -> nn.Module:
    """Build the model with its parameters on the meta device and its buffers real.

    Raises CheckpointError where transformers cannot make one.
    """
    try:
        with _parameters_on_meta(), UntouchedZeros():
            model = _builder_of(config)(config, dtype=dtype)
            model.tie_weights()
    except ValueError as error:
        raise CheckpointError(explained_code(error, directory) or f"{directory}: {first_line(error)}") from None
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # a value of another kind, or one that contradicts another, ends in any class
        raise CheckpointError(
            f"{directory}: transformers cannot make a model of this configuration: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error
    float32_modules = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:  # bfloat16 has the range for these
        float32_modules |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters():
        if any(re.search(rf"(^|\.){re.escape(part)}(\.|$)", name) for part in float32_modules):
            parameter.data = parameter.data.to(torch.float32)
    model.train()
    return model


def _builder_of(config: Any) -> Any:
    """Return what makes the model that a configuration names, or a causal one."""
    import transformers

    names = getattr(config, "architectures", None) or []
    cls = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    build = getattr(cls, "_from_config", None)
    return build or partial(transformers.AutoModelForCausalLM.from_config, trust_remote_code=False)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move every parameter to the meta device as it is registered, before its memory is touched."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def config_of_record(source: dict[str, Any]) -> Any:
    """Return the configuration of a run's model; `source` comes from `memascend.durability.record.source_of`.

    Raises CheckpointError for a model that is not one of transformers'.
    """
    if source["kind"] != "transformers":
        raise CheckpointError(
            f"the run is of a {source['class']}, which a store cannot make: give the same module as model=..."
        )
    try:
        import transformers
    except ImportError as error:
        raise CheckpointError("models of transformers need it: pip install 'memascend[hf]'") from error
    values = dict(source["config"])
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    config.architectures = [source["class"]]
    return config


def model_of_record(source: dict[str, Any]) -> nn.Module:
    """Make the model of a run without weights, from its record as in `config_of_record`."""
    config = config_of_record(source)
    import transformers
    from transformers.conversion_mapping import get_model_conversion_mapping

    for name, implementation in source["implementations"].items():
        setattr(config, name, implementation)
    model: Any = empty_model(config, "the store", torch.float32)
    if source["generation_config"] is not None:
        model.generation_config = transformers.GenerationConfig.from_dict(source["generation_config"])
    if source["conversions"] is not None:
        conversions = get_model_conversion_mapping(model)
        model._weight_conversions = [conversions[index] for index in source["conversions"]]
    untie(model, source.get("untied", ()))
    return model


class Conversion:
    """Tensors of a checkpoint that transformers merges or splits into parameters (experts stacked into one, say)."""

    def __init__(self, model: Any, name: str, converter: Any) -> None:
        """Take one of transformers' `WeightConverter`s and the first parameter that it makes."""
        self._model, self._name, self._converter = model, name, converter
        #: (tensor of the checkpoint, the pattern that it matched).
        self.parts: list[tuple[str, str]] = []

    @property
    def targets(self) -> list[str]:
        """Names of the parameters that it makes."""
        patterns = self._converter.target_patterns
        return [self._name.replace(patterns[0], target) for target in patterns]

    def stacked(self) -> list[list[str]] | None:
        """Return the tensors of each of a parameter's matrices, one behind the other; None where it is not made so.

        So are most fused experts: expert by expert its tensors, each with rows of the matrix.
        """
        from transformers.core_model_loading import Concatenate, MergeModulelist

        operations = [(type(operation), getattr(operation, "dim", None)) for operation in self._converter.operations]
        if operations not in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
            return None
        of_pattern: dict[str, list[str]] = {pattern: [] for pattern in self._converter.source_patterns}
        for key, pattern in self.parts:
            of_pattern[pattern].append(key)
        columns = [keys for keys in of_pattern.values() if keys]
        if len(self.targets) != 1 or len({len(keys) for keys in columns}) != 1 or len(columns) > len(operations):
            return None
        return [list(keys) for keys in zip(*columns, strict=True)]

    def add_tensor(self, key: str, pattern: str, tensor: torch.Tensor) -> None:
        """Give it the tensor of one of `parts`."""
        self._converter.add_tensor(self._name, key, pattern, tensor)

    def convert(self) -> dict[str, torch.Tensor]:
        """Return the parameters that the added tensors make, by name."""
        made = self._converter.convert(self._name, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class Mapping:
    """Which tensors of a checkpoint make which parameters of a model: renamed, merged and split by transformers."""

    def __init__(self, model: Any, expected: Collection[str], keys: Iterable[str]) -> None:
        """Map the checkpoint tensors `keys` to the parameters and buffers `expected` of `model`."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        transforms = get_model_conversion_mapping(model)
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix = getattr(model, "base_model_prefix", None)
        #: Parameter name -> checkpoint tensor, for those that need no conversion.
        self.plain: dict[str, str] = {}
        #: First parameter that it makes -> conversion.
        self.conversions: dict[str, Conversion] = {}
        for key in keys:
            name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
            if name not in expected and key in expected:
                name, pattern = key, None
            if pattern is None:
                self.plain[name] = key
                continue
            if name not in self.conversions:
                self.conversions[name] = Conversion(model, name, deepcopy(by_pattern[pattern]))
            self.conversions[name].parts.append((key, pattern))
        #: Indices of the transforms that the checkpoint needed; saving undoes these.
        self.used = [index for index, transform in enumerate(transforms) if transform.was_used()]
        model._weight_conversions = [transforms[index] for index in self.used]


def revert_conversions(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Undo the conversions that made the model's parameters from the checkpoint's tensors."""
    if not hasattr(model, "config") or not hasattr(model, "save_pretrained"):
        return tensors
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def saves_adapters(model: nn.Module) -> bool:
    """Return whether the model's own `save_pretrained` saves its adapters, as PEFT's and transformers' models do."""
    return hasattr(model, "get_base_model") or bool(getattr(model, "_hf_peft_config_loaded", False))


def untie(model: Any, names: Iterable[str]) -> None:
    """Give the named parameters of an empty model values of their own, though the configuration ties them."""
    tied = getattr(model, "all_tied_weights_keys", {})
    for name in names:
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        parameter = getattr(module, attribute)
        setattr(module, attribute, nn.Parameter(torch.empty_like(parameter), requires_grad=parameter.requires_grad))
        tied.pop(name, None)


def tied_names(model: nn.Module) -> set[str]:
    """Return the names of parameters that transformers ties to others, and so leaves out of a checkpoint."""
    return set(getattr(model, "all_tied_weights_keys", None) or ())


def unsaved_names(model: nn.Module) -> set[str]:
    """Return the names of parameters and buffers that a model makes again when it is loaded."""
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())
