"""All families by their model_type. To add a family, add its record in a file of this folder, a
line here, and its name in config.model_section.FamilyName."""

from jaxrl_async.model.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from jaxrl_async.model.families.gemma import GEMMA2, GEMMA3
from jaxrl_async.model.families.glm import GLM4_MOE
from jaxrl_async.model.families.gpt_oss import GPT_OSS
from jaxrl_async.model.families.llama import (
    GRANITE,
    LLAMA,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    MIXTRAL,
    PHI3,
    SMOLLM3,
)
from jaxrl_async.model.families.olmo import OLMO2, OLMO3
from jaxrl_async.model.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from jaxrl_async.model.families.qwen_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT

FAMILIES = {
    family.model_type: family
    for family in (
        LLAMA,
        QWEN2,
        QWEN2_MOE,
        QWEN3,
        QWEN3_MOE,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        GEMMA2,
        GEMMA3,
        MISTRAL,
        MINISTRAL,
        MINISTRAL3,
        MIXTRAL,
        PHI3,
        OLMO2,
        OLMO3,
        SMOLLM3,
        GRANITE,
        GPT_OSS,
        GLM4_MOE,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
    )
}
ALSO = {kind: family for family in FAMILIES.values() for kind in family.also}
"""Families by other model types that are saved as the family's type."""
WRAPPED = {kind: family for family in FAMILIES.values() for kind in family.text_of}
"""Families by the types of models with images that contain them as text_config."""
