"""GLM-4.5: a sigmoid router with a correction, shared experts, leading dense layers."""

from typing import Any

from jaxrl_async.model.families.family import Family
from jaxrl_async.model.families.fields import ConfigFields
from jaxrl_async.model.families.parts import ExpertRouter, Mixture


def groups_of(fields: ConfigFields, groups: int, chosen: int) -> tuple[int, int]:
    """Return n_group and topk_group, with these defaults."""
    groups, chosen = fields.whole("n_group", groups), fields.whole("topk_group", chosen)
    experts = fields.get("n_routed_experts", groups)
    if chosen > groups or experts % groups:
        fields.refuse(
            f"n_group ({groups}) must divide n_routed_experts ({experts}), and topk_group "
            f"({chosen}) be at most n_group."
        )
    return groups, chosen


def sigmoid_router(fields: ConfigFields, scale: float, groups: int, chosen: int) -> ExpertRouter:
    """Return a corrected router by sigmoids, with these defaults."""
    groups, chosen = groups_of(fields, groups, chosen)
    return ExpertRouter(
        odds="sigmoid",
        sums_to_one=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", scale),
        corrected=True,
        groups=groups,
        groups_per_token=chosen,
    )


def first_dense(fields: ConfigFields, default: int) -> int:
    """Return the number of dense layers before the layers with experts."""
    first = fields.get("first_k_dense_replace", default)
    if type(first) is not int or first < 0:
        raise fields.wrong("first_k_dense_replace", "a whole number of at least 0")
    return first


def shared_width(fields: ConfigFields) -> int:
    """Return the total width of the shared experts."""
    return fields.whole("n_shared_experts", 1) * fields.whole("moe_intermediate_size")


def written_mixture(mixture: Mixture) -> dict[str, Any]:
    """Return the entries of config.json for grouped experts, shared experts and dense layers."""
    router = mixture.router
    return {
        "norm_topk_prob": router.sums_to_one,
        "routed_scaling_factor": router.scale,
        "n_group": router.groups,
        "topk_group": router.groups_per_token,
        "n_shared_experts": mixture.shared_width // mixture.width,
        "first_k_dense_replace": len(mixture.dense_layers),
        "num_nextn_predict_layers": 0,
    }


GLM4_MOE = Family(
    model_type="glm4_moe",
    classes="Glm4Moe",
    heads=(),
    norm_eps=1e-5,
    rotary_share=0.5,
    qk_norm="head",
    qk_norm_key="use_qk_norm",
    biases="qkv configured",
    routed=True,
    experts_key="n_routed_experts",
    router=lambda fields: sigmoid_router(fields, 1.0, 1, 1),
    written_mixture=written_mixture,
    dense=lambda fields, layer: layer < first_dense(fields, 1),
    shared_width=shared_width,
)
