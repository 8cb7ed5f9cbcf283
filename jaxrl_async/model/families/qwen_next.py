"""Qwen3-Next and Qwen3.5 (text): gated delta nets, with gated attention in every fourth layer."""

from dataclasses import replace
from typing import Any

from jaxrl_async.model.families.family import Family
from jaxrl_async.model.families.fields import ConfigFields
from jaxrl_async.model.families.parts import DeltaNet, ExpertRouter, Mixture
from jaxrl_async.model.families.qwen import SHARED_EXPERT, written_with_shared


def _linear(fields: ConfigFields, layer: int) -> bool:
    return (layer + 1) % fields.whole("full_attention_interval", 4) != 0


def _delta(fields: ConfigFields) -> DeltaNet:
    """Return the sizes of the gated delta nets."""
    sizes = DeltaNet(
        key_heads=fields.whole("linear_num_key_heads", 16),
        value_heads=fields.whole("linear_num_value_heads", 32),
        key_width=fields.whole("linear_key_head_dim", 128),
        value_width=fields.whole("linear_value_head_dim", 128),
        kernel=fields.whole("linear_conv_kernel_dim", 4),
    )
    if sizes.value_heads % sizes.key_heads:
        fields.refuse(
            f"linear_num_value_heads ({sizes.value_heads}) must be a multiple of "
            f"linear_num_key_heads ({sizes.key_heads})."
        )
    return sizes


def _written_delta(delta: DeltaNet) -> dict[str, Any]:
    return {
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_width,
        "linear_value_head_dim": delta.value_width,
        "linear_conv_kernel_dim": delta.kernel,
    }


def _shared_width(fields: ConfigFields) -> int:
    return fields.whole("shared_expert_intermediate_size", 512)


def _written_shared(mixture: Mixture) -> dict[str, Any]:
    return {"shared_expert_intermediate_size": mixture.shared_width}


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    classes="Qwen3Next",
    names=SHARED_EXPERT,
    norm_offset=True,
    qk_norm="head",
    rotary_share=0.25,
    attention_gated=True,
    linear=_linear,
    delta=lambda fields: replace(_delta(fields), grouped=True),
    written_delta=_written_delta,
    routed=True,
    router=lambda fields: ExpertRouter(sums_to_one=fields.flag("norm_topk_prob", True)),
    written_mixture=written_with_shared,
    shared_width=_shared_width,
    shared_gated=True,
    fixed={"decoder_sparse_step": 1},
    refused={
        "mlp_only_layers": "layers without experts",
        "attention_bias": "biases of attention",
    },
)
QWEN3_5 = Family(
    model_type="qwen3_5_text",
    classes="Qwen3_5",
    head_classes="Qwen3_5Text",
    heads=("SequenceClassification",),
    norm_offset=True,
    qk_norm="head",
    rotary_share=0.25,
    attention_gated=True,
    linear=_linear,
    delta=_delta,
    written_delta=_written_delta,
    refused={"attention_bias": "biases of attention"},
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    classes="Qwen3_5Moe",
    head_classes="",
    heads=(),
    names=SHARED_EXPERT,
    routed=True,
    written_mixture=_written_shared,
    shared_width=_shared_width,
    shared_gated=True,
)
