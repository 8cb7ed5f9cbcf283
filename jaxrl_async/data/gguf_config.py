"""The model configuration in a GGUF file as a Hugging Face config.json, and the layout of tensors
in llama.cpp.

Values that llama.cpp's converter does not write are taken from llama.cpp's defaults for the
architecture: Gemma's scale of scores, SmolLM3's layers without positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_async.data.gguf_file import OTHER_FILE, GgufFile, numbers_of
from jaxrl_async.errors import CheckpointError

EXTRA_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors whose values belong in config.json."""
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Rotary settings of all Llama 3.1 to 3.3 models. GGUF files contain only the resulting factors."""
WIDE_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the 27B models, whose scores are scaled by width / heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model family as written by llama.cpp's converter."""

    model_type: str
    more: Callable[[GgufFile], dict[str, Any]] = lambda file: {}
    """Fields of config.json in addition to the common ones."""
    pairs_neighbours: bool = False
    """Rows of a head's queries and keys are in the order 0, h/2, 1, h/2 + 1, ...: adjacent rows are
    rotated together."""
    offset_norms: bool = False
    """Norms hold 1 + weight."""


def _llama(file: GgufFile) -> dict[str, Any]:
    if not file.of_model("expert_count"):
        return {}
    return {
        "model_type": "mixtral",
        "num_local_experts": file.whole("expert_count"),
        "num_experts_per_tok": file.whole("expert_used_count"),
        "sliding_window": None,
    }


def _qwen2_moe(file: GgufFile) -> dict[str, Any]:
    shared = file.tensors["blk.0.ffn_up_shexp.weight"].shape[0]
    own = {"norm_topk_prob": False, "shared_expert_intermediate_size": shared}
    return {**_experts(file), **own}


def _qwen3_moe(file: GgufFile) -> dict[str, Any]:
    return {**_experts(file), "norm_topk_prob": True}


def _experts(file: GgufFile) -> dict[str, Any]:
    return {
        "num_experts": file.whole("expert_count"),
        "num_experts_per_tok": file.whole("expert_used_count"),
        "moe_intermediate_size": file.tensors["blk.0.ffn_up_exps.weight"].shape[1],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma2(file: GgufFile) -> dict[str, Any]:
    return {
        **_gemma(file),
        "attn_logit_softcapping": file.of_model("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.of_model("final_logit_softcapping", 30.0),
    }


def _gemma3(file: GgufFile) -> dict[str, Any]:
    return {
        **_gemma(file),
        "final_logit_softcapping": file.of_model("final_logit_softcapping"),
        "rope_local_base_freq": file.of_model("rope.freq_base_swa", 10_000.0),
        "sliding_window_pattern": 6,
    }


def _gemma(file: GgufFile) -> dict[str, Any]:
    layers, width = file.whole("block_count"), file.whole("embedding_length")
    scale = _head_dim(file)
    if layers == WIDE_GEMMAS[file.architecture]:
        scale = width // file.whole("attention.head_count")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scale,
        **_windows(file, 4096),
    }


def _windows(file: GgufFile, usual: int | None) -> dict[str, Any]:
    """Return the sliding window and, if the file has them, the types of the layers."""
    fields = {"sliding_window": file.of_model("attention.sliding_window", usual) or None}
    pattern = file.of_model("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        return fields
    names = ["sliding_attention" if near else "full_attention" for near in pattern]
    return {**fields, "layer_types": names}


def _olmo2(file: GgufFile) -> dict[str, Any]:
    if file.of_model("attention.sliding_window") is None:
        return {}
    return {"model_type": "olmo3", **_windows(file, None)}


def _phi3(file: GgufFile) -> dict[str, Any]:
    rope = _rope(file)
    share = file.of_model("rope.dimension_count", _head_dim(file)) / _head_dim(file)
    rope["partial_rotary_factor"] = share
    original = file.of_model("rope.scaling.original_context_length")
    fields: dict[str, Any] = {"partial_rotary_factor": share, "rope_parameters": rope}
    if original:
        fields["original_max_position_embeddings"] = original
    long, short = (_numbers(file, f"rope_factors_{which}.weight") for which in ("long", "short"))
    if long is not None and short is not None:
        rope |= {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        rope["attention_factor"] = file.of_model("rope.scaling.attn_factor", 1.0)
        rope["original_max_position_embeddings"] = original
    return {**fields, **_windows(file, None)}


def _granite(file: GgufFile) -> dict[str, Any]:
    names = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    values = {field: file.of_model(key) for key, field in names.items()}
    fields: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    fields.setdefault("attention_multiplier", _head_dim(file) ** -0.5)
    return fields


ARCHITECTURES = {
    "llama": Architecture(model_type="llama", more=_llama, pairs_neighbours=True),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen2moe": Architecture(model_type="qwen2_moe", more=_qwen2_moe),
    "qwen3": Architecture(model_type="qwen3"),
    "qwen3moe": Architecture(model_type="qwen3_moe", more=_qwen3_moe),
    "gemma2": Architecture(model_type="gemma2", more=_gemma2, offset_norms=True),
    "gemma3": Architecture(model_type="gemma3_text", more=_gemma3, offset_norms=True),
    "phi3": Architecture(model_type="phi3", more=_phi3),
    "olmo2": Architecture(model_type="olmo2", more=_olmo2),
    "smollm3": Architecture(model_type="smollm3", pairs_neighbours=True),
    "granite": Architecture(model_type="granite", more=_granite, pairs_neighbours=True),
}
"""Supported architectures by llama.cpp's names; Mistral and Mixtral files are named llama."""


def architecture_of(file: GgufFile) -> Architecture:
    """Return the architecture of a file. Raises CheckpointError."""
    if file.architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: GGUF files of the architecture {file.architecture[:40]!r} are not "
            f"supported, only {', '.join(ARCHITECTURES)}. Use the model's Hugging Face directory "
            "(*.safetensors); docs/families.md lists the supported families."
        )
    return ARCHITECTURES[file.architecture]


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return a file's config.json. Raises CheckpointError."""
    architecture = architecture_of(file)
    try:
        return {**_common(file, architecture.model_type), **architecture.more(file)}
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(
            f"{file.path}: its header does not describe a {file.architecture} model ({error!r:.80})"
            f". {OTHER_FILE}."
        ) from None


def _common(file: GgufFile, model_type: str) -> dict[str, Any]:
    """Return the fields that all families have."""
    vocab, width = file.tensors["token_embd.weight"].shape
    heads = file.whole("attention.head_count")
    wide = any(t.kind != "BF16" for t in file.tensors.values() if len(t.shape) > 1)
    fields = {
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": file.whole("feed_forward_length", 0) or _mlp(file),
        "num_hidden_layers": file.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.whole("attention.head_count_kv", heads),
        "head_dim": _head_dim(file),
        "rms_norm_eps": file.of_model("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": file.whole("context_length"),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(file),
        "torch_dtype": "float32" if wide else "bfloat16",
    }
    return {**fields, **token_ids(file)}


def token_ids(file: GgufFile) -> dict[str, Any]:
    """Return the ids of a file's special tokens in the form of config.json. A token that the file
    does not name is null, which overrides the family's default."""
    ends = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    ends = list(dict.fromkeys(end for end in ends if type(end) is int))
    named: dict[str, Any] = {"eos_token_id": ends if len(ends) > 1 else next(iter(ends), None)}
    for field, key in (("bos", "bos"), ("pad", "padding")):
        number = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        named[f"{field}_token_id"] = number if type(number) is int else None
    return named


def _mlp(file: GgufFile) -> int:
    return file.tensors["blk.0.ffn_up_exps.weight"].shape[1]


def _head_dim(file: GgufFile) -> int:
    usual = file.whole("embedding_length") // file.whole("attention.head_count")
    return file.whole("attention.key_length", usual)


def _rope(file: GgufFile) -> dict[str, Any]:
    """Return the rotary position settings. Raises CheckpointError for an unsupported scaling."""
    rope: dict[str, Any] = {"rope_theta": file.of_model("rope.freq_base", 10_000.0)}
    kind = file.of_model("rope.scaling.type", "none")
    factors = _numbers(file, "rope_freqs.weight")
    if factors is not None:
        return rope | _llama3(file, rope["rope_theta"], factors)
    if kind == "none" or file.architecture == "phi3":
        return rope | {"rope_type": "default"}
    rope |= {"rope_type": kind, "factor": file.of_model("rope.scaling.factor")}
    if kind == "linear":
        return rope
    if kind != "yarn" or file.of_model("rope.scaling.attn_factor", 1.0) != 1.0:
        raise CheckpointError(
            f"{file.path}: rotary positions scaled by {str(kind)[:40]!r} are not supported in GGUF "
            "files, only linear, llama3 and yarn (without an attn_factor), and Phi-3's. "
            f"{OTHER_FILE}."
        )
    original = file.whole("rope.scaling.original_context_length")
    return rope | {"original_max_position_embeddings": original}


def _llama3(file: GgufFile, theta: float, factors: list[float]) -> dict[str, Any]:
    """Return the Llama 3 scaling with these factors, one per frequency."""
    factor = max(factors)
    waves = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
    low, high, original = LLAMA3.values()
    smooth = np.clip((original / waves - low) / (high - low), 0, 1)
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-4):
        raise CheckpointError(
            f"{file.path}: its rotary factors (rope_freqs.weight) do not match Llama 3.1 to "
            f"3.3; only these are supported in GGUF files. {OTHER_FILE}."
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _numbers(file: GgufFile, name: str) -> list[float] | None:
    """Return the values of a small tensor; None: the file has no such tensor."""
    tensor = file.tensors.get(name)
    return None if tensor is None else numbers_of(tensor.kind, tensor.data).tolist()
