"""The kinds of a model's layers from a config.json: windows, rotary positions, linear attention."""

from typing import Any

from jaxrl_async.model.families.family import Family, never
from jaxrl_async.model.families.fields import ConfigFields
from jaxrl_async.model.families.parts import DENSE_STACK, LINEAR_STACK, LayerKind, repeating
from jaxrl_async.model.families.ropes import FULL, WINDOWED, read_ropes, written_ropes

LINEAR = "linear_attention"
"""transformers' name for layers with a gated delta net."""


def read_pattern(family: Family, fields: ConfigFields, layers: int) -> tuple[LayerKind, ...]:
    """Return the pattern of layers. Raises CheckpointError."""
    if family.linear is not never:
        return _pattern_with_linear(family, fields, layers)
    said = family.lists_layers and fields.has("layer_types")
    window = 0
    if fields.has("sliding_window") and fields.said("sliding_window") != 0:
        window = fields.whole("sliding_window")
    elif "sliding_window" not in fields.values:
        window = family.window
    if said:
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
