"""A record of a model family: its differences from other families, here and in files."""

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
"""The usual names of a layer's modules in Hugging Face files."""
NORMS_AFTER = {
    "attn_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
"""The names for families with norms (also) after attention and MLP."""
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
    """Return the default scales, which change nothing."""
    return Scales()


def usual_router(fields: ConfigFields) -> ExpertRouter:
    """Return a router whose weights sum to 1."""
    return USUAL_ROUTER


def no_entries(mixture: Mixture) -> dict[str, Any]:
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
    """The properties of a family. Functions compute values from a config.json that does not contain
    them, or from model.architecture of a configuration, which is read in the same way."""

    model_type: str
    classes: str
    """Prefix of transformers' class names: Llama in LlamaForCausalLM."""
    head_classes: str = ""
    """Prefix of the class names of models with a head, if different."""
    heads: tuple[str, ...] = HEAD_CLASSES
    """The heads that transformers supports for it: the class name after `For`."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of modules in Hugging Face files that differ from HF_NAMES."""
    joins: bool = False
    """Files hold q, k and v in one matrix (qkv_proj), gate and up in another (gate_up_proj)."""
    activation: Activation = "silu"
    activation_key: str = "hidden_act"
    norms: NormPlaces = "before"
    norm_offset: bool = False  # norms multiply with 1 + weight
    norm_eps: float = 1e-6  # default for config.json, as for the next fields
    qk_norm: QkNorm = "none"
    qk_norm_key: str = ""  # key in config.json of whether the norm exists; "": it does
    biases: Literal["none", "qkv", "qkv configured", "configured"] = "none"
    """Biases of attention. configured: by attention_bias, including the output projection; qkv
    configured: without it."""
    tied: bool = False
    theta: float = 10_000.0
    rotary_share: float = 1.0  # share of a head's components that are rotated
    window_theta_key: str = ""
    """Key in config.json of the rotary base of layers with a window."""
    window_rope: Literal["same", "unscaled"] = "same"
    """Rotary positions of layers with a window; unscaled: without the other layers' scaling."""
    grows_queries: bool = False
    """Whether config.json always has the queries' growth with the position (rope_parameters)."""
    lists_layers: bool = False
    """Whether config.json may list layer_types, with rotary positions per type if they differ."""
    window: int = 0
    """Default of sliding_window; 0: no window."""
    windowed: Callable[[ConfigFields, int], bool] = never
    """Whether a layer has the window."""
    rotated: Callable[[ConfigFields, int], bool] = always
    """Whether a layer has rotary positions."""
    linear: Callable[[ConfigFields, int], bool] = never
    """Whether a layer has a gated delta net in place of attention, without layer_types."""
    delta: Callable[[ConfigFields], DeltaNet | None] = no_delta
    """The sizes of gated delta nets; None: no such layers."""
    written_delta: Callable[[DeltaNet], dict[str, Any]] = no_delta_sizes
    attention_gated: bool = False
    """Whether attention's output is multiplied by a sigmoid gate of x; files join the gate's and
    the queries' matrix."""
    scales: Callable[[ConfigFields], Scales] = no_scales
    written_scales: Callable[[Scales], dict[str, Any]] = nothing_written
    latent: Callable[[ConfigFields], Latent | None] = no_latent
    """The sizes of latent attention; None: each head has its own keys and values."""
    written_latent: Callable[[Latent], dict[str, Any]] = no_sizes
    routed: bool = False  # whether layers have experts
    experts_key: str = "num_experts"  # key in config.json of their number
    expert_width_key: str = "moe_intermediate_size"
    router: Callable[[ConfigFields], ExpertRouter] = usual_router
    written_mixture: Callable[[Mixture], dict[str, Any]] = no_entries
    dense: Callable[[ConfigFields, int], bool] = never
    """Whether a layer of a mixture has one MLP in place of experts."""
    shared_width: Callable[[ConfigFields], int] = no_width
    """Inner width of the shared expert; 0: no shared expert."""
    shared_gated: bool = False  # the shared expert is weighed by a sigmoid gate
    expert_biases: bool = False
    stacks_experts: bool = False
    """Whether files hold the experts of a layer in one tensor, [E, inputs, outputs], with gate and
    up interleaved."""
    sinks: bool = False  # each head has an additional logit without a token
    fixed: Mapping[str, float] = field(default_factory=dict)
    """Required values of numbers in config.json."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Switches of config.json that must be off, and their meaning."""

    def module(self, weight: str) -> str:
        """Return the name of a layer's module in Hugging Face files."""
        return self.names.get(weight) or HF_NAMES[weight]
