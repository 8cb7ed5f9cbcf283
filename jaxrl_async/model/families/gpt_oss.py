"""gpt-oss: attention sinks, windows in every other layer, experts with biases."""

from jaxrl_async.model.families.family import Family, all_but_every
from jaxrl_async.model.families.parts import CLAMP_LIMIT, CLAMP_SLOPE, ExpertRouter

GPT_OSS = Family(
    model_type="gpt_oss",
    classes="GptOss",
    names={"router": "mlp.router"},
    activation="clamped_silu",
    norm_eps=1e-5,
    biases="configured",
    theta=150_000.0,
    lists_layers=True,
    window=128,
    windowed=all_but_every(2),
    routed=True,
    experts_key="num_local_experts",
    expert_width_key="intermediate_size",
    router=lambda fields: ExpertRouter(bias=True),
    expert_biases=True,
    stacks_experts=True,
    sinks=True,
    fixed={"swiglu_alpha": CLAMP_SLOPE, "swiglu_limit": CLAMP_LIMIT},
)
