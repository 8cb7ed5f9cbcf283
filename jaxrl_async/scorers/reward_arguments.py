"""Derive the arguments of a reward function from its parameter names. Needs no JAX.

def f(completion, answer)              one answer: texts, and the record's columns unchanged
def f(prompts, completions, answer)    all answers to a prompt: each a list, one item per answer
def f(group, answer)                   all answers as Episodes: the record's columns unchanged
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import Parameter
from typing import Any

from jaxrl_async.errors import ConfigError, RefusedScore
from jaxrl_async.types import Episode, Prompt
from jaxrl_async.user_arguments import copied, copied_columns, read_only

OF_THE_TASK = ("prompt", "reference", "columns")
"""Values of the task: the prompt's text, the correct answer's text, the whole record by column."""
OF_THE_RUN = ("step", "trainer_state", "log_metric")
"""Values of the run: the number of updates of the newest weights, the same as TRL's trainer state,
and a function of a name and a number that reports the number's mean as the metric logged/NAME."""
OF_ONE = ("completion", "token_ids", "logprobs", "versions", "stop", "episode")
"""Values of one answer: its text; its generated tokens with log-probs and versions; why it ended
("eos", "length"); all of it as a types.Episode."""
LISTS = ("prompts", "completions", "completion_ids")
"""Values of all answers to the prompt, a list each: the prompt, once for each answer; the answers;
their generated tokens. Prompts and answers are texts, or lists of messages if the record's prompt
is one."""
OF_THE_GROUP = (*LISTS, "group")
"""The lists, and the answers as Episodes."""
OF_BOTH = ("messages",)
"""The conversation with its prompt, as chat messages; for all answers a list of them."""
IN_ORDER = ("prompt", "completion", "reference")
"""Arguments, in order, of a function whose three parameters have other names."""
OF_VERL: Mapping[str, str] = {"solution_str": "completion", "ground_truth": "reference"}
"""verl's names for two values, used if a function of one answer has a parameter `solution_str`. A
column of the records with such a name has priority."""
POSITIONS: Mapping[str, int | None] = {
    **dict.fromkeys(("question", "query", "problem", "prompt_str"), 0),
    **dict.fromkeys(("response", "response_str", "solution_str", "output"), 1),
    **dict.fromkeys(("generation", "prediction", "pred"), 1),
    **dict.fromkeys(("ground_truth", "label", "solution", "target", "gold", "expected"), 2),
    **dict.fromkeys(("responses", "solution_strs", "outputs", "queries", "data_source"), None),
}
"""Other common names of parameters, and the position in IN_ORDER that each fits; None: no
position."""
NOT_PASSED: Mapping[str, str] = {
    "log_extra": "`log_metric` reports numbers; the run's samples show prompts and answers",
    "environments": "`episode` and `messages` contain what happened in an environment",
}
"""TRL values that are not passed, and their alternatives."""
BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The fields of `trainer_state` that TRL rewards read."""

    global_step: int  # updates so far
    max_steps: int  # updates of the whole run; 0: not known


class SharedText(str):
    """A text that all answers share. It cannot be iterated: zip() or an index would pair each
    answer with one of its characters."""

    def __iter__(self) -> Any:
        """Raise TypeError with the names of parameters to use."""
        raise TypeError(
            "`prompt` and `reference` are one text for all answers. Use a parameter `prompts`, or "
            "the column of the records, which is a list with one item per answer."
        )

    def __getitem__(self, key: object) -> str:
        """Return a slice, or raise the same TypeError for an index, which counts answers."""
        return super().__getitem__(key) if isinstance(key, slice) else self.__iter__()


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardArguments:
    """The signature of a reward function, and the values that it receives."""

    whole_group: bool  # one call judges all answers to a prompt
    in_lists: bool  # the record's columns are lists, one item per answer
    in_order: bool  # its first three parameters get IN_ORDER regardless of their names
    names: tuple[str, ...]  # names of the other parameters
    needed: frozenset[str]  # the `names` without a default
    everything: bool  # it has **kwargs: pass all values
    taken: frozenset[str]  # names not to pass in **kwargs

    def asks_for(self, name: str) -> bool:
        """Return whether the function receives a value of that name."""
        return self.everything or name in self.names

    @property
    def of_verl(self) -> bool:
        """Whether the function has verl's names of OF_VERL."""
        return "solution_str" in self.names and not self.whole_group

    def check(self, prompts: Iterable[Prompt], where: str) -> None:
        """Raise ConfigError for a parameter that no value or column of these prompts can fill.

        Also raised for a parameter filled by position but named after a column, and for one that
        may mean a column as well as a value of the run. The message begins with `where`.
        """
        columns = sorted({str(name) for prompt in prompts for name in prompt.columns})
        if self.in_order and (named := sorted((self.taken & set(columns)) - set(IN_ORDER))):
            raise ConfigError(f"{where} {_misnamed(named[0])}")
        if both := [name for name in OF_THE_RUN if name in self.names and name in columns]:
            raise ConfigError(
                f"{where} asks for {both[0]!r}, which is a column of the records as well as a "
                "value of the run. Rename the column, or ask for `columns`."
            )
        own = (*OF_THE_TASK, *OF_THE_RUN, *OF_BOTH)
        own = (*own, *(OF_VERL if self.of_verl else ()))
        known = {*own, *(OF_THE_GROUP if self.whole_group else OF_ONE), *columns}
        for name in sorted(self.needed - known):
            if name in NOT_PASSED:
                raise ConfigError(
                    f"{where} asks for {name!r}, which TRL passes and this library does not. Give "
                    f"the parameter a default, such as None ({NOT_PASSED[name]})."
                )
            near = get_close_matches(name, known, n=1)
            raise ConfigError(
                f"{where} asks for {name!r}, and no record has a column of that name "
                f"(they have: {', '.join(columns) or 'none'}). "
                + (f"Did you mean {near[0]!r}? " if near else "")
                + f"Other names are {', '.join(sorted(known - set(columns)))}. Rename "
                "the parameter or give it a default."
            )

    def arguments_of(
        self, prompt: Prompt, answers: Mapping[str, object], count: int
    ) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and named arguments for a call, which the function may change.

        Args:
            prompt: the task.
            answers: the other values, by name.
            count: number of answers in a list.

        Raises RefusedScore if this prompt's record lacks a column.
        """
        columns = {str(name): value for name, value in prompt.columns.items()}
        texts = {"prompt": prompt.text, "reference": prompt.reference}
        if self.of_verl:
            own = {**texts, **answers}
            columns = {name: own[meant] for name, meant in OF_VERL.items()} | columns
        known = {*columns, *texts, "columns", *answers}
        if missing := sorted(self.needed - known):
            raise RefusedScore(
                f"asks for {missing[0]!r}, and the record has no such column (it has: "
                f"{', '.join(columns) or 'none'}). Give the parameter a default."
            )

        def value_of(name: str) -> Any:
            """Return an argument: a value of the run rather than a column, except for a list of
            references."""
            if name == "columns":
                return copied_columns(prompt.columns)
            if name in answers:
                return answers[name]
            own = ("prompt",) if self.in_lists else tuple(texts)
            if name in columns and name not in own:
                what = f"the column {name!r}"
                if self.in_lists:
                    return [copied(columns[name], what) for _ in range(count)]
                return copied(columns[name], what)
            return SharedText(texts[name]) if self.in_lists else texts[name]

        passed = known - self.taken if self.everything else known & set(self.names)
        positional = [value_of(name) for name in IN_ORDER] if self.in_order else []
        return positional, {name: value_of(name) for name in passed}


def reward_arguments_of(function: Callable[..., object], where: str) -> RewardArguments:
    """Derive how to call a function; raise ConfigError, beginning with `where`, if that fails."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # written in C: its names are unknown
        parameters = [Parameter(name, Parameter.POSITIONAL_ONLY) for name in IN_ORDER]
    positional = [p for p in parameters if p.kind in (*BY_NAME[:1], Parameter.POSITIONAL_ONLY)]
    named = {p.name for p in parameters if p.kind in BY_NAME}
    everything = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
    any_number = any(p.kind is Parameter.VAR_POSITIONAL for p in parameters)
    one, group = named & set(OF_ONE), named & set(OF_THE_GROUP)
    if one and group == {"prompts"}:  # a column of the records
        group = set()
    if one and group:
        raise ConfigError(
            f"{where} asks for {min(one)!r}, which belongs to one answer, and for {min(group)!r}, "
            "which belongs to all answers to a prompt. Ask for one of them."
        )
    by_name = bool(one or group or named & {*OF_BOTH, "solution_str"}) or (
        everything and not positional and not any_number
    )
    first = 0 if by_name else len(IN_ORDER)
    required = [p for p in positional if p.default is Parameter.empty]
    fits = len(positional) >= first or any_number
    nameless = [p for p in positional[first:] if p.kind is Parameter.POSITIONAL_ONLY]
    if not fits or any(p in required for p in nameless):
        raise ConfigError(
            f"{where} cannot be called as reward(prompt, completion, reference): it takes "
            f"({', '.join(map(str, parameters))}). Give it these three parameters, or name "
            f"parameters after values: {', '.join((*OF_TASK_AND_ONE, *OF_BOTH, *OF_THE_GROUP))}, "
            "or a column of the records."
        )
    misplaced = [p for p, own in zip(positional, IN_ORDER, strict=False) if p.name != own]
    wrong = [p.name for p in misplaced if p.name in OF_TASK_AND_ONE]
    wrong += [p.name for i, p in enumerate(positional[:first]) if POSITIONS.get(p.name, i) != i]
    if not by_name and wrong:
        raise ConfigError(f"{where} {_misnamed(wrong[0])}")
    others = [*positional[first:], *(p for p in parameters if p.kind is Parameter.KEYWORD_ONLY)]
    return RewardArguments(
        whole_group=bool(group),
        in_lists=bool(group & set(LISTS)),
        in_order=not by_name,
        names=tuple(p.name for p in others if p.kind in BY_NAME),
        needed=frozenset(p.name for p in others if p.default is Parameter.empty),
        everything=everything,
        taken=frozenset(p.name for p in positional[:first]),
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
    borrowed = read_only(episode)
    sampled = borrowed.drawn
    return {
        "completion": completion,
        "token_ids": borrowed.token_ids[sampled],
        "logprobs": borrowed.logprobs[sampled],
        "versions": borrowed.versions[sampled],
        "stop": borrowed.stop.value,
        "episode": borrowed,
    }


def answers_of(
    episodes: Sequence[Episode], completions: Sequence[object], prompt: object
) -> dict[str, Any]:
    """Return the values named OF_THE_GROUP.

    Args:
        episodes: the answers.
        completions: the same as texts, or as lists of messages.
        prompt: in the same form.
    """
    return {
        "prompts": [copied(prompt) for _ in episodes],
        "completions": list(completions),
        "completion_ids": [e.token_ids[e.drawn].tolist() for e in episodes],
        "group": tuple(map(read_only, episodes)),
    }
