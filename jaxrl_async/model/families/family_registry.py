"""All families by their model_type. To add a family, add its record in a file of this folder, a
line here, and its name in config.model_section.FamilyName. A file is loaded when it is used."""

import importlib
from collections.abc import Iterator, Mapping

from jaxrl_async.model.families.family import Family

RECORDS = {
    "llama": ("llama", "LLAMA"),
    "qwen2": ("qwen", "QWEN2"),
    "qwen2_moe": ("qwen", "QWEN2_MOE"),
    "qwen3": ("qwen", "QWEN3"),
    "qwen3_moe": ("qwen", "QWEN3_MOE"),
    "qwen3_next": ("qwen_next", "QWEN3_NEXT"),
    "qwen3_5_text": ("qwen_next", "QWEN3_5"),
    "qwen3_5_moe_text": ("qwen_next", "QWEN3_5_MOE"),
    "gemma2": ("gemma", "GEMMA2"),
    "gemma3_text": ("gemma", "GEMMA3"),
    "mistral": ("llama", "MISTRAL"),
    "ministral": ("llama", "MINISTRAL"),
    "ministral3": ("llama", "MINISTRAL3"),
    "mixtral": ("llama", "MIXTRAL"),
    "phi3": ("llama", "PHI3"),
    "olmo2": ("olmo", "OLMO2"),
    "olmo3": ("olmo", "OLMO3"),
    "smollm3": ("llama", "SMOLLM3"),
    "granite": ("llama", "GRANITE"),
    "gpt_oss": ("gpt_oss", "GPT_OSS"),
    "glm4_moe": ("glm", "GLM4_MOE"),
    "deepseek_v2": ("deepseek", "DEEPSEEK_V2"),
    "deepseek_v3": ("deepseek", "DEEPSEEK_V3"),
}
"""The file and the name of each family's record."""
ALSO = {"kimi_k2": "deepseek_v3"}
"""Families by other model types with the same architecture, which are saved as the family's."""
WRAPPED = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
}
"""Families by the types of models with images whose text_config is theirs; only the text part is
read."""


class _Families(Mapping[str, Family]):
    def __getitem__(self, model_type: str) -> Family:
        file, name = RECORDS[model_type]
        family: Family = getattr(importlib.import_module(f"{__package__}.{file}"), name)
        return family

    def __iter__(self) -> Iterator[str]:
        return iter(RECORDS)

    def __len__(self) -> int:
        return len(RECORDS)


FAMILIES = _Families()
