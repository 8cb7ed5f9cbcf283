"""Preference records: a prompt with a better and a worse answer, or one answer judged good or bad.

{"prompt": "...", "chosen": "...", "rejected": "..."}       a pair
{"prompt": "...", "completion": "...", "label": true}       half of one, for kto
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_async.data.prompts import Bad, parse_object, read_lines, text_of
from jaxrl_async.data.tokenizer import Tokenizer, check_template
from jaxrl_async.errors import DataError
from jaxrl_async.types import IntArray

log = logging.getLogger(__name__)


class Field(StrEnum):
    """Names of a record's fields, as the Hugging Face preference data sets have them."""

    PROMPT = "prompt"
    CHOSEN = "chosen"
    REJECTED = "rejected"
    COMPLETION = "completion"
    LABEL = "label"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePair:
    """A prompt and two answers to it, end token included; one of them may be empty, not both.

    An empty answer is one that is not there: a judged answer on its own is `chosen_ids` where it is
    good and `rejected_ids` where it is bad.
    """

    prompt_ids: IntArray  # [prompt] int32, at least one
    chosen_ids: IntArray  # [chosen] int32
    rejected_ids: IntArray  # [rejected] int32

    @property
    def answers(self) -> tuple[IntArray, ...]:
        """Those that are there, the chosen one first."""
        return tuple(ids for ids in (self.chosen_ids, self.rejected_ids) if len(ids))


def read_preferences(
    path: str | Path,
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    max_prompt_tokens: int | None = None,
    template: str | None = None,
    max_bad_share: float = 0.01,
) -> list[PreferencePair]:
    """The usable records of a file of JSON lines, tokenised.

    max_tokens: of a prompt with either answer; max_prompt_tokens: of a prompt, null: the same.
    template: as data.jsonl.template. Bad records are skipped, counted by kind and logged with their
    line; DataError as data.prompts.read_lines says.
    """
    if template is not None:
        check_template(template)
    pairs = read_lines(
        path,
        lambda line: _parse(line, tokenizer, template, max_tokens, max_prompt_tokens or max_tokens),
        max_bad_share,
        "give each line prompt, chosen and rejected, or prompt, completion and a true or false "
        "label; raise trainer.row_length, data.max_prompt_tokens or data.jsonl.max_bad_share",
    )
    same = sum(np.array_equal(pair.chosen_ids, pair.rejected_ids) for pair in pairs)
    if same:
        log.warning("%s: in %d of %d pairs both answers are the same", path, same, len(pairs))
    return pairs


def _parse(
    line: bytes,
    tokenizer: Tokenizer,
    template: str | None,
    max_tokens: int,
    max_prompt_tokens: int,
) -> PreferencePair | Bad:
    fields = parse_object(line)
    if isinstance(fields, Bad):
        return fields
    prompt, answers = text_of(fields.get(Field.PROMPT)), _answers(fields)
    if prompt is None or answers is None:
        return Bad.FIELD
    pair = PreferencePair(
        prompt_ids=tokenizer.encode_prompt(prompt, template),
        chosen_ids=_answer_ids(prompt, answers[0], tokenizer, template),
        rejected_ids=_answer_ids(prompt, answers[1], tokenizer, template),
    )
    if not len(pair.prompt_ids) or not pair.answers:
        return Bad.EMPTY
    if len(pair.prompt_ids) > max_prompt_tokens:
        return Bad.TOO_LONG
    longest = max(len(answer) for answer in pair.answers)
    return Bad.PAIR_TOO_LONG if len(pair.prompt_ids) + longest > max_tokens else pair


def _answers(fields: dict[str, Any]) -> tuple[str | None, str | None] | None:
    """Chosen and rejected answer, one of them null in a judged record; null where malformed."""
    if Field.LABEL in fields:
        label, completion = fields[Field.LABEL], text_of(fields.get(Field.COMPLETION))
        if not isinstance(label, bool) or completion is None:
            return None
        return (completion, None) if label else (None, completion)
    chosen, rejected = text_of(fields.get(Field.CHOSEN)), text_of(fields.get(Field.REJECTED))
    return None if chosen is None or rejected is None else (chosen, rejected)


def _answer_ids(
    prompt: str, answer: str | None, tokenizer: Tokenizer, template: str | None
) -> IntArray:
    """The answer behind its prompt, with its end token; empty where there is none."""
    if answer is None:
        return np.zeros(0, np.int32)
    return tokenizer.encode_answer(prompt, answer, template)


def mismatched(pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
    """Each prompt with the answers of the next pair that has another prompt; of the first after the
    last.

    What kto's baseline is estimated on: Ethayarajh et al. 2024 (arXiv:2402.01306), sec. 4.1, where
    answer i goes to prompt i + 1. Raises DataError where all prompts are the same.
    """
    made = []
    for index, pair in enumerate(pairs):
        after = (pairs[(index + step) % len(pairs)] for step in range(1, len(pairs)))
        other = next((p for p in after if not np.array_equal(p.prompt_ids, pair.prompt_ids)), None)
        if other is None:
            raise DataError(
                f"the {len(pairs)} preference pairs of the step, or held out, have one prompt "
                "only, so that no answer belongs to another one, as kto's baseline needs. Raise "
                "preference.batch_size or the eval_size of the data."
            )
        made.append(
            PreferencePair(
                prompt_ids=pair.prompt_ids,
                chosen_ids=other.chosen_ids,
                rejected_ids=other.rejected_ids,
            )
        )
    return made
