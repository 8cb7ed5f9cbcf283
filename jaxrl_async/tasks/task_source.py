"""A task's records as prompts, and its demonstrations as examples to imitate.

record ──> data.records.Record      no tokens: the environment writes the opening
demonstration ──ChatFormat──> token ids, with a mask of the policy's own turns
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_async.codec import dumps
from jaxrl_async.data.chat_formats.chat_messages import (
    as_messages,
    record_tools,
    with_system_prompt,
)
from jaxrl_async.data.chat_formats.plain_format import PlainFormat
from jaxrl_async.data.records import (
    Record,
    RecordSource,
    Split,
    field_text,
    held_out_of,
    reference_of,
)
from jaxrl_async.errors import ConfigError, DataError, TextTooLong
from jaxrl_async.ports.rollout import ChatFormat
from jaxrl_async.tasks.task import QUESTIONS, Records, Task, TaskRecord, conversation_of
from jaxrl_async.types import BoolArray, IntArray, Message

NO_TOKENS: IntArray = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class TaskSource:
    """Records of one split of a task."""

    records: Sequence[TaskRecord]
    encoder: "DemoEncoder | None" = None  # encodes demonstrations; None: they are not needed

    def __len__(self) -> int:
        return len(self.records)

    @property
    def in_memory(self) -> bool:
        """Whether reading all records is cheap."""
        records = self.records.records if isinstance(self.records, _Part) else self.records
        return self.encoder is None and isinstance(records, list | tuple)

    def __getitem__(self, index: int) -> Record:
        """Return a record without tokens. Raises DataError for values that a checkpoint cannot
        hold."""
        record = _record_at(self.records, index)
        messages, reply = opening_of(record, f"record {index} of the task")
        value = record.get("answer")
        if value is None and reply is not None:
            value = reply.get("content")
        answer = field_text(value)
        return Record(
            token_ids=NO_TOKENS,
            text=question_of(record),
            reference=reference_of(value, answer, None) or "",
            answer=answer,
            columns=record,
            messages=tuple(messages),
            worked=None if self.encoder is None else self.encoder(record),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskData:
    """The records of a task; data.prompts.OwnRecords."""

    task: Task
    chat: ChatFormat
    tools: Sequence[Mapping[str, Any]]  # its environment's tools, as OpenAI's function tools

    def source(self, split: Split, *, taught: bool = False) -> RecordSource:
        """Return the records of one split. taught: with demonstrations."""
        task = self.task
        shows = task.environment is None and task.game is None and not self.tools
        encoder = DemoEncoder(self.chat, self.tools, task.system_prompt, shows) if taught else None
        return TaskSource(task_records(self.task, split), encoder)


def task_records(task: Task, split: Split) -> Sequence[TaskRecord]:
    """Return a task's records of one split. Raises ConfigError, DataError."""
    assert task.records is not None, "the task has records"
    if split == "eval" and task.held_out is not None:
        return _as_sequence(task.held_out, split)
    if callable(task.records):
        return _as_sequence(task.records, split)
    records = _as_sequence(task.records, split)
    if task.held_out is not None:
        return records
    held_out = held_out_of(len(records))
    if len(records) < 2:
        raise DataError("the task has one record, so none is left to evaluate on. Give held_out.")
    first = len(records) - held_out
    return _Part(records, first, held_out) if split == "eval" else _Part(records, 0, first)


@dataclass(frozen=True, slots=True)
class _Part(Sequence[TaskRecord]):
    """A contiguous part of other records."""

    records: Sequence[TaskRecord]
    first: int
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.records[self.first + range(self.length)[index]]


def _as_sequence(records: Records, split: Split) -> Sequence[TaskRecord]:
    value: Any = records(split) if callable(records) else records
    if not hasattr(value, "__len__") or not hasattr(value, "__getitem__") or isinstance(value, str):
        raise ConfigError(
            f"the task's records for {split} are a {type(value).__name__}. Give a sequence of "
            "mappings, or a function of the split that returns one."
        )
    if not len(value):
        raise DataError(f"the task has no records for {split}. Give at least one.")
    listed: Sequence[TaskRecord] = value
    return listed


def _record_at(records: Sequence[TaskRecord], index: int) -> dict[str, Any]:
    """Return a record as a mapping that a checkpoint can hold, or raise DataError."""
    try:
        record: Any = records[index]
    except Exception as error:  # the user's own sequence
        raise DataError(
            f"record {index} of the task's {len(records)} cannot be read: "
            f"{type(error).__name__}: {error}. Let the records support every index."
        ) from error
    if not isinstance(record, Mapping):
        raise DataError(
            f"record {index} of the task is a {type(record).__name__}. Give mappings of columns."
        )
    try:
        dumps(dict(record))
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"record {index} of the task cannot be saved with a checkpoint: {error}. Give columns "
            "of plain values, lists, mappings with text keys, and arrays."
        ) from None
    return dict(record)


def opening_of(record: TaskRecord, where: str) -> tuple[list[Message], Message | None]:
    """Return a record's messages up to the policy's turn, [] if it has no messages, and the
    assistant's answer if the messages end with it.

    where: names the record in errors. Raises DataError.
    """
    messages = conversation_of(record)
    good = all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages)
    if not good or (len(messages) == 1 and messages[0]["role"] == "assistant"):
        raise DataError(
            f"{where}: its messages are {str(messages)[:80]}. Give a list of objects such as "
            '{"role": "user", "content": "What is 1 + 2?"}, with a message before the answer.'
        )
    is_answered = bool(messages) and messages[-1]["role"] == "assistant"
    return (messages[:-1], messages[-1]) if is_answered else (messages, None)


def question_of(record: TaskRecord) -> str:
    """Return a record's question for display: its column, or the user's last message."""
    question = next((field_text(record[name]) for name in QUESTIONS if name in record), None)
    if question is not None:
        return question
    texts = [m.get("content") for m in conversation_of(record) if m.get("role") == "user"]
    return field_text(texts[-1]) or "" if texts else ""


@dataclass(frozen=True, slots=True)
class DemoEncoder:
    """Encodes a record's demonstration as an example to imitate."""

    chat: ChatFormat
    tools: Sequence[Mapping[str, Any]]
    system_prompt: str | None
    from_records: bool = False  # show the records' own tools

    def __call__(self, record: TaskRecord) -> tuple[IntArray, BoolArray]:
        """Return token_ids [length] and mask [length], True for the policy's turns. For a
        conversation that is too long to encode, return more tokens than fit. Raises DataError."""
        messages = with_system_prompt(worked_messages(record), self.system_prompt)
        tools = record_tools(record) if self.from_records else self.tools
        try:
            return worked_tokens(self.chat, messages, tools)
        except TextTooLong as error:
            return error.token_ids, np.zeros(len(error.token_ids), bool)


def worked_messages(record: TaskRecord) -> list[Message]:
    """Return a record's demonstration: its column `worked`, or its question with its answer. Raises
    DataError."""
    if record.get("worked"):
        return list(as_messages(record["worked"]))
    answer = field_text(record.get("answer"))
    opening, reply = opening_of(record, "a record of the task")
    if not opening and (question := question_of(record)):
        opening = [{"role": "user", "content": question}]
    if opening and answer is None and reply is not None:
        return [*opening, reply]
    if answer is None or not opening:
        raise DataError(
            "the task's records have nothing to imitate, which run.job=sft and the warm start "
            "need. Give them a column `worked` (a whole conversation), or a question and an "
            "answer, or train with run.job=rl and warm_start.steps=0."
        )
    return [*opening, {"role": "assistant", "content": answer}]


def worked_tokens(
    chat: ChatFormat, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
) -> tuple[IntArray, BoolArray]:
    """Return a conversation as one sequence: token_ids [length] int32, and mask [length], True for
    the tokens that the policy should generate in its turns, including end tokens.

    Raises DataError if the format rewrites earlier turns, or writes a turn without an end token.
    """
    if isinstance(chat, PlainFormat):  # it writes no turns: a question with its answer
        prompt = chat.opening(messages[:-1], tools)
        answer = chat.answer(messages[:-1], messages[-1], tools)
        mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
        return np.concatenate([prompt, answer]).astype(np.int32), mask
    token_ids, mask = NO_TOKENS, np.zeros(0, bool)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = chat.opening(messages[:number], tools)
        after = chat.opening(messages[: number + 1], tools)
        turn = after[len(before) :]
        ends = np.flatnonzero(np.isin(turn, chat.stop_token_ids))
        begins = np.array_equal(before[: len(token_ids)], token_ids)
        if not begins or not np.array_equal(after[: len(before)], before) or not len(ends):
            raise DataError(
                "the chat format rewrites earlier turns of a demonstration, which must be one "
                "sequence. Leave thinking out of it, or give one with a single turn."
            )
        own = turn[: ends[0] + 1]
        more = np.zeros(len(before) - len(token_ids), bool)
        mask = np.concatenate([mask, more, np.ones(len(own), bool)])
        token_ids = np.concatenate([before, own]).astype(np.int32)
    return token_ids, mask
