"""Every argument of every registered function has a range, and docs/functions.md tells it."""

import math
import re
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

import pytest

from jaxrl_async.algorithms.advantages import advantage
from jaxrl_async.algorithms.aggregate import aggregate
from jaxrl_async.algorithms.corrections import correction
from jaxrl_async.algorithms.kl import kl
from jaxrl_async.algorithms.loss_components import component
from jaxrl_async.algorithms.losses import supervised_loss, token_loss
from jaxrl_async.algorithms.preference_losses import preference_loss
from jaxrl_async.algorithms.registry import (
    defaults_of,
    range_of,
    rules_of,
    settings_of,
    types_of,
)
from jaxrl_async.algorithms.shaping import shaping
from jaxrl_async.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs/functions.md"
REGISTRIES = [
    token_loss, supervised_loss, correction, advantage, shaping, kl, aggregate, preference_loss,
    component,
]  # fmt: skip
ARGUMENTS = [
    (registry, name, key)
    for registry in REGISTRIES
    for name in sorted(registry)
    for key in settings_of(registry[name])
]
NEEDED = {"max_tokens": 8, "cache_tokens": 2, "low": 0, "high": 2, "keep": 2, "divisor": 8}

each = pytest.mark.parametrize(
    ("registry", "name", "key"), ARGUMENTS, ids=[f"{n}-{k}" for _, n, k in ARGUMENTS]
)


def has_range(kind) -> bool:
    """Return whether a type restricts its values: a number needs a range."""
    if get_origin(kind) is Annotated:
        return any(getattr(note, "metadata", note) for note in kind.__metadata__)
    inner = [k for k in get_args(kind) if k is not ...]
    if get_origin(kind) is Literal or not inner:
        return get_origin(kind) is Literal or kind in (bool, str, type(None))
    return all(has_range(k) for k in inner)


def with_needed(function, **given):
    """These arguments, and something for each that has no default."""
    needed = settings_of(function).keys() - defaults_of(function).keys()
    return {key: NEEDED[key] for key in needed} | given


def told(function) -> str:
    """The arguments of a function with default and range, and the rules between them."""
    defaults, parts = defaults_of(function), []
    for key, kind in types_of(function).items():
        within = re.sub("([<>]=?) ", r"\1", range_of(kind)).replace(" and ", ", ")
        within = re.sub("^float (?=[<>])", "", within)
        parts.append(f"`{key}` {defaults.get(key, 'needed')!s} ({within})")
    return "; ".join([*parts, *(rule.says for rule in rules_of(function))])


def table() -> list[str]:
    """The lines of docs/functions.md: one for all functions of a setting with equal arguments."""
    lines = []
    for registry in REGISTRIES:
        if registry is supervised_loss:  # nothing to choose
            continue
        names: dict[str, list[str]] = {}
        for name in sorted(registry):
            names.setdefault(told(registry[name]) or "none", []).append(f"`{name}`")
        lines += [
            f"| `{registry.setting}` | {', '.join(n)} | {text} |" for text, n in names.items()
        ]
    return lines


@each
def test_an_argument_has_a_range_and_its_default_is_within(registry, name, key):
    function = registry[name]
    assert has_range(types_of(function)[key]), (
        f"{registry.kind} {name}: give {key} a range, such as Annotated[float, Field(ge=0)]"
    )
    if key in defaults_of(function):
        registry.resolve({name: with_needed(function, **{key: defaults_of(function)[key]})})


BEYOND = {"gt": 0.0, "ge": -1.0, "lt": 0.0, "le": 1.0}
"""From a bound to a value that it refuses."""


@each
def test_what_is_beyond_a_bound_is_refused_with_setting_argument_value_and_range(
    registry, name, key
):
    function = registry[name]
    kind = types_of(function)[key]
    notes = getattr(kind, "__metadata__", ())
    limits = [m for note in notes for m in note.metadata]
    bad = [getattr(m, sign) + by for m in limits for sign, by in BEYOND.items() if hasattr(m, sign)]
    bad += ["text", True, None, math.inf, math.nan] if notes else []
    for value in bad:
        with pytest.raises(ConfigError) as refused:
            registry.resolve({name: with_needed(function, **{key: value})})
        for part in (f"{registry.setting}: ", repr(name), f"{key} must be {range_of(kind)}"):
            assert part in str(refused.value)
        assert repr(value) in str(refused.value)


@pytest.mark.parametrize(
    ("registry", "choice", "told"),
    [
        (token_loss, {"ppo_clip": {"dual_clip": 1.0}}, "dual_clip must be 0 or above 1"),
        (token_loss, {"ppo_clip": {"dual_clip": 0.5}}, "dual_clip is 0.5"),
        (shaping, {"soft_overlong": {"max_tokens": 4, "cache_tokens": 5}}, "at most max_tokens"),
        (shaping, {"cap": {"low": 1, "high": 1}}, "low must be below high; low is 1, high is 1"),
        (shaping, {"downsample": {"keep": 8}}, "below algorithm.group_size"),
        (advantage, {"pass_at_k": {"k": 9}}, "k is 9, group_size is 8"),
        (advantage, {"grpo_lead": {"lowest": 2}}, "lowest must be at most highest"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_a_rule_between_arguments_is_checked_with_the_defaults_and_the_runs_settings(
    registry, choice, told
):
    with pytest.raises(ConfigError) as refused:
        registry.resolve(choice, group_size=8)
    assert told in str(refused.value) and registry.setting in str(refused.value)


@pytest.mark.parametrize(
    ("registry", "choice"),
    [
        (token_loss, {"ppo_clip": {"dual_clip": 1.01}}),
        (shaping, {"soft_overlong": {"max_tokens": 4, "cache_tokens": 4}}),
        (shaping, {"downsample": {"keep": 7}}),
        (advantage, {"pass_at_k": {"k": 8}}),
        (advantage, {"grpo_lead": {"lowest": 1.5}}),
    ],
    ids=lambda v: str(v)[:40],
)
def test_what_a_rule_just_allows_is_taken(registry, choice):
    registry.resolve(choice, group_size=8)


def test_the_documentation_lists_every_argument_with_default_and_range():
    text = DOCS.read_text(encoding="utf-8")
    listed = [line for line in text.splitlines() if line.startswith("| `")]
    assert listed == table(), "docs/functions.md needs these lines:\n" + "\n".join(table())
