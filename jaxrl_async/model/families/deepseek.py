"""DeepSeek-V2, V3 and R1, Kimi K2 and Moonlight: latent attention and grouped experts."""

from typing import Any

from jaxrl_async.model.families.family import Family
from jaxrl_async.model.families.fields import ConfigFields, shown
from jaxrl_async.model.families.glm import (
    first_dense,
    groups_of,
    shared_width,
    sigmoid_router,
    written_mixture,
)
from jaxrl_async.model.families.layer_types import yarn_magnitude
from jaxrl_async.model.families.parts import ExpertRouter, Latent, Mixture, Scales


def _latent(fields: ConfigFields) -> Latent:
    """Return the sizes of latent attention; queries have no rank if the file says null."""
    compresses = "q_lora_rank" not in fields.values or fields.has("q_lora_rank")
    return Latent(
        rank=fields.whole("kv_lora_rank", 512),
        query_rank=fields.whole("q_lora_rank", 1536) if compresses else 0,
        rotated=fields.whole("qk_rope_head_dim", 64),
        value=fields.whole("v_head_dim", 128),
        pairs=fields.flag("rope_interleave", True),
    )


def _written_latent(latent: Latent) -> dict[str, Any]:
    return {
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.rank,
        "qk_rope_head_dim": latent.rotated,
        "v_head_dim": latent.value,
        "rope_interleave": latent.pairs,
    }


def _scales(fields: ConfigFields) -> Scales:
    """Return the scale of scores: width ** -0.5, increased by YaRN's mscale_all_dim."""
    width = fields.whole("qk_nope_head_dim", 128) + fields.whole("qk_rope_head_dim", 64)
    rope = fields.part("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    grown = 1.0
    if scaled and rope.get("mscale_all_dim"):
        grown = yarn_magnitude(rope.number("factor"), rope.number("mscale_all_dim"))
    return Scales(attention=width**-0.5 * grown**2)


def _router_v2(fields: ConfigFields) -> ExpertRouter:
    method = fields.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        fields.refuse(
            f"topk_method {shown(method)} is not supported, only greedy and group_limited_greedy."
        )
    groups, chosen = (1, 1) if method == "greedy" else groups_of(fields, 1, 1)
    return ExpertRouter(
        sums_to_one=False,
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=groups,
        groups_per_token=chosen,
        best_of_group=1,
    )


def _router_v3(fields: ConfigFields) -> ExpertRouter:
    for key, only in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if fields.get(key, only) != only:
            fields.refuse(f"{key} {shown(fields.get(key))} is not supported, only {only}.")
    return sigmoid_router(fields, 2.5, 8, 4)


def _written_v2(mixture: Mixture) -> dict[str, Any]:
    grouped = mixture.router.groups > 1
    method = "group_limited_greedy" if grouped else "greedy"
    return {**written_mixture(mixture), "topk_method": method}


_REFUSED = {"attention_bias": "biases of q_a_proj, kv_a_proj_with_mqa and o_proj"}

DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    classes="DeepseekV2",
    heads=("SequenceClassification",),
    latent=_latent,
    written_latent=_written_latent,
    scales=_scales,
    routed=True,
    experts_key="n_routed_experts",
    router=_router_v2,
    written_mixture=_written_v2,
    dense=lambda fields, layer: layer < first_dense(fields, 0),
    shared_width=shared_width,
    fixed={"moe_layer_freq": 1, "rope_interleave": 1},
    refused={**_REFUSED, "norm_topk_prob": "weights that sum to 1", "mlp_bias": "biases of MLPs"},
)
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    classes="DeepseekV3",
    latent=_latent,
    written_latent=_written_latent,
    scales=_scales,
    routed=True,
    experts_key="n_routed_experts",
    router=_router_v3,
    written_mixture=written_mixture,
    dense=lambda fields, layer: layer < first_dense(fields, 3),
    shared_width=shared_width,
    fixed={"moe_layer_freq": 1},
    refused=_REFUSED,
)
