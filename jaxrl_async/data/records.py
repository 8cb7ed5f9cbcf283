"""Records: questions or conversations with their answers, from the embedded task, files or Python
objects.

file ──record_files──> columns ──RecordReader──> Record     unusable records: counted and logged
"""

import decimal
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np

from jaxrl_async.config.schema import DataSection, JsonlSection
from jaxrl_async.data.addition import AdditionStream, Problem, held_out, worked_answer
from jaxrl_async.data.chat_formats.chat_messages import (
    as_messages,
    checked_messages,
    is_conversation,
    record_tools,
    with_system_prompt,
)
from jaxrl_async.data.images import take_images
from jaxrl_async.data.record_files import Bad, BadRecord, parse_rows
from jaxrl_async.data.tokenizer import BARE, Tokenizer, check_template
from jaxrl_async.errors import ConfigError, DataError, TextTooLong
from jaxrl_async.later import Later
from jaxrl_async.types import BoolArray, IntArray, Message

if TYPE_CHECKING:
    from jaxrl_async.data import chat as formats
    from jaxrl_async.data.chat import TeachableFormat
else:
    formats = Later("jaxrl_async.data.chat")

log = logging.getLogger(__name__)

GOLDEN = 2_654_435_761
"""Odd multiplier that spreads consecutive indices evenly over 32 bits (Knuth)."""

FIELDS = (
    "set data.jsonl.prompt_field, data.jsonl.messages_field or data.jsonl.answer_field "
    "(null if the records have no answers)"
)
"""Remedy if a record lacks a field."""
Split = Literal["train", "eval"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One question with its answer, as token ids and as text."""

    token_ids: IntArray  # [prompt] int32
    text: str  # of the prompt
    reference: str  # final answer
    answer: str | None  # whole target answer; None: not text
    template: str | None = None  # of token_ids, see Tokenizer.encode_prompt
    columns: Mapping[str, Any] = field(default_factory=dict)  # the whole record, by column
    messages: tuple[Message, ...] = ()  # source of token_ids; empty: plain text
    answer_ids: IntArray | None = None  # target answer after messages, [answer] int32
    worked: tuple[IntArray, BoolArray] | None = None  # a demonstration, as supervised_pair


class RecordSource(Protocol):
    """Records by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record: ...


class OwnRecords(Protocol):
    """Records provided by a task, instead of the configured ones."""

    def source(self, split: Split, *, taught: bool = False) -> RecordSource:
        """Return the records of one split. taught: include the target answers."""


class AdditionSource:
    """Records of the embedded task."""

    def __init__(
        self,
        problems: AdditionStream | Sequence[Problem],
        tokenizer: Tokenizer,
        worked_share: float = 1.0,
    ) -> None:
        self._problems = problems
        self._tokenizer = tokenizer
        self._worked_share = worked_share

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Record:
        problem = self._problems[index]
        return Record(
            token_ids=self._tokenizer.encode_prompt(problem.prompt, BARE),
            text=problem.prompt,
            reference=problem.reference,
            answer=self._answer(problem, index),
            template=BARE,
            columns={"a": problem.a, "b": problem.b},
        )

    def _answer(self, problem: Problem, index: int) -> str:
        """Return the answer with the work for a share worked_share of the problems, by index, else
        the sum."""
        is_worked = index * GOLDEN % 2**32 < self._worked_share * 2**32
        return worked_answer(problem.a, problem.b) if is_worked else problem.reference


def read_records(
    path: str | Path,
    data: DataSection,
    tokenizer: Tokenizer,
    *,
    taught: bool = False,
    graded: bool = False,
) -> list[Record]:
    """Read the usable records of a file or folder, see record_files.rows_of_file.

    Bad records are skipped, counted by kind and logged with their location.

    Args:
        path: the file or folder.
        data: field names, chat format and limits.
        tokenizer: encodes the prompts.
        taught: the answers are training targets, so a record whose answer is not text is bad.
        graded: a reward compares with the answers, so a record with an empty answer is bad.

    Raises:
        DataError: the file cannot be read, has no usable record, or more than
            data.jsonl.max_bad_share of it is bad.
        ConfigError: a setting does not fit the tokenizer.
    """
    records = parse_rows(
        path,
        RecordReader(data, tokenizer, taught=taught, graded=graded).record,
        data.record_fields.max_bad_share,
        FIELDS,
    )
    _log_unmarked(path, data.record_fields.answer_mark, records)
    return records


class RecordReader:
    """Converts columns to records."""

    def __init__(
        self,
        data: DataSection,
        tokenizer: Tokenizer,
        *,
        taught: bool = False,
        graded: bool = False,
    ) -> None:
        """Check the settings.

        Args:
            data: field names, chat format and limits.
            tokenizer: encodes the prompts.
            taught: the answers are training targets.
            graded: a record with an empty answer is bad.

        Raises:
            ConfigError: data.jsonl.template is malformed, or data.system_prompt is set without a
                chat format.
        """
        section = data.record_fields
        if section.template is not None:
            check_template(section.template)
        self._data, self._tokenizer = data, tokenizer
        self._taught, self._graded = taught, graded
        has_chat = formats.has_chat_format(tokenizer, data.chat_format)
        self._uses_chat = section.template is None and has_chat
        if data.system_prompt is not None and not self._uses_chat:
            raise ConfigError(
                "data.system_prompt needs a chat template. Set data.chat_format to a FILE.jinja, "
                "remove data.jsonl.template, or write the prompt into data.jsonl.template."
            )

    @cached_property
    def _chat(self) -> "TeachableFormat":
        return formats.chat_format_of(self._data, self._tokenizer)

    def record(self, fields: Mapping[str, object]) -> Record:
        """Convert columns to a record. Raises BadRecord, and ConfigError if the required chat
        format is not available."""
        prompt = self._prompt_of(fields)
        if isinstance(prompt, str) and not self._uses_chat:
            self._check_no_tools(fields)
            answer, reference = self._answer_of(fields, None)
            template = self._data.record_fields.template
            with refused_as(Bad.TOO_LONG):
                token_ids = self._tokenizer.encode_prompt(prompt, template)
            return Record(
                token_ids=self._fitting(token_ids),
                text=prompt,
                reference=reference,
                answer=answer,
                template=template,
                columns=fields,
            )
        try:
            prompt, images = take_images(prompt, self._tokenizer.images)
        except DataError as error:
            raise BadRecord(Bad.MESSAGES, str(error)) from None
        messages = self._conversation(prompt)
        reply = messages[-1] if messages[-1]["role"] == "assistant" else None
        prompt = messages if reply is None else messages[:-1]
        return self._chat_record(fields, prompt, reply, images)

    def pair_ids(
        self,
        prompt: object,
        replies: Sequence[str | Message],
        tools: Sequence[Mapping[str, object]] = (),
    ) -> tuple[IntArray, list[IntArray]]:
        """Return the tokens of a prompt and of each answer to it, including the end token.

        prompt: text or messages. tools: shown with the prompt. Raises BadRecord.
        """
        texts = all(isinstance(each, str) for each in (prompt, *replies))
        if texts and isinstance(prompt, str) and not self._uses_chat and not tools:
            encode, template = self._tokenizer.encode_answer, self._data.record_fields.template
            with refused_as(Bad.TOO_LONG):
                token_ids = self._fitting(self._tokenizer.encode_prompt(prompt, template))
            with refused_as(Bad.PAIR_TOO_LONG):
                return token_ids, [encode(prompt, str(reply), template) for reply in replies]
        messages = self._conversation(prompt)
        turns = [{"role": "assistant", "content": r} if isinstance(r, str) else r for r in replies]
        try:
            with refused_as(Bad.TOO_LONG):
                token_ids = self._fitting(self._opening(messages, tools))
            with refused_as(Bad.PAIR_TOO_LONG):
                return token_ids, [self._chat.answer(messages, reply) for reply in turns]
        except BadRecord:
            raise
        except DataError as error:
            raise BadRecord(Bad.TEMPLATE, str(error)) from None

    def _prompt_of(self, fields: Mapping[str, object]) -> Any:
        """Return the question as text, or the messages unchanged."""
        section = self._data.record_fields
        names = [section.prompt_field, section.messages_field]
        value = next((v for n in names if n is not None and (v := fields.get(n)) is not None), None)
        value = as_messages(value)
        if is_conversation(value):
            return value
        text = field_text(value)
        if text is None:
            raise BadRecord(Bad.FIELD, missing_columns(fields, names))
        messages = section.messages_field
        if messages not in (None, section.prompt_field) and value is fields.get(messages):
            raise BadRecord(
                Bad.MESSAGES, f"the column {messages!r} is text, but not a conversation in JSON"
            )
        return text

    def tools_of(self, fields: Mapping[str, object]) -> tuple[Mapping[str, Any], ...]:
        """Return the tools of a record. Raises BadRecord."""
        try:
            return record_tools(fields, self._data.record_fields.tools_field)
        except DataError as error:
            raise BadRecord(Bad.TOOLS, str(error)) from None

    def _check_no_tools(self, fields: Mapping[str, object]) -> None:
        """Raise BadRecord for tools without a chat format; a column of this name with other content
        is ignored."""
        try:
            tools = self.tools_of(fields)
        except BadRecord:
            return
        if tools:
            raise BadRecord(Bad.TOOLS, "the prompts are written without a chat format")

    def _opening(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
    ) -> IntArray:
        """Return the tokens before an answer. Raises BadRecord if the format omits the tools, and
        DataError if it refuses the messages."""
        opening = self._chat.opening(messages, tools)
        if tools and np.array_equal(opening, self._chat.opening(messages, ())):
            raise BadRecord(Bad.TOOLS, "the chat format omits them")
        return opening

    def _conversation(self, prompt: object) -> tuple[Message, ...]:
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        try:
            messages = checked_messages(prompt)
        except DataError as error:
            raise BadRecord(Bad.MESSAGES, str(error)) from None
        if messages[-1]["role"] == "assistant" and len(messages) == 1:
            raise BadRecord(Bad.MESSAGES, "there is nothing before the answer")
        return with_system_prompt(messages, self._data.system_prompt)

    def _chat_record(
        self,
        fields: Mapping[str, object],
        messages: tuple[Message, ...],
        reply: Message | None,
        images: Sequence[int],
    ) -> Record:
        answer, reference = self._answer_of(fields, reply)
        chat, answer_ids = self._chat, None
        try:
            with refused_as(Bad.TOO_LONG):
                token_ids = self._opening(messages, self.tools_of(fields))
            if self._tokenizer.images is not None:
                token_ids = self._tokenizer.images.named(token_ids, images)
            token_ids = self._fitting(token_ids)
            if self._taught:
                shown = reply or {"role": "assistant", "content": answer}
                with refused_as(Bad.PAIR_TOO_LONG):
                    answer_ids = chat.answer(messages, shown)
        except BadRecord:
            raise
        except DataError as error:
            raise BadRecord(Bad.TEMPLATE, str(error)) from None
        return Record(
            token_ids=token_ids,
            text=messages[-1]["content"],
            reference=reference,
            answer=answer,
            columns=fields,
            messages=messages,
            answer_ids=answer_ids,
        )

    def _answer_of(
        self, fields: Mapping[str, object], reply: Message | None
    ) -> tuple[str | None, str]:
        """Return the whole answer, None if it is not text, and the reference for the reward."""
        section = self._data.record_fields
        name = section.answer_field
        text = "" if reply is None else reply["content"]
        value = text if name is None else fields.get(name)
        if value is None and reply is not None:
            value = text
        answer = field_text(value)
        reference = reference_of(value, answer, section.answer_mark)
        if reference is None or (self._taught and answer is None):
            raise BadRecord(Bad.FIELD, missing_columns(fields, [name]))
        if self._graded and not reference.strip():
            raise BadRecord(Bad.NO_ANSWER)
        return answer, reference

    def _fitting(self, token_ids: IntArray) -> IntArray:
        """Return a prompt's tokens if their number is valid, else raise BadRecord."""
        if not len(token_ids):
            raise BadRecord(Bad.EMPTY)
        limit = self._data.max_prompt_tokens
        if limit is not None and len(token_ids) > limit:
            raise BadRecord(Bad.TOO_LONG, f"{len(token_ids)} tokens, but only {limit} are allowed")
        return token_ids


@contextmanager
def refused_as(kind: Bad) -> Iterator[None]:
    """Raise BadRecord of this kind if a text is too long to be encoded."""
    try:
        yield
    except TextTooLong as error:
        raise BadRecord(kind, str(error)) from None


def _log_unmarked(path: str | Path, mark: str | None, records: Sequence[Record]) -> None:
    """Log the number of answers without the mark; their reference is the whole answer."""
    unmarked = sum(mark is not None and mark not in (r.answer or "") for r in records)
    if unmarked:
        log.warning(
            "%s: %d of %d answers have no data.jsonl.answer_mark %r; their reference is the "
            "whole answer",
            path,
            unmarked,
            len(records),
            mark,
        )


def reference_of(value: object, answer: str | None, mark: str | None) -> str | None:
    """Return the text that a reward compares with, or None.

    It is the final answer, or JSON if the field's value is neither text nor a number.
    """
    if answer is not None:
        return final_answer(answer, mark)
    if value is None:
        return None
    try:
        return field_text(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except ValueError:
        return None


def field_text(value: object) -> str | None:
    """Return a field's value as text, or None.

    A finite number becomes its digits, without an exponent. A float without a fraction becomes an
    integer, since tables convert integers to floats: 5.0 becomes 5. Half a surrogate pair is not
    text.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    try:
        str(value).encode()
    except ValueError:
        return None
    return digits_of(value) if isinstance(value, float) else str(value)


def digits_of(value: float) -> str:
    """Return a finite float's digits: 5 for 5.0, 0.00001 for 1e-05."""
    digits = f"{decimal.Decimal(repr(float(value) or 0.0)):f}"
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def final_answer(answer: str, mark: str | None) -> str:
    """Return the text after the last mark, or the whole answer if it has no mark."""
    return (answer.rpartition(mark)[2] if mark else answer).strip()


HELD_OUT_MOST = 64
"""Maximum number of records that are held out if no number is set."""
HELD_OUT_SHARE = 10
"""One in this many training records is held out if no number is set."""


def held_out_of(records: int) -> int:
    """Return how many of the training records are held out if no number is set."""
    return min(HELD_OUT_MOST, max(records // HELD_OUT_SHARE, 1))


def jsonl_split(section: JsonlSection, split: Split, read: Callable[[str], list[T]]) -> list[T]:
    """Return the training records, or the held-out ones: from eval_path, else the last of the file.

    read: returns the usable records of a file. Raises DataError if none is left to train on.
    """
    path = section.path
    assert path is not None, "a rule requires it"
    if section.eval_path is not None:
        if split == "train":
            return read(path)
        held_out = read(section.eval_path)
        most = section.eval_size or HELD_OUT_MOST
        if len(held_out) > most:
            log.info(
                "%s: using the first %d of %d records (data.jsonl.eval_size)",
                section.eval_path,
                most,
                len(held_out),
            )
        return held_out[:most]
    records = read(path)
    size = section.eval_size or held_out_of(len(records))
    if len(records) <= size:
        usable = "1 usable record" if len(records) == 1 else f"{len(records)} usable records"
        held = "1 is" if size == 1 else f"{size} are"
        fewer = "" if size == 1 else "lower it, "
        raise DataError(
            f"{path}: {usable}, but {held} held out (data.jsonl.eval_size): none is left to train "
            f"on. Give more records, {fewer}or set data.jsonl.eval_path."
        )
    return records[:-size] if split == "train" else records[-size:]


def missing_columns(fields: Mapping[str, object], names: Iterable[str | None]) -> str:
    """Describe which columns were expected, and which exist."""
    expected = " or ".join(repr(str(name)) for name in names if name is not None)
    return f"expected {expected}, the columns are {', '.join(map(repr, list(fields)[:8]))}"


def make_source(
    data: DataSection,
    tokenizer: Tokenizer,
    seed: int,
    split: Split = "train",
    *,
    taught: bool = False,
    graded: bool = False,
) -> RecordSource:
    """Return the records of one split. taught, graded: see read_records. Raises DataError,
    ConfigError."""
    if (section := data.problems) is not None:
        held = held_out(section.digits, section.eval_size)
        problems = AdditionStream(section, seed) if split == "train" else held
        return AdditionSource(problems, tokenizer, section.worked_share)
    return jsonl_split(
        data.record_fields,
        split,
        lambda path: read_records(path, data, tokenizer, taught=taught, graded=graded),
    )


def supervised_pair(record: Record, tokenizer: Tokenizer) -> tuple[IntArray, BoolArray]:
    """Return a record's prompt, answer and end token, and the mask of the trained tokens.

    Returns token_ids [length] int32 and mask [length] bool, True for answer and end token. The
    record must have an answer.
    """
    if record.worked is not None:
        return record.worked
    assert record.answer is not None, "the record was read with taught=True"
    answer = record.answer_ids
    if answer is None:
        answer = tokenizer.encode_answer(record.text, record.answer, record.template)
    mask = np.arange(len(record.token_ids) + len(answer)) >= len(record.token_ids)
    return np.concatenate([record.token_ids, answer]).astype(np.int32), mask
