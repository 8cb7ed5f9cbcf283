"""transformers' defaults for keys that a config.json omits.

Published files omit many keys: `text_config` of Gemma 3 4B lacks the heads and the vocabulary. The
family's record has some defaults (a norm's epsilon, whether the head is tied, the window); the
others are here. tests/parity/test_defaults.py compares each entry with transformers' classes.
"""

from typing import Any

from jaxrl_async.model.families.family import Family
from jaxrl_async.model.families.fields import ConfigFields

SECOND_NAMES = {
    "qwen3_moe": "num_local_experts",
    "mixtral": "num_experts",
    "gpt_oss": "num_experts",
    "glm4_moe": "num_local_experts",
    "deepseek_v2": "num_experts",
    "deepseek_v3": "num_local_experts",
}
"""Second names in transformers for the number of experts, by family."""
ROPES = ("rope_parameters", "rope_scaling")
"""Keys of the rotary positions; a file has one of them."""
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def _of(*sizes: int | None, **more: object) -> dict[str, Any]:
    """Return a family's defaults: the values of _SIZES, in order and without None, and `more`."""
    values = dict(zip(_SIZES, sizes, strict=True))
    return {key: value for key, value in values.items() if value is not None} | more


_NO = None
_QWEN = (_NO, _NO, _NO)  # no special tokens
_LLAMA = (1, 2, _NO)
_YARN_OF_GPT_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_YARN_OF_MINISTRAL3 = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _of(32_000, 4096, 11_008, 32, 32, _NO, _NO, 2048, *_LLAMA),
    "qwen2": _of(151_936, 4096, 22_016, 32, 32, 32, _NO, 32_768, *_QWEN),
    "qwen2_moe": _of(
        *(151_936, 2048, 5632, 24, 16, 16, _NO, 32_768, *_QWEN),
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
    ),
    "qwen3": _of(151_936, 4096, 22_016, 32, 32, 32, 128, 32_768, *_QWEN),
    "qwen3_moe": _of(
        *(151_936, 2048, 6144, 24, 32, 4, _NO, 32_768, *_QWEN),
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "qwen3_next": _of(
        *(151_936, 2048, 5632, 48, 16, 2, 256, 32_768, *_QWEN),
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=512,
    ),
    "qwen3_5_text": _of(248_320, 4096, 12_288, 32, 16, 4, 256, 32_768, *_QWEN),
    "qwen3_5_moe_text": _of(
        *(248_320, 2048, _NO, 40, 16, 2, 256, 32_768, *_QWEN),
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
    ),
    "gemma2": _of(256_000, 2304, 9216, 26, 8, 4, 256, 8192, 2, 1, 0),
    "gemma3_text": _of(262_208, 2304, 9216, 26, 8, 4, 256, 131_072, 2, 1, 0),
    "mistral": _of(32_000, 4096, 14_336, 32, 32, 8, _NO, 131_072, *_LLAMA),
    "ministral": _of(32_000, 4096, 14_336, 32, 32, 8, _NO, 131_072, *_LLAMA),
    "ministral3": _of(
        *(131_072, 4096, 14_336, 34, 32, 8, 128, 262_144, 1, 2, 11),
        rope_parameters=_YARN_OF_MINISTRAL3,
    ),
    "mixtral": _of(
        *(32_000, 4096, 14_336, 32, 32, 8, _NO, 131_072, *_LLAMA),
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "phi3": _of(
        *(32_064, 3072, 8192, 32, 32, _NO, _NO, 4096, 1, 32_000, 32_000),
        original_max_position_embeddings=4096,
    ),
    "olmo2": _of(50_304, 4096, 11_008, 32, 32, _NO, _NO, 2048, _NO, 50_279, 1),
    "olmo3": _of(50_304, 4096, 11_008, 32, 32, _NO, _NO, 2048, _NO, 50_279, 1),
    "smollm3": _of(128_256, 2048, 11_008, 36, 16, 4, _NO, 32_768, 128_000, 128_001, 128_004),
    "granite": _of(32_000, 4096, 11_008, 32, 32, _NO, _NO, 2048, *_LLAMA),
    "gpt_oss": _of(
        *(201_088, 2880, 2880, 36, 64, 8, 64, 131_072, *_QWEN),
        num_local_experts=128,
        num_experts_per_tok=4,
        attention_bias=True,
        rope_parameters=_YARN_OF_GPT_OSS,
    ),
    "glm4_moe": _of(
        *(151_552, 4096, 10_944, 46, 96, 8, _NO, 131_072, *_QWEN),
        n_routed_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1408,
    ),
    "deepseek_v2": _of(
        *(102_400, 4096, 11_008, 32, 32, _NO, _NO, 2048, *_LLAMA),
        n_routed_experts=64,
        n_shared_experts=2,
        moe_intermediate_size=1407,
    ),
    "deepseek_v3": _of(
        *(129_280, 7168, 18_432, 61, 128, 128, _NO, 4096, 0, 1, _NO),
        n_routed_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
    ),
}
"""Defaults by a family's model_type and the key of config.json."""


def expert_keys(family: Family) -> tuple[str, ...]:
    """Return the keys for the number of experts in a family's config.json; a file has one of
    them."""
    second = SECOND_NAMES.get(family.model_type)
    return (family.experts_key,) if second is None else (family.experts_key, second)


def with_defaults(family: Family, fields: ConfigFields) -> ConfigFields:
    """Return the fields of a file with transformers' defaults for missing keys; null in the file is
    kept. For keys with several names, no default is added if the file has any of them."""
    usual = dict(DEFAULTS[family.model_type])
    if any(name in fields.values for name in expert_keys(family)):
        usual.pop(family.experts_key, None)
    if any(fields.has(name) for name in ROPES):
        usual.pop("rope_parameters", None)
        return ConfigFields({**usual, **fields.values}, fields.where)
    there = {key: value for key, value in fields.values.items() if key not in ROPES}
    return ConfigFields({**usual, **there}, fields.where)
