"""Reading a decoder's config.json into a ModelSpec, and writing it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxrl_async.errors import CheckpointError
from jaxrl_async.later import Later
from jaxrl_async.model.families.family import Family
from jaxrl_async.model.families.family_registry import ALSO, FAMILIES, WRAPPED
from jaxrl_async.model.families.fields import COPY_AGAIN, MAX_LAYERS, NO_IDS, ConfigFields, shown
from jaxrl_async.model.families.layer_types import read_pattern, written_pattern
from jaxrl_async.model.families.parts import DENSE_STACK, Latent
from jaxrl_async.model.own_code import OWN_TYPE
from jaxrl_async.model.spec import ModelSpec

if TYPE_CHECKING:
    from jaxrl_async.model import own_spec
    from jaxrl_async.model.families import defaults
else:
    own_spec = Later("jaxrl_async.model.own_spec")
    defaults = Later("jaxrl_async.model.families.defaults")

HF_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "clamped_silu": "silu"}
"""Activations by their names in transformers."""


def spec_from_hf(config: Mapping[str, object], where: str) -> ModelSpec:
    """Return the decoder of a Hugging Face config.json. Raises CheckpointError, which names the
    unsupported field.

    where: the file, for errors.
    """
    if config.get("model_type") == OWN_TYPE:
        return own_spec.read_own(config, where)
    family, fields = _family(ConfigFields(config, where))
    fields = defaults.with_defaults(family, fields)
    _refuse_unsupported(family, fields)
    heads, width = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    layers = fields.whole("num_hidden_layers", most=MAX_LAYERS)
    pattern = read_pattern(family, fields, layers)
    biased = family.biases == "qkv" or fields.flag("attention_bias")
    dense = any(kind.stack == DENSE_STACK for kind in pattern)
    latent = family.latent(fields)
    normed = not family.qk_norm_key or fields.flag(family.qk_norm_key)
    spec = ModelSpec(
        family=family.model_type,
        vocab=fields.whole("vocab_size"),
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=fields.whole("num_key_value_heads", heads),
        head_dim=_head_dim(fields, latent, width // heads),
        latent=latent,
        delta=family.delta(fields),
        attention_gated=family.attention_gated,
        mlp=fields.whole(family.expert_width_key if family.routed else "intermediate_size"),
        experts=_experts(family, fields) if family.routed else 0,
        experts_per_token=fields.whole("num_experts_per_tok") if family.routed else 0,
        tied=fields.flag("tie_word_embeddings", family.tied),
        pattern=pattern,
        scales=family.scales(fields),
        activation=family.activation,
        norms=family.norms,
        norm_offset=family.norm_offset,
        norm_eps=fields.number("rms_norm_eps", family.norm_eps),
        qk_norm=family.qk_norm if normed else "none",
        attention_bias=biased,
        output_bias=biased and family.biases == "configured",
        sinks=family.sinks,
        router=family.router(fields),
        expert_biases=family.expert_biases,
        shared_mlp=family.shared_width(fields),
        shared_gated=family.shared_gated,
        dense_mlp=fields.whole("intermediate_size") if dense else 0,
        max_positions=_max_positions(fields, pattern[0].rope),
        eos_ids=fields.ids("eos_token_id"),
        bos_id=next(iter(fields.ids("bos_token_id")), None),
        pad_id=next(iter(fields.ids("pad_token_id")), None),
    )
    _check_heads(spec, where)
    return spec


def _family(fields: ConfigFields) -> tuple[Family, ConfigFields]:
    """Return the family and its fields; for a model with images, the fields of its text part."""
    name = fields.get("model_type")
    if isinstance(name, str) and name in WRAPPED:
        inner = fields.part("text_config")
        own = {
            k: v for k, v in fields.values.items() if k.endswith("_token_id") and v not in NO_IDS
        }
        family = FAMILIES[WRAPPED[name]]
        text = ConfigFields({**inner.values, **own}, fields.where)
        if inner.get("model_type", family.model_type) != family.model_type:
            return _family(text)
        return family, text
    if isinstance(name, str) and name in ALSO:
        return FAMILIES[ALSO[name]], fields
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(
            f"{fields.where}: model_type {shown(name)} is not supported. Use a model of "
            f"{', '.join([*FAMILIES, *ALSO])}."
        )
    return FAMILIES[name], fields


def _head_dim(fields: ConfigFields, latent: Latent | None, usual: int) -> int:
    """Return the width of a head's queries and keys; with latent attention, it is the sum of two
    fields."""
    if latent is None:
        return fields.whole("head_dim", usual)
    return fields.whole("qk_nope_head_dim", 128) + latent.rotated


def _max_positions(fields: ConfigFields, rope: Any) -> int:
    """Return the maximum context length; LongRoPE's long factors are not used."""
    longest = fields.whole("max_position_embeddings", 32_768)
    scaling = rope.scaling if rope else None
    if scaling is not None and scaling.kind == "longrope":
        return min(longest, scaling.original_max_positions)
    return longest


def _check_heads(spec: ModelSpec, where: str) -> None:
    """Raise CheckpointError for inconsistent sizes."""
    if spec.latent and (spec.kv_heads != spec.heads or spec.latent.value > spec.head_dim):
        raise CheckpointError(
            f"{where}: num_key_value_heads ({spec.kv_heads}) must be num_attention_heads "
            f"({spec.heads}), and v_head_dim ({spec.latent.value}) at most qk_nope_head_dim + "
            f"qk_rope_head_dim ({spec.head_dim}). {COPY_AGAIN}"
        )
    rotated = [int(spec.rotary_dim * k.rope.share) for k in spec.pattern if k.rope]
    if spec.heads % spec.kv_heads or spec.head_dim % 2 or any(r % 2 for r in rotated):
        raise CheckpointError(
            f"{where}: num_attention_heads ({spec.heads}) must be a multiple of "
            f"num_key_value_heads ({spec.kv_heads}), and head_dim ({spec.head_dim}) and its "
            f"rotated part must be even. {COPY_AGAIN}"
        )
    factors = (k.rope.scaling.short_factors for k in spec.pattern if k.rope and k.rope.scaling)
    if any(given and 2 * len(given) not in rotated for given in factors):
        raise CheckpointError(
            f"{where}: short_factor must have one number per rotated pair "
            f"({rotated[0] // 2}). {COPY_AGAIN}"
        )


def _refuse_unsupported(family: Family, fields: ConfigFields) -> None:
    """Raise CheckpointError for a feature that the decoder does not support."""
    usual = HF_ACTIVATIONS[family.activation]
    found = fields.get(family.activation_key, usual)
    if found != usual:
        fields.refuse(f"{family.activation_key} {shown(found)} is not supported, only {usual}.")
    for key, what in family.refused.items():
        if fields.flag(key):
            fields.refuse(f"{key} ({what}) is not supported.")
    for key, number in family.fixed.items():
        if fields.get(key, number) != number:
            fields.refuse(f"{key} {shown(fields.get(key))} is not supported, only {number:g}.")


def _experts(family: Family, fields: ConfigFields) -> int:
    """Return the number of experts in a layer. Raises CheckpointError if a token would use more."""
    key = next((k for k in defaults.expert_keys(family) if k in fields.values), family.experts_key)
    experts, chosen = fields.whole(key), fields.whole("num_experts_per_tok")
    if chosen > experts:
        raise CheckpointError(
            f"{fields.where}: num_experts_per_tok ({chosen}) exceeds {key} ({experts}). "
            f"{COPY_AGAIN}"
        )
    return experts


def hf_config_of(spec: ModelSpec) -> dict[str, Any]:
    """Return a config.json for transformers; for a user's own decoder, only for this package."""
    if spec.own is not None:
        return own_spec.written_own(spec)
    family = FAMILIES[spec.family]
    config: dict[str, Any] = {
        "architectures": [f"{family.classes}ForCausalLM"],
        "model_type": spec.family,
        "vocab_size": spec.vocab,
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.width,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.dense_mlp or spec.mlp,
        "tie_word_embeddings": spec.tied,
        **written_pattern(family, spec.kinds),
        "rms_norm_eps": spec.norm_eps,
        "attention_bias": spec.attention_bias,
        "max_position_embeddings": _written_positions(spec),
        family.activation_key: HF_ACTIVATIONS[spec.activation],
        **family.written_scales(spec.scales),
        **spec.token_ids(),
    }
    if family.grows_queries:
        rope, first = config["rope_parameters"], config["max_position_embeddings"]
        rope |= {"llama_4_scaling_beta": 0.0, "original_max_position_embeddings": first} | rope
    if spec.experts:
        config |= {
            family.experts_key: spec.experts,
            "num_experts_per_tok": spec.experts_per_token,
            family.expert_width_key: spec.mlp,
            **family.written_mixture(spec.mixture),
        }
    if spec.latent:
        nope = spec.head_dim - spec.latent.rotated
        config |= {"qk_nope_head_dim": nope, "head_dim": spec.latent.rotated}
        config |= family.written_latent(spec.latent)
    if spec.delta:
        config |= family.written_delta(spec.delta)
    if family.qk_norm_key:
        config[family.qk_norm_key] = spec.qk_norm != "none"
    return config


def _written_positions(spec: ModelSpec) -> int:
    """Return max_position_embeddings; with LongRoPE it covers the contexts of the long factors."""
    rope = spec.pattern[0].rope
    if rope and rope.scaling and rope.scaling.kind == "longrope":
        return round(rope.scaling.factor * rope.scaling.original_max_positions)
    return spec.max_positions
