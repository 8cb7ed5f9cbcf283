"""Gemma 2 and 3 (text)."""

from typing import Any

from jaxrl_async.model.families.family import NORMS_AFTER, Family, all_but_every
from jaxrl_async.model.families.fields import ConfigFields
from jaxrl_async.model.families.parts import Scales

BOTH_WAYS = {"use_bidirectional_attention": "attention to later tokens"}


def _all_but_the_last_of_each(fields: ConfigFields, layer: int) -> bool:
    return (layer + 1) % fields.whole("sliding_window_pattern", 6) != 0


def _scales(fields: ConfigFields, attention_cap: float, logit_cap: float) -> Scales:
    return Scales(
        attention=fields.whole("query_pre_attn_scalar", 256) ** -0.5,
        embedding=fields.whole("hidden_size") ** 0.5,
        attention_cap=fields.positive_or_none("attn_logit_softcapping", attention_cap),
        logit_cap=fields.positive_or_none("final_logit_softcapping", logit_cap),
    )


def _written(scales: Scales) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": round(scales.attention**-2),
        "attn_logit_softcapping": scales.attention_cap or None,
        "final_logit_softcapping": scales.logit_cap or None,
    }


GEMMA2 = Family(
    model_type="gemma2",
    classes="Gemma2",
    names=NORMS_AFTER,
    activation="gelu_tanh",
    activation_key="hidden_activation",
    norms="both",
    norm_offset=True,
    tied=True,
    biases="configured",
    window=4096,
    lists_layers=True,
    windowed=all_but_every(2),
    scales=lambda fields: _scales(fields, 50.0, 30.0),
    written_scales=_written,
    refused=BOTH_WAYS,
)
GEMMA3 = Family(
    model_type="gemma3_text",
    classes="Gemma3",
    head_classes="Gemma3Text",
    heads=("SequenceClassification",),
    names=NORMS_AFTER,
    activation="gelu_tanh",
    activation_key="hidden_activation",
    norms="both",
    norm_offset=True,
    qk_norm="head",
    tied=True,
    biases="configured",
    theta=1e6,
    window_theta_key="rope_local_base_freq",
    window_rope="unscaled",
    window=4096,
    lists_layers=True,
    windowed=_all_but_the_last_of_each,
    scales=lambda fields: _scales(fields, 0.0, 0.0),
    written_scales=_written,
    refused=BOTH_WAYS,
)
