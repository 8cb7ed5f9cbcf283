"""Preference records: a prompt with a better and a worse answer, or one answer judged good or bad.

{"prompt": "...", "chosen": "...", "rejected": "..."}       a pair
{"prompt": "...", "completion": "...", "label": true}       half of a pair, for kto
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_async.config.schema import DataSection
from jaxrl_async.data.records import Bad, field_text, parse_lines, parse_object
from jaxrl_async.data.tokenizer import Tokenizer, check_template
from jaxrl_async.errors import DataError
from jaxrl_async.types import IntArray

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
    """A prompt and two answers to it, end token included; one of the answers may be missing.

    A missing answer is empty: a single judged answer is `chosen_ids` if it is good and
    `rejected_ids` if it is bad.
    """

    prompt_ids: IntArray  # [prompt] int32, at least one
    chosen_ids: IntArray  # [chosen] int32
    rejected_ids: IntArray  # [rejected] int32

    @property
    def answers(self) -> tuple[IntArray, ...]:
        """The answers that are not missing, the chosen one first."""
        return tuple(ids for ids in (self.chosen_ids, self.rejected_ids) if len(ids))


def read_preferences(
    path: str | Path, data: DataSection, tokenizer: Tokenizer, *, max_tokens: int
) -> list[PreferencePair]:
    """Read and tokenise the usable records of a file of JSON lines.

    Bad records are skipped, counted by kind and logged with their line. Raises DataError as
    records.parse_lines does.

    Args:
        path: the file.
        data: template and limits; the names of fields are fixed.
        tokenizer: encodes prompts and answers.
        max_tokens: longest prompt together with either answer.
    """
    if data.jsonl.template is not None:
        check_template(data.jsonl.template)
    pairs = parse_lines(
        path,
        lambda line: _parse(line, data, tokenizer, max_tokens),
        data.jsonl.max_bad_share,
        "give each line prompt, chosen and rejected, or prompt, completion and a true or false "
        "label; raise trainer.row_length, data.max_prompt_tokens or data.jsonl.max_bad_share",
    )
    same = sum(np.array_equal(pair.chosen_ids, pair.rejected_ids) for pair in pairs)
    if same:
        log.warning("%s: in %d of %d pairs both answers are the same", path, same, len(pairs))
    return pairs


def _parse(
    line: bytes, data: DataSection, tokenizer: Tokenizer, max_tokens: int
) -> PreferencePair | Bad:
    fields, template = parse_object(line), data.jsonl.template
    if isinstance(fields, Bad):
        return fields
    prompt, answers = field_text(fields.get(Field.PROMPT)), _answers(fields)
    if prompt is None or answers is None:
        return Bad.FIELD
    pair = PreferencePair(
        prompt_ids=tokenizer.encode_prompt(prompt, template),
        chosen_ids=_answer_ids(prompt, answers[0], tokenizer, template),
        rejected_ids=_answer_ids(prompt, answers[1], tokenizer, template),
    )
    if not len(pair.prompt_ids) or not pair.answers:
        return Bad.EMPTY
    if len(pair.prompt_ids) > data.max_prompt_tokens:
        return Bad.TOO_LONG
    longest = max(len(answer) for answer in pair.answers)
    return Bad.PAIR_TOO_LONG if len(pair.prompt_ids) + longest > max_tokens else pair


def _answers(fields: dict[str, Any]) -> tuple[str | None, str | None] | None:
    """Return chosen and rejected answer, one of them None in a judged record; None if malformed."""
    if Field.LABEL in fields:
        label, completion = fields[Field.LABEL], field_text(fields.get(Field.COMPLETION))
        if not isinstance(label, bool) or completion is None:
            return None
        return (completion, None) if label else (None, completion)
    chosen, rejected = field_text(fields.get(Field.CHOSEN)), field_text(fields.get(Field.REJECTED))
    return None if chosen is None or rejected is None else (chosen, rejected)


def _answer_ids(
    prompt: str, answer: str | None, tokenizer: Tokenizer, template: str | None
) -> IntArray:
    """Encode the answer after its prompt, with its end token; empty if there is no answer."""
    if answer is None:
        return np.zeros(0, np.int32)
    return tokenizer.encode_answer(prompt, answer, template)


def mismatched(pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
    """Pair each prompt with the answers of the next pair (cyclically) that has another prompt.

    The baseline of kto is estimated on these: Ethayarajh et al. 2024 (arXiv:2402.01306), sec. 4.1,
    where answer i goes to prompt i + 1. Raises DataError if all prompts are the same.
    """
    shifted = []
    for index, pair in enumerate(pairs):
        after = (pairs[(index + step) % len(pairs)] for step in range(1, len(pairs)))
        other = next((p for p in after if not np.array_equal(p.prompt_ids, pair.prompt_ids)), None)
        if other is None:
            raise DataError(
                f"all {len(pairs)} preference pairs of the step, or held-out ones, have the same "
                "prompt, but kto's baseline needs answers to another prompt. Raise "
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
