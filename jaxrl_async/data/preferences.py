"""Preference records: a prompt with a better and a worse answer, or one answer judged good or bad.

{"prompt": "...", "chosen": "...", "rejected": "..."}       a pair
{"prompt": "...", "completion": "...", "label": true}       half of a pair, for kto; the label
                                                            of a full pair is ignored

Each of them may be a list of chat messages; an answer is one assistant message. Without `prompt`,
the conversations of chosen and rejected begin with the prompt.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_async.config.schema import DataSection
from jaxrl_async.data.chat_formats.chat_messages import (
    as_messages,
    checked_messages,
    is_conversation,
)
from jaxrl_async.data.record_files import Bad, BadRecord, parse_rows
from jaxrl_async.data.records import RecordReader, field_text, missing_columns
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import DataError
from jaxrl_async.types import IntArray, Message

log = logging.getLogger(__name__)


class Field(StrEnum):
    """Names of a record's fields, as in Hugging Face's preference data sets."""

    PROMPT = "prompt"
    CHOSEN = "chosen"
    REJECTED = "rejected"
    COMPLETION = "completion"
    LABEL = "label"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePair:
    """A prompt and two answers with end tokens; one of the answers may be missing.

    A missing answer is empty: a single judged answer is `chosen_ids` if it is good and
    `rejected_ids` if it is bad.
    """

    prompt_ids: IntArray  # [prompt] int32, at least one
    chosen_ids: IntArray  # [chosen] int32
    rejected_ids: IntArray  # [rejected] int32

    @property
    def answers(self) -> tuple[IntArray, ...]:
        """The existing answers, the chosen one first."""
        return tuple(ids for ids in (self.chosen_ids, self.rejected_ids) if len(ids))


def read_preferences(
    path: str | Path, data: DataSection, tokenizer: Tokenizer, *, max_tokens: int
) -> list[PreferencePair]:
    """Read and tokenize the usable records of a file or folder, see record_files.rows_of_file.

    Bad records are skipped, counted by kind and logged with their location. Raises DataError like
    record_files.parse_rows.

    Args:
        path: the file or folder.
        data: chat format, template and limits; the field names are fixed.
        tokenizer: encodes prompts and answers.
        max_tokens: maximum length of the prompt with either answer.
    """
    reader = RecordReader(data, tokenizer)
    pairs = parse_rows(
        path,
        lambda fields: _pair_of(fields, reader, max_tokens),
        data.record_fields.max_bad_share,
        "give each record prompt, chosen and rejected, or prompt, completion and a label: true or "
        "false, 1 or 0",
    )
    same = sum(np.array_equal(pair.chosen_ids, pair.rejected_ids) for pair in pairs)
    if same:
        log.warning("%s: in %d of %d pairs both answers are equal", path, same, len(pairs))
    return pairs


def _pair_of(fields: Mapping[str, object], reader: RecordReader, max_tokens: int) -> PreferencePair:
    prompt, chosen, rejected = _parts(fields)
    answers = [answer for answer in (chosen, rejected) if answer is not None]
    prompt_ids, answer_ids = reader.pair_ids(prompt, answers, reader.tools_of(fields))
    ids, none = iter(answer_ids), np.zeros(0, np.int32)
    pair = PreferencePair(
        prompt_ids=prompt_ids,
        chosen_ids=none if chosen is None else next(ids),
        rejected_ids=none if rejected is None else next(ids),
    )
    if not pair.answers:
        raise BadRecord(Bad.EMPTY)
    longest = max(len(answer) for answer in pair.answers)
    if len(prompt_ids) + longest > max_tokens:
        raise BadRecord(
            Bad.PAIR_TOO_LONG,
            f"{len(prompt_ids) + longest} tokens, but only {max_tokens} are allowed",
        )
    return pair


Answer = str | Message


def _parts(fields: Mapping[str, object]) -> tuple[Any, Answer | None, Answer | None]:
    """Return prompt, chosen and rejected answer, one of them None in a judged record."""
    prompt = as_messages(fields.get(Field.PROMPT))
    if _is_judged(fields):
        label, (before, answer) = fields[Field.LABEL], _answer(fields, Field.COMPLETION)
        if label not in (0, 1):  # including False, True, 0.0 and 1.0
            raise BadRecord(Bad.FIELD, f"the label is {str(label)[:40]!r}, neither 1 nor 0")
        chosen, rejected = (answer, None) if label else (None, answer)
    else:
        (before, chosen), (other, rejected) = (
            _answer(fields, name) for name in (Field.CHOSEN, Field.REJECTED)
        )
        if before != other:
            raise BadRecord(Bad.MESSAGES, "chosen and rejected begin with different messages")
    if before:
        if not _is_in(prompt, before):
            raise BadRecord(
                Bad.MESSAGES,
                "an answer is not a single assistant message, and its conversation does not "
                "begin with `prompt`",
            )
        return list(before), chosen, rejected
    if not is_conversation(prompt):
        prompt = field_text(prompt)
    if prompt is None:
        raise BadRecord(Bad.FIELD, missing_columns(fields, [Field.PROMPT]))
    return prompt, chosen, rejected


def _is_judged(fields: Mapping[str, object]) -> bool:
    """Return True if a record has a judged answer, and not a pair with an unrelated label."""
    is_pair = all(fields.get(name) is not None for name in (Field.CHOSEN, Field.REJECTED))
    half = all(fields.get(name) is not None for name in (Field.COMPLETION, Field.LABEL))
    return half or (Field.LABEL in fields and not is_pair)


def _is_in(prompt: object, before: Sequence[Message]) -> bool:
    """Return True if a prompt is contained in the messages before an answer: it is missing, the
    text of one of the user messages, or a prefix of the messages."""
    if prompt is None:
        return True
    if is_conversation(prompt):
        try:
            messages = checked_messages(prompt) if prompt else ()
        except DataError as error:
            raise BadRecord(Bad.MESSAGES, f"prompt: {error}") from None
        return tuple(before[: len(messages)]) == messages
    questions = [m["content"].strip() for m in before if m["role"] == "user"]
    return (field_text(prompt) or "").strip() in questions


def _answer(fields: Mapping[str, object], name: Field) -> tuple[tuple[Message, ...], Answer]:
    """Return the messages before the last one, and the last one, the answer."""
    value = as_messages(fields.get(name))
    if is_conversation(value):
        try:
            *before, answer = checked_messages(value)
        except DataError as error:
            raise BadRecord(Bad.MESSAGES, f"{name}: {error}") from None
        if answer["role"] != "assistant":
            raise BadRecord(Bad.MESSAGES, f"{name} does not end with the assistant")
        return tuple(before), answer
    text = field_text(value)
    if text is None:
        raise BadRecord(Bad.FIELD, missing_columns(fields, [name]))
    return (), text


def mismatched(pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
    """Pair each prompt with the answers of the next pair (cyclically) with a different prompt.

    The baseline of kto is estimated on these: Ethayarajh et al. 2024 (arXiv:2402.01306), sec. 4.1,
    where answer i is paired with prompt i + 1. Raises DataError if all prompts are equal.
    """
    shifted = []
    for index, pair in enumerate(pairs):
        after = (pairs[(index + step) % len(pairs)] for step in range(1, len(pairs)))
        other = next((p for p in after if not np.array_equal(p.prompt_ids, pair.prompt_ids)), None)
        if other is None:
            raise DataError(
                f"the preference pairs of a step, or the held-out ones ({len(pairs)}), all have "
                "the same prompt, but kto's baseline needs answers to another prompt. Raise "
                "preference.batch_size or the eval_size of the data."
            )
        shifted.append(
            PreferencePair(
                prompt_ids=pair.prompt_ids,
                chosen_ids=other.chosen_ids,
                rejected_ids=other.rejected_ids,
            )
        )
    return shifted
