"""Examples for supervised and preference training, and their endless, resumable stream.

    records ──tokenize──> Split(train, held_out)      train ──seed, shuffle, repeat──> ExampleStream

An example is a `Demonstration` (a prompt with the answer to imitate) or a
`preferences.PreferencePair` (a prompt with a better and a worse answer).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
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
from jaxrl_async.data.prompts import digest_of, saved_position, shuffled
from jaxrl_async.data.record_files import Bad, BadRecord, parse_rows
from jaxrl_async.data.records import (
    FIELDS,
    AdditionSource,
    OwnRecords,
    Record,
    RecordReader,
    jsonl_split,
    refused_as,
    supervised_pair,
)
from jaxrl_async.data.tokenizer import BARE, Tokenizer
from jaxrl_async.errors import ConfigError, DataError, TextTooLong
from jaxrl_async.types import BoolArray, IntArray

Demonstration = tuple[IntArray, BoolArray]
"""token_ids [length] of prompt, answer and end token; mask [length], True for trained tokens."""

log = logging.getLogger(__name__)

MOST_LEFT_OUT = 10_000
"""Number of consecutive examples that do not fit after which it is assumed that none does."""
TOO_LONG = "are longer than a training row. Raise trainer.row_length or sampler.max_length."

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Examples(Protocol[T_co]):
    """Examples by index, created on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


@dataclass(frozen=True, slots=True)
class ExampleSplit(Generic[T]):
    """Training examples, and held-out ones for evaluation."""

    train: Examples[T]
    held_out: Sequence[Any]


@dataclass(frozen=True, slots=True)
class _Made(Generic[T]):
    """The results of `make` for the indices below `length`."""

    make: Callable[[int], T]
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int, /) -> T:
        return self.make(index)


class ExampleStream(Generic[T]):
    """An endless stream of examples, reshuffled in each pass; its only state is the position."""

    def __init__(self, examples: Examples[T | None], seed: int) -> None:
        """An example of None does not fit: it is skipped and logged."""
        self._dataset: Any = shuffled(examples, seed)
        self._identity = {
            "seed": seed,
            "num_records": len(examples),
            "records_digest": digest_of(examples),
        }
        self._count = len(examples)
        self._next = self._left_out = 0

    def take(self, count: int) -> list[T]:
        """Return the next `count` examples. Raises DataError if none fits."""
        taken: list[T] = []
        out_in_row = 0
        while len(taken) < count:
            example = self._dataset[self._next][1]
            self._next += 1
            if example is not None:
                taken.append(example)
                out_in_row = 0
                continue
            out_in_row += 1
            self._leave_out(out_in_row)
        return taken

    def _leave_out(self, in_row: int) -> None:
        self._left_out += 1
        if in_row >= min(self._count, MOST_LEFT_OUT):
            raise DataError(f"{in_row} examples in a row {TOO_LONG}")
        if self._left_out == 1 or self._left_out % 100 == 0:
            log.warning(
                "skipped %d examples so far that are longer than a training row", self._left_out
            )

    def state(self) -> dict[str, Any]:
        """Return the position and the stream's identity, as JSON."""
        return {**self._identity, "next": self._next}

    def restore(self, state: Mapping[str, object]) -> None:
        """Continue from a saved state; raise DataError if it is of a different stream."""
        self._next = saved_position(self._identity, state, "examples")


# --- demonstrations ------------------------------------------------------------------------------


def demonstrations(
    data: DataSection, tokenizer: Tokenizer, seed: int, most_tokens: int
) -> ExampleSplit[Demonstration]:
    """Return prompts with target answers, of at most `most_tokens` tokens.

    The embedded task provides answers with the work, and only the sum for a share of 1 -
    data.addition.worked_share of its problems. Raises DataError or ConfigError.
    """
    if (section := data.problems) is None:
        return _read(data, lambda path: _read_demonstrations(path, data, tokenizer, most_tokens))
    _check_longest(section.digits, tokenizer, most_tokens)
    train = AdditionSource(AdditionStream(section, seed), tokenizer, section.worked_share)
    held = AdditionSource(
        held_out(section.digits, section.eval_size), tokenizer, section.worked_share
    )
    return ExampleSplit(
        _Made(lambda i: supervised_pair(train[i], tokenizer), len(train)),
        [supervised_pair(held[i], tokenizer) for i in range(len(held))],
    )


def _read_demonstrations(
    path: str, data: DataSection, tokenizer: Tokenizer, most_tokens: int
) -> list[Demonstration]:
    reader = RecordReader(data, tokenizer, taught=True)

    def parse(fields: Mapping[str, object]) -> Demonstration:
        record = reader.record(fields)
        with refused_as(Bad.PAIR_TOO_LONG):
            pair = supervised_pair(record, tokenizer)
        if len(pair[0]) > most_tokens:
            raise BadRecord(
                Bad.PAIR_TOO_LONG, f"{len(pair[0])} tokens, but only {most_tokens} are allowed"
            )
        return pair

    return parse_rows(
        path,
        parse,
        data.record_fields.max_bad_share,
        FIELDS,
    )


def own_demonstrations(
    own: OwnRecords, tokenizer: Tokenizer, most_tokens: int
) -> ExampleSplit[Demonstration | None]:
    """Return a task's demonstrations, created on demand; None for one that is too long.

    Held-out demonstrations that are too long are skipped and logged. Raises DataError if a record
    has no target answer, or if no held-out demonstration fits.
    """

    def fitting(record: Record) -> Demonstration | None:
        try:
            pair = supervised_pair(record, tokenizer)
        except TextTooLong:
            return None
        return pair if len(pair[0]) <= most_tokens else None

    train, held = own.source("train", taught=True), own.source("eval", taught=True)
    fitting(train[0])  # reports missing parts at the start
    made = [fitting(held[i]) for i in range(len(held))]
    kept = [pair for pair in made if pair is not None]
    if not kept:
        raise DataError(f"all {len(made)} held-out conversations of the task {TOO_LONG}")
    if len(kept) < len(made):
        log.warning(
            "skipped %d of %d held-out conversations that are longer than a training row",
            len(made) - len(kept),
            len(made),
        )
    return ExampleSplit(_Made(lambda i: fitting(train[i]), len(train)), kept)


# --- preferences ---------------------------------------------------------------------------------


def preferences(
    data: DataSection, tokenizer: Tokenizer, seed: int, most_tokens: int, *, halves: bool
) -> ExampleSplit[PreferencePair]:
    """Return prompts with a chosen and a rejected answer; each answer with its prompt has at most
    `most_tokens` tokens.

    The embedded task pairs the answer with the work with one of addition.wrong_answer. halves: True
    if single judged answers can be used. Raises DataError or ConfigError.
    """
    if (section := data.problems) is None:
        return _read(
            data, lambda path: _read_pairs(path, data, tokenizer, most_tokens, halves=halves)
        )
    _check_longest(section.digits, tokenizer, most_tokens)
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
    path: str, data: DataSection, tokenizer: Tokenizer, most_tokens: int, *, halves: bool
) -> list[PreferencePair]:
    pairs = read_preferences(path, data, tokenizer, max_tokens=most_tokens)
    alone = sum(len(pair.answers) == 1 for pair in pairs)
    if alone and not halves:
        raise DataError(
            f"{path}: {alone} of {len(pairs)} records have one answer with a label, which "
            "only run.job=preference with preference.loss=kto can use. Set these, or give records "
            "with chosen and rejected."
        )
    return pairs


# --- both ----------------------------------------------------------------------------------------


def _read(data: DataSection, read: Callable[[str], list[T]]) -> ExampleSplit[T]:
    """Return both splits of the record files; each file is read once."""
    once = cache(read)
    train = jsonl_split(data.record_fields, "train", once)
    return ExampleSplit(train, jsonl_split(data.record_fields, "eval", once))


def _check_longest(digits: int, tokenizer: Tokenizer, most_tokens: int) -> None:
    """Raise ConfigError if a problem with `digits` digits does not fit a row."""
    problem = Problem(a=10**digits - 1, b=10**digits - 1)
    answer = worked_answer(problem.a, problem.b)
    longest = len(tokenizer.encode_prompt(problem.prompt, BARE))
    longest += len(tokenizer.encode_answer(problem.prompt, answer, BARE))
    if longest > most_tokens:
        raise ConfigError(
            f"data.addition.digits = {digits} makes examples of up to {longest} tokens, but "
            f"training allows {most_tokens}. Lower it, or raise trainer.row_length (or "
            "sampler.max_length, if row_length is null)."
        )
