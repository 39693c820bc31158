"""What the `quantization_config` of a checkpoint may say: for each method its fields, and the values that are read.

A field that is not known and is set is an error, for it may change what is computed; each error names the field, its
value and what is supported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from .errors import UnsupportedQuantizationError

Config = Mapping[str, Any]
"""A checkpoint's `quantization_config`."""


def _one_of(config: Config, name: str, allowed: Iterable[object], where: str = "") -> Any:
    """The field's value, which must be one of `allowed`; where it is absent, the first of them."""
    values = tuple(allowed)
    value = config.get(name, values[0])
    if value not in values:
        known = ", ".join(map(repr, values))
        raise UnsupportedQuantizationError(f"quantization_config.{where}{name} is {value!r}; supported: {known}")
    return value


def _refuse_unknown(config: Config, known: Collection[str], where: str = "") -> None:
    for name, value in config.items():
        if name not in known and value not in (None, False, "", {}, []):
            raise UnsupportedQuantizationError(
                f"quantization_config.{where}{name} = {value!r} is not understood and may change what is computed"
            )


_GPTQ: Final = frozenset(
    {
        *(
            "quant_method",
            "bits",
            "group_size",
            "desc_act",
            "sym",
            "checkpoint_format",
            "damp_percent",
            "static_groups",
        ),
        *(
            "true_sequential",
            "model_name_or_path",
            "model_file_base_name",
            "meta",
            "pack_dtype",
            "dataset",
            "tokenizer",
        ),
        *("use_exllama", "exllama_config", "use_cuda_fp16", "model_seqlen", "block_name_to_quantize", "backend"),
        *("module_name_preceding_first_block", "batch_size", "pad_token_id", "disable_exllama", "max_input_length"),
        *("cache_block_outputs", "modules_in_block_to_quantize", "lm_head", "damp_auto_increment", "is_marlin_format"),
        *("quantizer", "mse", "act_group_aware", "method", "format"),
    }
)
_AWQ: Final = frozenset(
    {
        *("quant_method", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "backend", "do_fuse"),
        *("modules_to_not_convert", "exllama_config", "fuse_max_seq_len", "modules_to_fuse"),
    }
)
_FP8: Final = frozenset(
    {
        *("quant_method", "activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers", "fmt"),
        *("scale_fmt", "dequantize"),
    }
)
_COMPRESSED: Final = frozenset(
    {
        *("quant_method", "format", "config_groups", "ignore", "quantization_status", "global_compression_ratio"),
        *("version", "sparsity_config", "kv_cache_scheme", "transform_config"),
    }
)
_GROUP: Final = frozenset({"targets", "weights", "input_activations", "output_activations", "format"})
_WEIGHTS: Final = frozenset(
    {
        *("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "actorder"),
        *("observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
    }
)
_FORMATS: Final = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense"),
)
_BITSANDBYTES: Final = (
    *("quant_method", "load_in_8bit", "_load_in_8bit", "load_in_4bit", "_load_in_4bit", "llm_int8_threshold"),
    *("llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight"),
    *("bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
)


def gptq_bits(config: Config) -> int:
    """The width of a code, 4 or 8; raises `UnsupportedQuantizationError` for what is not read."""
    _refuse_unknown(config, _GPTQ)
    for name in ("bits", "group_size"):
        if not isinstance(config.get(name), int):
            raise UnsupportedQuantizationError(f"quantization_config.{name} is {config.get(name)!r}, not a number")
    _one_of(config, "checkpoint_format", ("gptq", "gptq_v2"))
    _one_of(config, "format", ("gptq", "gptq_v2"))
    _one_of(config, "pack_dtype", ("int32", None))
    _one_of(config, "is_marlin_format", (False, None))
    return int(_one_of(config, "bits", (4, 8)))


def check_awq(config: Config) -> None:
    """Raises `UnsupportedQuantizationError` for what is not read."""
    _refuse_unknown(config, _AWQ)
    _one_of(config, "bits", (4,))
    _one_of(config, "w_bit", (4,))
    _one_of(config, "zero_point", (True,))
    version = config.get("version", "gemm")
    if str(version).lower() != "gemm":
        raise UnsupportedQuantizationError(f"quantization_config.version is {version!r}; supported: 'gemm'")


def check_fp8(config: Config) -> None:
    """Raises `UnsupportedQuantizationError` for what is not read."""
    _refuse_unknown(config, _FP8)
    _one_of(config, "activation_scheme", ("dynamic", "static"))
    _one_of(config, "fmt", ("e4m3", None))
    _one_of(config, "weight_block_size", (None, [128, 128], (128, 128)))


def check_compressed(config: Config) -> None:
    """Raises `UnsupportedQuantizationError` for what is not read. Which group of layers a tensor belongs to is of no
    matter: the tensors themselves tell their widths, groups and zero points."""
    _refuse_unknown(config, _COMPRESSED)
    _one_of(config, "format", _FORMATS)
    _one_of(config, "quantization_status", ("compressed", "frozen"))
    _one_of(config, "kv_cache_scheme", (None,))
    _one_of(config, "transform_config", (None, {}))
    _one_of(config.get("sparsity_config") or {}, "format", ("dense",), "sparsity_config.")
    for name, group in (config.get("config_groups") or {}).items():
        at = f"config_groups.{name}."
        _refuse_unknown(group, _GROUP, at)
        _one_of(group, "format", (None, *_FORMATS), at)
        weights = group.get("weights") or {}
        at += "weights."
        _refuse_unknown(weights, _WEIGHTS, at)
        kind = _one_of(weights, "type", ("int", "float"), at)
        _one_of(weights, "num_bits", (8,) if kind == "float" else (8, 4), at)
        _one_of(weights, "strategy", ("tensor", "channel", "group", "block"), at)
        _one_of(weights, "block_structure", (None, [128, 128]), at)
        _one_of(weights, "dynamic", (False,), at)
        _one_of(weights, "actorder", (None, "group", "weight", "static", "dynamic"), at)


def check_bitsandbytes(config: Config) -> None:
    """Raises `UnsupportedQuantizationError` for what is not read: 8 bits are."""
    _refuse_unknown(config, _BITSANDBYTES)
    _one_of(config, "load_in_4bit", (False,))
    _one_of(config, "load_in_8bit", (True,))
