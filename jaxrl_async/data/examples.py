"""Examples for supervised and preference training, and the endless, resumable stream of them.

    records ──tokenise──> Split(train, held_out)      train ──seed, shuffle, repeat──> ExampleStream

An example is a `Demonstration` (a prompt with the answer to imitate) or a
`preferences.PreferencePair` (a prompt with a better and a worse answer).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from jaxrl_async.config.schema import DataSection
from jaxrl_async.data.addition import (
    HELD_OUT_SEED,
    AdditionStream,
    Problem,
    held_out,
    worked_answer,
    wrong_answer,
)
from jaxrl_async.data.preferences import PreferencePair, read_preferences
from jaxrl_async.data.prompts import (
    AdditionSource,
    Bad,
    jsonl_split,
    parse_record,
    place_in,
    read_lines,
    shuffled,
    supervised_pair,
)
from jaxrl_async.data.tokenizer import BARE, Tokenizer, check_template
from jaxrl_async.errors import ConfigError, DataError
from jaxrl_async.types import BoolArray, IntArray

Demonstration = tuple[IntArray, BoolArray]
"""token_ids [length] of prompt, answer and end token; mask [length], True for what is learnt."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Examples(Protocol[T_co]):
    """Examples by number; made when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


@dataclass(frozen=True, slots=True)
class ExampleSplit(Generic[T]):
    """What is trained on, and what is only measured on."""

    train: Examples[T]
    held_out: Sequence[T]


@dataclass(frozen=True, slots=True)
class _Made(Generic[T]):
    """`make` of each number below `length`."""

    make: Callable[[int], T]
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int, /) -> T:
        return self.make(index)


class ExampleStream(Generic[T]):
    """Endless examples, shuffled anew in each pass; its whole state is how far it has come."""

    def __init__(self, examples: Examples[T], seed: int) -> None:
        self._dataset: Any = shuffled(examples, seed)
        self._identity = {"seed": seed, "num_records": len(examples)}
        self._next = 0

    def take(self, count: int) -> list[T]:
        """The next `count` examples."""
        self._next += count
        return [self._dataset[i][1] for i in range(self._next - count, self._next)]

    def state(self) -> dict[str, int]:
        """How far the stream has come, and which stream it is; JSON."""
        return {**self._identity, "next": self._next}

    def restore(self, state: dict[str, int]) -> None:
        """Go on where `state` was taken. Raises DataError where that was another stream."""
        self._next = place_in(self._identity, state, "examples")


# --- demonstrations ------------------------------------------------------------------------------


def demonstrations(
    data: DataSection, tokenizer: Tokenizer, seed: int, row_length: int
) -> ExampleSplit[Demonstration]:
    """Prompts with the answers to imitate, within row_length tokens. DataError, ConfigError.

    Of the embedded task: worked answers, the sum alone for 1 - data.addition.worked_share.
    """
    if data.source == "jsonl":
        return _read(data, lambda path: _read_demonstrations(path, data, tokenizer, row_length))
    section = data.addition
    _check_longest(section.digits, tokenizer, row_length)
    train = AdditionSource(AdditionStream(section, seed), tokenizer, section.worked_share)
    held = AdditionSource(
        held_out(section.digits, section.eval_size), tokenizer, section.worked_share
    )
    return ExampleSplit(
        _Made(lambda i: supervised_pair(train[i], tokenizer), len(train)),
        [supervised_pair(held[i], tokenizer) for i in range(len(held))],
    )


def _read_demonstrations(
    path: str, data: DataSection, tokenizer: Tokenizer, row_length: int
) -> list[Demonstration]:
    section = data.jsonl
    if section.template is not None:
        check_template(section.template)

    def parse(line: bytes) -> Demonstration | Bad:
        record = parse_record(line, section, tokenizer, data.max_prompt_tokens, taught=True)
        if isinstance(record, Bad):
            return record
        pair = supervised_pair(record, tokenizer)
        return Bad.PAIR_TOO_LONG if len(pair[0]) > row_length else pair

    return read_lines(
        path,
        parse,
        section.max_bad_share,
        "set data.jsonl.prompt_field, data.jsonl.answer_field, data.max_prompt_tokens, "
        "trainer.row_length or data.jsonl.max_bad_share",
    )


# --- preferences ---------------------------------------------------------------------------------


def preferences(
    data: DataSection, tokenizer: Tokenizer, seed: int, row_length: int, *, halves: bool
) -> ExampleSplit[PreferencePair]:
    """Prompts with a better and a worse answer, either at most row_length tokens with its prompt.

    Of the embedded task: the worked answer against one of data.addition.wrong_answer. halves:
    whether answers that were judged alone can be used. Raises DataError, ConfigError.
    """
    if data.source == "jsonl":
        return _read(
            data, lambda path: _read_pairs(path, data, tokenizer, row_length, halves=halves)
        )
    section = data.addition
    _check_longest(section.digits, tokenizer, row_length)
    problems = AdditionStream(section, seed)
    return ExampleSplit(
        _Made(lambda i: _addition_pair(problems[i], (seed, i), tokenizer), len(problems)),
        [
            _addition_pair(problem, (HELD_OUT_SEED, i), tokenizer)
            for i, problem in enumerate(held_out(section.digits, section.eval_size))
        ],
    )


def _addition_pair(problem: Problem, seed: tuple[int, int], tokenizer: Tokenizer) -> PreferencePair:
    prompt, worked = problem.prompt, worked_answer(problem.a, problem.b)
    wrong = wrong_answer(problem, np.random.default_rng([*seed, 1]))
    return PreferencePair(
        prompt_ids=tokenizer.encode_prompt(prompt, BARE),
        chosen_ids=tokenizer.encode_answer(prompt, worked, BARE),
        rejected_ids=tokenizer.encode_answer(prompt, wrong, BARE),
    )


def _read_pairs(
    path: str, data: DataSection, tokenizer: Tokenizer, row_length: int, *, halves: bool
) -> list[PreferencePair]:
    pairs = read_preferences(
        path,
        tokenizer,
        max_tokens=row_length,
        max_prompt_tokens=data.max_prompt_tokens,
        template=data.jsonl.template,
        max_bad_share=data.jsonl.max_bad_share,
    )
    alone = sum(len(pair.answers) == 1 for pair in pairs)
    if alone and not halves:
        raise DataError(
            f"{path}: {alone} of {len(pairs)} records have one answer with a label, from which "
            "only run.job=preference with preference.loss=kto can learn. Set these, or give "
            "records with chosen and rejected."
        )
    return pairs


# --- both ----------------------------------------------------------------------------------------


def _read(data: DataSection, read: Callable[[str], list[T]]) -> ExampleSplit[T]:
    """Both splits of the record files, each file read once."""
    once = cache(read)
    train = jsonl_split(data.jsonl, "train", once)
    return ExampleSplit(train, jsonl_split(data.jsonl, "eval", once))


def _check_longest(digits: int, tokenizer: Tokenizer, row_length: int) -> None:
    """Raise ConfigError where a problem of so many digits does not fit a row."""
    problem = Problem(a=10**digits - 1, b=10**digits - 1)
    answer = worked_answer(problem.a, problem.b)
    longest = len(tokenizer.encode_prompt(problem.prompt, BARE))
    longest += len(tokenizer.encode_answer(problem.prompt, answer, BARE))
    if longest > row_length:
        raise ConfigError(
            f"data.addition.digits = {digits} makes examples of up to {longest} tokens, but a "
            f"training row has {row_length}. Lower it, or raise trainer.row_length or, where that "
            "is null, sampler.max_length."
        )
