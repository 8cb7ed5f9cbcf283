"""Qwen2 and Qwen3."""

from typing import Any

from jaxrl_async.model.families.family import Family
from jaxrl_async.model.families.fields import ConfigFields
from jaxrl_async.model.families.parts import ExpertRouter, Mixture


def _window_behind(fields: ConfigFields, layer: int) -> bool:
    return fields.flag("use_sliding_window") and layer >= fields.get("max_window_layers", 28)


def _window_alternates(fields: ConfigFields, layer: int) -> bool:
    before = layer < fields.get("max_window_layers", 28)
    return fields.flag("use_sliding_window") and layer % 2 == 0 and before


SHARED_EXPERT = {
    f"shared_{name}": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")
}
"""The names of the shared expert in files."""


def _router(fields: ConfigFields) -> ExpertRouter:
    return ExpertRouter(sums_to_one=fields.flag("norm_topk_prob"))


def _is_dense(fields: ConfigFields, layer: int) -> bool:
    listed = fields.get("mlp_only_layers", [])
    if not isinstance(listed, list):
        raise fields.wrong("mlp_only_layers", "a list of layers")
    return layer in listed or (layer + 1) % fields.whole("decoder_sparse_step", 1) != 0


def _written(mixture: Mixture) -> dict[str, Any]:
    return {
        "norm_topk_prob": mixture.router.sums_to_one,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(mixture.dense_layers),
    }


def written_with_shared(mixture: Mixture) -> dict[str, Any]:
    """Return the entries of config.json for experts with a shared expert."""
    return {**_written(mixture), "shared_expert_intermediate_size": mixture.shared_width}


QWEN2 = Family(
    model_type="qwen2",
    classes="Qwen2",
    biases="qkv",
    window=4096,
    lists_layers=True,
    windowed=_window_behind,
)
QWEN3 = Family(
    model_type="qwen3",
    classes="Qwen3",
    biases="configured",
    qk_norm="head",
    window=4096,
    lists_layers=True,
    windowed=_window_behind,
)
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    classes="Qwen2Moe",
    names=SHARED_EXPERT,
    biases="qkv",
    window=4096,
    windowed=_window_alternates,
    lists_layers=True,
    routed=True,
    router=_router,
    written_mixture=lambda mixture: {**written_with_shared(mixture), "qkv_bias": True},
    dense=_is_dense,
    shared_width=lambda fields: fields.whole("shared_expert_intermediate_size", 5632),
    shared_gated=True,
    fixed={"qkv_bias": 1},
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    classes="Qwen3Moe",
    biases="configured",
    qk_norm="head",
    window=4096,
    windowed=lambda fields, layer: fields.flag("use_sliding_window"),
    routed=True,
    router=_router,
    written_mixture=_written,
    dense=_is_dense,
)
