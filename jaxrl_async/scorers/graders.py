"""The built-in graders: compare an answer with the reference. Needs no JAX.

    exact     the same text
    gsm8k     the same final number
    math      mathematically equal (the library math-verify, in separate processes)

Each is a reward function with one part, `correct`, 1 or 0. Two equal texts are always correct.
If in doubt it is 0, since a policy soon finds answers that are rewarded without being correct.
"""

import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from jaxrl_async.errors import DataError, RefusedScore, RolloutError
from jaxrl_async.later import Later
from jaxrl_async.scorers.answers import TEXT, after_thinking, find_answer, plain_float
from jaxrl_async.types import CORRECT

if TYPE_CHECKING:
    from jaxrl_async.scorers import mathprocess, units, written_numbers
else:
    mathprocess = Later("jaxrl_async.scorers.mathprocess")
    units = Later("jaxrl_async.scorers.units")
    written_numbers = Later("jaxrl_async.scorers.written_numbers")

log = logging.getLogger(__name__)


def exact(completion: str, reference: str) -> Mapping[str, float]:
    """Check that the completion, or the text after a '#' in it up to its end, is the reference.

    Thinking does not count, nor do spaces around either. A reference may itself contain a '#'
    ("C#"). A reference that a table stored as a float (5.0, 1e+16) also matches its digits.
    """
    answer, right = (after_thinking(completion) or "").strip(), _require(reference).strip()
    return _verdict(
        completion.strip() == right
        or any(_is_or_ends_in(answer, text) for text in {right, plain_float(right)})
    )


def _is_or_ends_in(answer: str, right: str) -> bool:
    before = answer.removesuffix(right).rstrip()
    return answer == right or (answer.endswith(right) and before.endswith("#"))


def gsm8k(completion: str, reference: str) -> Mapping[str, float]:
    r"""Check the final number: the first after '####', or else the last of the answer.

    answers.py finds the answer. 18, 18.0, $18, 18%, **18**, 18kg, 18元 and 1,018 without its
    comma are numbers. A final number that is part of something larger (1/2, 10-5, sqrt(2), (1,2),
    x^2, 2x, 18g, 5 million, > 3) makes the answer wrong unless the reference has the same text;
    earlier numbers are not tried instead. (One letter after a number may be a variable.) Units
    that differ make it wrong. The format is from Cobbe et al. 2021 (arXiv:2110.14168).
    """
    if equal_texts(completion, _require(reference)):
        return _verdict(True)
    answer, right = find_answer(completion), find_answer(plain_float(reference))
    if answer is None or right is None:
        return _verdict(False)
    number = written_numbers.number_of(right)
    same = number is not None and written_numbers.number_of(answer) == number
    return _verdict(same and not units.differ(answer.line, right.line))


def math(completion: str, reference: str) -> Mapping[str, float]:
    r"""Check that the final answer equals the reference mathematically: 1/2, \frac12 and 0.5.

    answers.py finds the answer; in a sentence or line the last formula counts, or the number
    after it. '$' before a digit is money unless it begins a formula. The library math-verify
    parses and compares. Numbers are compared relatively, different units are unequal, and an
    answer that takes it too long is wrong (mathprocess.py, mathreading.py).
    """
    if equal_texts(completion, _require(reference)):
        return _verdict(True)
    return _verdict(mathprocess.same_mathematics(completion, reference))


def equal_texts(completion: str, reference: str) -> bool:
    """Return whether the completion, or its answer, has the reference's text."""
    if completion.strip() == reference.strip():
        return True
    answer, right = find_answer(completion), find_answer(reference)
    if answer is None or right is None:
        return False
    texts = {_bare(reference), _bare(right.line)} - {""}
    return _bare(answer.line) in texts


def read_answer(grader: Callable[..., object], completion: str) -> str | None:
    """Return the final answer that a built-in grader reads in a completion, for a majority vote:
    equal numbers have equal texts. None: it is missing, or was cut off."""
    if grader is exact:
        text = after_thinking(completion) or ""
        return text.strip().rpartition("#")[2].strip() or None
    answer = find_answer(completion)
    number = written_numbers.number_of(answer)
    if answer is None or number is not None:
        return None if number is None else written_numbers.written(number)
    return _bare(answer.line) or None


def unreadable(grader: Callable[..., object], reference: str) -> bool:
    """Return whether, for this reference, a built-in grader can reward only an equal text."""
    if not reference.strip():
        return True
    if grader is gsm8k:
        return written_numbers.number_of(find_answer(plain_float(reference))) is None
    return grader is math and not mathprocess.can_be_read(reference)


def _bare(text: str) -> str:
    """Return the text without optional characters: spaces except between two words or numbers,
    LaTeX's marks around it and a full stop."""
    text = re.sub(r"^\$|\$$|\.$", "", TEXT.sub(r"\1", text.strip()))
    return re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", re.sub(r"\s+", " ", text))


def _verdict(correct: bool) -> Mapping[str, float]:
    return {CORRECT: float(correct)}


def _require(reference: str) -> str:
    if not reference.strip():
        raise RefusedScore(
            "has no right answer to compare with: the record has none. Set "
            "data.jsonl.answer_field, or choose a reward that needs no right answer."
        )
    return reference


# ---- all references, tried when a run starts


PLAIN = re.compile(r"-?[0-9]{1,15}(?:\.[0-9]{1,15})?")
"""A number that every grader can parse."""
AWAITED = 400
"""Maximum references for `math`, about 5 ms each, that a start waits for; more run in the
background."""


def check_answers(references: Sequence[str], max_bad_share: float) -> None:
    """Raise DataError if more than this share of the references is blank; log a warning about
    fewer."""
    blank = [index for index, reference in enumerate(references) if not reference.strip()]
    if not blank:
        return
    problem = (
        f"{len(blank)} of {len(references)} records have an empty answer (the training records "
        f"first, number {blank[0]} is one), and the reward compares with it"
    )
    if len(blank) > max_bad_share * len(references):
        raise DataError(
            f"{problem}. Correct them or leave them out, or choose a reward that needs no answer."
        )
    log.warning("%s: their answers are left out of training and evaluation", problem)


def try_references(graders: Mapping[str, Callable[..., object]], references: Iterable[str]) -> None:
    """Log a warning for each built-in grader that cannot parse some of the references.

    It rewards only an equal text there. `math` needs milliseconds for each reference: a large
    number is tried by a thread, which logs when it is done.

    Args:
        graders: by their names in the settings; other functions are skipped.
        references: the correct answers of the records, without blank ones.
    """
    listed = [reference for reference in references if reference.strip()]
    hard = list(dict.fromkeys(r for r in listed if not PLAIN.fullmatch(r.strip())))
    for name, grader in graders.items():
        if grader is gsm8k or (grader is math and len(hard) <= AWAITED):
            _try(name, grader, hard, listed)
        elif grader is math:
            threading.Thread(
                target=_try, args=(name, grader, hard, listed), name="references", daemon=True
            ).start()


def _try(
    name: str, grader: Callable[..., object], hard: Sequence[str], listed: Sequence[str]
) -> None:
    try:
        bad = {reference for reference in hard if unreadable(grader, reference)}
    except RolloutError as error:  # raised again when an answer is compared
        log.warning("reward.function = %r was not tried on all references: %s", name, error)
        return
    if not bad:
        return
    shown = ", ".join(repr(text[:60]) for text in sorted(bad)[:3])
    log.warning(
        "reward.function = %r cannot read %d of %d references, such as %s: it rewards only an "
        "answer with the same text. Correct the records, or choose a grader that fits them.",
        name,
        sum(reference in bad for reference in listed),
        len(listed),
        shown,
    )
