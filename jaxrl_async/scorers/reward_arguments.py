"""Find out from a reward function's parameter names what to call it with. Needs no JAX."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import Parameter
from typing import Any

from jaxrl_async.errors import ConfigError, RefusedScore
from jaxrl_async.types import Episode, Prompt

OF_THE_TASK = ("prompt", "reference", "columns")
"""Of the task: the prompt's text, the right answer's text, and the whole record by column."""
OF_ONE = ("completion", "token_ids", "logprobs", "versions", "stop", "episode")
"""Of one answer: its text; its drawn tokens with log-probs and versions; why it ended ("eos",
"length"); all of it as a types.Episode."""
OF_THE_GROUP = ("completions", "group")
"""Of all answers to the prompt: their texts; their Episodes."""
IN_ORDER = ("prompt", "completion", "reference")
"""Arguments, in order, of a function whose three parameters have other names."""
BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardArguments:
    """How to call a reward function."""

    in_order: bool  # its first three parameters get IN_ORDER, whatever their names
    names: tuple[str, ...]  # of the other parameters
    needed: frozenset[str]  # those of `names` without a default
    everything: bool  # it has **kwargs: pass all values
    taken: frozenset[str]  # names not to pass by **kwargs

    @property
    def whole_group(self) -> bool:
        """Whether one call judges all answers to a prompt."""
        return any(name in self.names for name in OF_THE_GROUP)

    def check(self, prompts: Iterable[Prompt], where: str) -> None:
        """Raise ConfigError for a parameter that no value or column of these prompts can fill.

        Also raised for a parameter filled by position but named after a column. The message begins
        with `where`.
        """
        columns = sorted({str(name) for prompt in prompts for name in prompt.columns})
        if self.in_order and (named := sorted((self.taken & set(columns)) - set(IN_ORDER))):
            raise ConfigError(f"{where} {_misnamed(named[0])}")
        known = {*OF_THE_TASK, *(OF_THE_GROUP if self.whole_group else OF_ONE), *columns}
        for name in sorted(self.needed - known):
            near = get_close_matches(name, known, n=1)
            raise ConfigError(
                f"{where} asks for {name!r}, and no record has a column of that name "
                f"(they have: {', '.join(columns) or 'none'}). "
                + (f"Did you mean {near[0]!r}? " if near else "")
                + f"Besides columns there are {', '.join(sorted(known - set(columns)))}. Rename "
                "the parameter or give it a default."
            )

    def given(self, prompt: Prompt, answers: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and named arguments for a call.

        answers: the values named OF_ONE or OF_THE_GROUP. Raises RefusedScore if this prompt's
        record lacks a column.
        """
        values: dict[str, Any] = {
            **{str(name): value for name, value in prompt.columns.items()},
            **{"prompt": prompt.text, "reference": prompt.reference, "columns": prompt.columns},
            **answers,
        }
        if missing := sorted(self.needed - values.keys()):
            raise RefusedScore(
                f"asks for {missing[0]!r}, and the record has no such column (it has: "
                f"{', '.join(map(str, prompt.columns)) or 'none'}). Give the parameter a default."
            )
        wanted = values.keys() - self.taken if self.everything else values.keys() & set(self.names)
        positional = [values[name] for name in IN_ORDER] if self.in_order else []
        return positional, {name: values[name] for name in wanted}


def reward_arguments_of(function: Callable[..., Any], where: str) -> RewardArguments:
    """Find out how to call a function; raise ConfigError, beginning with `where`, if none fits."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # written in C: its names are unknown
        parameters = [Parameter(name, Parameter.POSITIONAL_ONLY) for name in IN_ORDER]
    places = [p for p in parameters if p.kind in (*BY_NAME[:1], Parameter.POSITIONAL_ONLY)]
    named = {p.name for p in parameters if p.kind in BY_NAME}
    everything = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
    any_number = any(p.kind is Parameter.VAR_POSITIONAL for p in parameters)
    one, group = named & set(OF_ONE), named & set(OF_THE_GROUP)
    if one and group:
        raise ConfigError(
            f"{where} asks for {min(one)!r}, which one answer has, and for {min(group)!r}, which "
            "all answers to a prompt have. Ask for one of them."
        )
    by_name = bool(one or group) or (everything and not places and not any_number)
    first = 0 if by_name else len(IN_ORDER)
    required = [p for p in places if p.default is Parameter.empty]
    fits = len(places) >= first or any_number
    nameless = [p for p in places[first:] if p.kind is Parameter.POSITIONAL_ONLY]
    if not fits or any(p in required for p in nameless):
        raise ConfigError(
            f"{where} cannot be called as reward(prompt, completion, reference): it takes "
            f"({', '.join(map(str, parameters))}). Let it take these three, or ask by name for "
            f"what it needs: {', '.join((*OF_TASK_AND_ONE, *OF_THE_GROUP))}, or a column of the "
            "records."
        )
    misplaced = [p for p, own in zip(places, IN_ORDER, strict=False) if p.name != own]
    if not by_name and (wrong := [p.name for p in misplaced if p.name in OF_TASK_AND_ONE]):
        raise ConfigError(f"{where} {_misnamed(wrong[0])}")
    others = [*places[first:], *(p for p in parameters if p.kind is Parameter.KEYWORD_ONLY)]
    return RewardArguments(
        in_order=not by_name,
        names=tuple(p.name for p in others if p.kind in BY_NAME),
        needed=frozenset(p.name for p in others if p.default is Parameter.empty),
        everything=everything,
        taken=frozenset(p.name for p in places[:first]),
    )


def _misnamed(name: str) -> str:
    return (
        f"has a parameter {name!r} that would receive another value: none can be passed by "
        f"the name `completion`, so the first three receive {', '.join(IN_ORDER)}, in order. Name "
        "the one for the answer's text `completion`: then each receives what it is named after."
    )


OF_TASK_AND_ONE = (*OF_THE_TASK, *OF_ONE)


def answer_of(episode: Episode, completion: str) -> dict[str, Any]:
    """Return the values named OF_ONE of an answer whose text is `completion`."""
    drawn = episode.drawn
    return {
        "completion": completion,
        "token_ids": episode.token_ids[drawn],
        "logprobs": episode.logprobs[drawn],
        "versions": episode.versions[drawn],
        "stop": episode.stop.value,
        "episode": episode,
    }
