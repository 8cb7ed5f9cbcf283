"""One family of models as a record: all that tells it from the others, here and in files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxrl_async.model.families.fields import ConfigFields
from jaxrl_async.model.families.parts import (
    USUAL_ROUTER,
    Activation,
    DeltaNet,
    ExpertRouter,
    Latent,
    Mixture,
    NormPlaces,
    QkNorm,
    Scales,
)

HF_NAMES = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_a": "self_attn.q_a_proj",
    "q_a_norm": "self_attn.q_a_layernorm",
    "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "self_attn.kv_a_layernorm",
    "kv_b": "self_attn.kv_b_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
    "expert_gate": "mlp.experts.{expert}.gate_proj",
    "expert_up": "mlp.experts.{expert}.up_proj",
    "expert_down": "mlp.experts.{expert}.down_proj",
    "correction": "mlp.gate.e_score_correction_bias",
    "shared_gate": "mlp.shared_experts.gate_proj",
    "shared_up": "mlp.shared_experts.up_proj",
    "shared_down": "mlp.shared_experts.down_proj",
    "shared_router": "mlp.shared_expert_gate",
    "sinks": "self_attn.sinks",
    "delta_qkvz": "linear_attn.in_proj_qkvz",
    "delta_ba": "linear_attn.in_proj_ba",
    "delta_q": "linear_attn.in_proj_qkv",
    "delta_k": "linear_attn.in_proj_qkv",
    "delta_v": "linear_attn.in_proj_qkv",
    "delta_z": "linear_attn.in_proj_z",
    "delta_b": "linear_attn.in_proj_b",
    "delta_a": "linear_attn.in_proj_a",
    "delta_conv": "linear_attn.conv1d",
    "delta_rate": "linear_attn.A_log",
    "delta_shift": "linear_attn.dt_bias",
    "delta_norm": "linear_attn.norm",
    "delta_out": "linear_attn.out_proj",
}
"""The modules of a layer in Hugging Face files, as most families name them."""
NORMS_AFTER = {
    "attn_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
"""The names where norms stand (also) after attention and MLP."""
HEAD_CLASSES = ("TokenClassification", "SequenceClassification")


def never(fields: ConfigFields, layer: int) -> bool:
    """Return False for every layer."""
    return False


def always(fields: ConfigFields, layer: int) -> bool:
    """Return True for every layer."""
    return True


def all_but_every(nth: int) -> Callable[[ConfigFields, int], bool]:
    """Return a function that is False for every nth layer."""
    return lambda fields, layer: (layer + 1) % nth != 0


def no_scales(fields: ConfigFields) -> Scales:
    """Return scales that change nothing."""
    return Scales()


def usual_router(fields: ConfigFields) -> ExpertRouter:
    """Return a router whose weights sum to 1."""
    return USUAL_ROUTER


def nothing_said(mixture: Mixture) -> dict[str, Any]:
    """Return no entries for config.json."""
    return {}


def no_width(fields: ConfigFields) -> int:
    """Return 0."""
    return 0


def no_latent(fields: ConfigFields) -> Latent | None:
    """Return None."""
    return None


def no_sizes(latent: Latent) -> dict[str, Any]:
    """Return no entries for config.json."""
    return {}


def no_delta(fields: ConfigFields) -> DeltaNet | None:
    """Return None."""
    return None


def no_delta_sizes(delta: DeltaNet) -> dict[str, Any]:
    """Return no entries for config.json."""
    return {}


def nothing_written(scales: Scales) -> dict[str, Any]:
    """Return no entries for config.json."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What tells a family from the others. Functions are asked about a config.json that does not
    say it itself, and about model.architecture of a configuration, which is read alike."""

    model_type: str
    classes: str
    """What transformers' class names begin with: Llama in LlamaForCausalLM."""
    head_classes: str = ""
    """The same for models with a head, if it differs."""
    heads: tuple[str, ...] = HEAD_CLASSES
    """Which heads transformers has for it: what stands after `For`."""
    also: tuple[str, ...] = ()
    """Other types of the same models, which are saved as this one."""
    text_of: tuple[str, ...] = ()
    """Types of models with images whose text_config this is; only the text part is read."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Modules that Hugging Face files name otherwise than HF_NAMES."""
    joins: bool = False
    """Files hold q, k and v in one matrix (qkv_proj), gate and up in another (gate_up_proj)."""
    activation: Activation = "silu"
    activation_key: str = "hidden_act"
    norms: NormPlaces = "before"
    norm_offset: bool = False  # norms multiply with 1 + weight
    norm_eps: float = 1e-6  # like the next ones: where config.json does not say
    qk_norm: QkNorm = "none"
    qk_norm_key: str = ""  # where config.json says whether there is one; "": there is
    biases: Literal["none", "qkv", "qkv as said", "as said"] = "none"
    """Of attention; as said: by attention_bias, and then of the output projection, too, unless it
    is qkv as said."""
    tied: bool = False
    theta: float = 10_000.0
    rotary_share: float = 1.0  # of a head's components that turn
    window_theta_key: str = ""
    """Where config.json has the rotary base of layers with a window."""
    window_rope: Literal["same", "unscaled"] = "same"
    """Rotary positions of layers with a window; unscaled: without the others' scaling."""
    grows_queries: bool = False
    """config.json always says how queries grow with the position (rope_parameters)."""
    lists_layers: bool = False
    """config.json may list layer_types, and each type's rotary positions if they differ."""
    window: int = 0
    """The sliding_window where config.json does not say; 0: none."""
    windowed: Callable[[ConfigFields, int], bool] = never
    """Which layers have it, if there is one."""
    rotated: Callable[[ConfigFields, int], bool] = always
    """Which layers have rotary positions."""
    linear: Callable[[ConfigFields, int], bool] = never
    """Which layers have a gated delta net in place of attention, where layer_types does not say."""
    delta: Callable[[ConfigFields], DeltaNet | None] = no_delta
    """The sizes of these layers; None: there are none."""
    written_delta: Callable[[DeltaNet], dict[str, Any]] = no_delta_sizes
    attention_gated: bool = False
    """What attention returns is multiplied with a sigmoid of x, beside whose matrix files have the
    queries'."""
    scales: Callable[[ConfigFields], Scales] = no_scales
    written_scales: Callable[[Scales], dict[str, Any]] = nothing_written
    latent: Callable[[ConfigFields], Latent | None] = no_latent
    """How keys and values are made of one vector a token; None: each head has its own."""
    written_latent: Callable[[Latent], dict[str, Any]] = no_sizes
    routed: bool = False  # experts in every layer
    experts_key: str = "num_experts"  # where config.json has their number
    expert_width_key: str = "moe_intermediate_size"
    router: Callable[[ConfigFields], ExpertRouter] = usual_router
    written_mixture: Callable[[Mixture], dict[str, Any]] = nothing_said
    dense: Callable[[ConfigFields, int], bool] = never
    """Which layers of a mixture have one MLP in place of experts."""
    shared_width: Callable[[ConfigFields], int] = no_width
    """Width of the expert that every token uses; 0: there is none."""
    shared_gated: bool = False  # it is weighed by a sigmoid of its own
    expert_biases: bool = False
    stacks_experts: bool = False
    """Files hold the experts of a layer in one tensor, [E, inputs, outputs], in which gate and up
    take turns."""
    sinks: bool = False  # each head has a logit that no token stands for
    fixed: Mapping[str, float] = field(default_factory=dict)
    """Numbers of config.json that must be these."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Switches of config.json that must be off, and what they ask for."""

    def module(self, weight: str) -> str:
        """Return the name of a layer's module in Hugging Face files."""
        return self.names.get(weight) or HF_NAMES[weight]
