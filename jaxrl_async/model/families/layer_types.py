"""The kinds of a model's layers from a config.json: windows, rotary positions, linear attention."""

import math
from typing import Any

from jaxrl_async.model.families.family import Family, never
from jaxrl_async.model.families.fields import ConfigFields, shown
from jaxrl_async.model.families.parts import (
    DENSE_STACK,
    LINEAR_STACK,
    LayerKind,
    Rope,
    RopeScaling,
    repeating,
)

FULL, WINDOWED = "full_attention", "sliding_attention"
"""transformers' names for layers without and with a window."""
LONGROPE = ("longrope", "su")
"""Names of LongRoPE; in Phi-3 it may also be called yarn."""


def read_ropes(family: Family, fields: ConfigFields) -> tuple[Rope, Rope]:
    """Return the rotary positions of layers without and with a window, from the old or the new form
    of a config.json. Raises CheckpointError."""
    parts = fields.part("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    of_type = {name: parts.part(name) for name in (FULL, WINDOWED) if parts.has(name)}
    whole = _rope(family, fields, of_type.get(FULL, parts if not of_type else parts.part(FULL)))
    key = family.window_theta_key
    theta = fields.number(key, 10_000.0) if key else None
    if WINDOWED in of_type:
        return whole, _rope(family, fields, of_type[WINDOWED], theta)
    if family.window_rope == "same":
        return whole, whole
    return whole, Rope(theta=whole.theta if theta is None else theta)


def _rope(
    family: Family, fields: ConfigFields, rope: ConfigFields, usual: float | None = None
) -> Rope:
    """Return the positions of one type of layer. usual: default theta if the entry has none; None:
    the theta of all layers."""
    if rope.has("rope_theta") or usual is not None:
        theta = rope.number("rope_theta", usual)
    else:
        theta = fields.number("rope_theta", family.theta)
    share = rope if rope.has("partial_rotary_factor") else fields
    growth = rope.number("llama_4_scaling_beta") if rope.get("llama_4_scaling_beta") else 0.0
    return Rope(
        theta=theta,
        share=share.number("partial_rotary_factor", family.rotary_share),
        scaling=_scaling(family, fields, rope),
        query_growth=growth,
    )


def _scaling(family: Family, fields: ConfigFields, rope: ConfigFields) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind in LONGROPE or (kind == "yarn" and family.joins):
        return _longrope(fields, rope)
    if kind == "linear":
        return RopeScaling(kind="linear", factor=rope.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_positions=rope.whole("original_max_position_embeddings"),
        )
    if kind == "yarn":
        return _yarn(fields, rope)
    fields.refuse(
        f"rope scaling {shown(kind)} is not supported, only default, linear, llama3, yarn and "
        "longrope."
    )
    return None


def _yarn(fields: ConfigFields, rope: ConfigFields) -> RopeScaling:
    original = _original(fields, rope)
    longest = fields.whole("max_position_embeddings", original)
    factor = rope.number("factor", longest / original)
    scale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    magnitude = yarn_magnitude(factor)
    if scale and of_all:
        magnitude = yarn_magnitude(factor, rope.number("mscale"))
        magnitude /= yarn_magnitude(factor, rope.number("mscale_all_dim"))
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        of_scores=rope.number("mscale_all_dim") if of_all else 0.0,
        truncate=rope.flag("truncate", True),
        magnitude=rope.number("attention_factor", magnitude),
    )


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's factor of cos and sin (arXiv:2309.00071, eq. 22)."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(fields: ConfigFields, rope: ConfigFields) -> RopeScaling:
    original = _original(fields, rope)
    factor = fields.whole("max_position_embeddings", original) / original
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_max_positions=original,
        magnitude=rope.number("attention_factor", magnitude),
        short_factors=rope.numbers("short_factor"),
        long_factors=rope.numbers("long_factor"),
    )


def _original(fields: ConfigFields, rope: ConfigFields) -> int:
    key = "original_max_position_embeddings"
    source = rope if rope.has(key) else fields
    return source.whole(key, fields.get("max_position_embeddings"))


def written_ropes(family: Family, whole: Rope | None, windowed: Rope | None) -> dict[str, Any]:
    """Return the entries of config.json for the rotary positions of layers without and with a
    window; None: no such layer."""
    first = whole or windowed or Rope()
    rope = _written(family, first)
    config: dict[str, Any] = {"rope_theta": first.theta, "rope_parameters": rope}
    if first.scaling:
        config["rope_scaling"] = rope
    if _has_share(family, first):
        config["partial_rotary_factor"] = first.share
    if first.scaling and first.scaling.kind == "longrope":
        config["original_max_position_embeddings"] = first.scaling.original_max_positions
    if family.window_rope == "unscaled":
        local = windowed or Rope(theta=10_000.0 if family.window_theta_key else first.theta)
        config["rope_parameters"] = {FULL: rope, WINDOWED: _written(family, local)}
        if family.window_theta_key:
            config[family.window_theta_key] = local.theta
    return config


def _has_share(family: Family, rope: Rope) -> bool:
    """Return whether config.json must contain the rotated share of a head."""
    return rope.share != 1 or family.rotary_share != 1


def _written(family: Family, rope: Rope) -> dict[str, Any]:
    """Return one entry of rope_parameters."""
    entries: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": "default"}
    if _has_share(family, rope):
        entries["partial_rotary_factor"] = rope.share
    if rope.query_growth:
        entries["llama_4_scaling_beta"] = rope.query_growth
    s = rope.scaling
    if s is None:
        return entries
    entries |= {"rope_type": s.kind, "factor": s.factor}
    if s.kind == "linear":
        return entries
    entries["original_max_position_embeddings"] = s.original_max_positions
    if s.kind == "llama3":
        low, high = s.low_freq_factor, s.high_freq_factor
        return entries | {"low_freq_factor": low, "high_freq_factor": high}
    entries["attention_factor"] = s.magnitude
    if s.kind == "longrope":
        factors = {"short_factor": list(s.short_factors), "long_factor": list(s.long_factors)}
        return entries | factors
    entries |= {"beta_fast": s.beta_fast, "beta_slow": s.beta_slow}
    if s.of_scores:
        entries["mscale_all_dim"] = s.of_scores
    return entries if s.truncate else entries | {"truncate": False}


LINEAR = "linear_attention"
"""transformers' name for layers with a gated delta net."""


def read_pattern(family: Family, fields: ConfigFields, layers: int) -> tuple[LayerKind, ...]:
    """Return the pattern of layers. Raises CheckpointError."""
    if family.linear is not never:
        return _pattern_with_linear(family, fields, layers)
    is_listed = family.lists_layers and fields.has("layer_types")
    window = 0
    if fields.has("sliding_window") and fields.get("sliding_window") != 0:
        window = fields.whole("sliding_window")
    elif "sliding_window" not in fields.values:
        window = family.window
    if is_listed:
        types = fields.names("layer_types", (FULL, WINDOWED), layers)
        windowed = [name == WINDOWED for name in types]
    else:
        windowed = [bool(window) and family.windowed(fields, i) for i in range(layers)]
    if any(windowed) and not window:
        raise fields.wrong("sliding_window", f"the window of the {WINDOWED} in layer_types")
    whole, local = read_ropes(family, fields)
    kinds = (
        LayerKind(
            window=window if near else 0,
            rope=(local if near else whole) if family.rotated(fields, i) else None,
            stack=DENSE_STACK if family.routed and family.dense(fields, i) else "layers",
        )
        for i, near in enumerate(windowed)
    )
    return repeating(tuple(kinds))


def _pattern_with_linear(
    family: Family, fields: ConfigFields, layers: int
) -> tuple[LayerKind, ...]:
    """Return the pattern of layers with attention or a gated delta net. Raises CheckpointError."""
    if fields.has("layer_types"):
        linear = [name == LINEAR for name in fields.names("layer_types", (FULL, LINEAR), layers)]
    else:
        linear = [family.linear(fields, i) for i in range(layers)]
    rope, _ = read_ropes(family, fields)
    kinds = (
        LayerKind(rope=None, stack=LINEAR_STACK) if x else LayerKind(rope=rope) for x in linear
    )
    return repeating(tuple(kinds))


def written_pattern(family: Family, kinds: tuple[LayerKind, ...]) -> dict[str, Any]:
    """Return the entries of config.json for all layers of a model."""
    windows = {kind.window for kind in kinds if kind.window}
    of_type = {
        name: next((k.rope for k in kinds if k.rope and bool(k.window) == near), None)
        for name, near in ((FULL, False), (WINDOWED, True))
    }
    config = written_ropes(family, of_type[FULL], of_type[WINDOWED])
    if family.linear is not never:
        return config | {"layer_types": [LINEAR if kind.is_linear else FULL for kind in kinds]}
    config |= {"sliding_window": next(iter(windows), None), "use_sliding_window": bool(windows)}
    if family.lists_layers:
        config["layer_types"] = [WINDOWED if kind.window else FULL for kind in kinds]
        first = next((i for i, kind in enumerate(kinds) if kind.window), len(kinds))
        config["max_window_layers"] = first
    if any(kind.rope is None for kind in kinds):
        config["no_rope_layers"] = [int(kind.rope is not None) for kind in kinds]
    return config
