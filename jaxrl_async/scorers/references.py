"""Try the built-in graders on all references when a run starts. Needs no JAX."""

import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxrl_async.errors import DataError, RolloutError
from jaxrl_async.scorers.graders import gsm8k, math, unreadable

log = logging.getLogger(__name__)

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
    said = (
        f"{len(blank)} of {len(references)} records have an empty answer (the training records "
        f"first, number {blank[0]} is one), and the reward compares with it"
    )
    if len(blank) > max_bad_share * len(references):
        raise DataError(
            f"{said}. Correct them or leave them out, or choose a reward that needs no answer."
        )
    log.warning("%s: their answers are left out of training and evaluation", said)


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
