"""Llama and similar families."""

from typing import Any

from jaxrl_async.model.families.family import Family, always
from jaxrl_async.model.families.fields import ConfigFields
from jaxrl_async.model.families.parts import Scales

MLP_BIAS = {"mlp_bias": "biases of the MLP"}


def _rotates_three_of_four(fields: ConfigFields, layer: int) -> bool:
    listed = fields.get("no_rope_layers")
    if isinstance(listed, list) and layer < len(listed):
        return bool(listed[layer])
    return (layer + 1) % fields.whole("no_rope_layer_interval", 4) != 0


def _window_without_rope(fields: ConfigFields, layer: int) -> bool:
    return fields.flag("use_sliding_window") and not _rotates_three_of_four(fields, layer)


def _granite_scales(fields: ConfigFields) -> Scales:
    return Scales(
        attention=fields.number("attention_multiplier", 1.0),
        embedding=fields.number("embedding_multiplier", 1.0),
        residual=fields.number("residual_multiplier", 1.0),
        logits=1 / fields.number("logits_scaling", 1.0),
    )


def _granite_written(scales: Scales) -> dict[str, Any]:
    return {
        "attention_multiplier": scales.attention,
        "embedding_multiplier": scales.embedding,
        "residual_multiplier": scales.residual,
        "logits_scaling": 1 / scales.logits,
    }


LLAMA = Family(model_type="llama", classes="Llama", biases="configured", refused=MLP_BIAS)
MISTRAL = Family(
    model_type="mistral",
    classes="Mistral",
    window=4096,
    windowed=always,
)
MINISTRAL = Family(
    model_type="ministral",
    classes="Ministral",
    window=4096,
    windowed=always,
    lists_layers=True,
)
MINISTRAL3 = Family(
    model_type="ministral3",
    classes="Ministral3",
    norm_eps=1e-5,
    windowed=always,
    grows_queries=True,
)
MIXTRAL = Family(
    model_type="mixtral",
    classes="Mixtral",
    names={
        "router": "block_sparse_moe.gate",
        "expert_gate": "block_sparse_moe.experts.{expert}.w1",
        "expert_up": "block_sparse_moe.experts.{expert}.w3",
        "expert_down": "block_sparse_moe.experts.{expert}.w2",
    },
    norm_eps=1e-5,
    theta=1e6,
    windowed=always,
    routed=True,
    experts_key="num_local_experts",
    expert_width_key="intermediate_size",
)
PHI3 = Family(
    model_type="phi3",
    classes="Phi3",
    joins=True,
    norm_eps=1e-5,
    windowed=always,
)
SMOLLM3 = Family(
    model_type="smollm3",
    classes="SmolLM3",
    biases="configured",
    tied=True,
    theta=2e6,
    lists_layers=True,
    windowed=_window_without_rope,
    rotated=_rotates_three_of_four,
    refused=MLP_BIAS,
)
GRANITE = Family(
    model_type="granite",
    classes="Granite",
    heads=(),
    biases="configured",
    scales=_granite_scales,
    written_scales=_granite_written,
    refused=MLP_BIAS,
)
