"""The answers of an evaluation: as lines of a file, and what they measure. Needs no JAX.

EvalResult ──answers_of──> EvalAnswer ──write_answers──> NAME/STEP.jsonl ──> the next evaluation
                               └──estimates, changes──> means with standard errors
"""

import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from jaxrl_async.evals.estimates import (
    Estimate,
    doubling,
    estimate,
    majority,
    paired_difference,
    pass_at_k,
)
from jaxrl_async.metrics.recorder import encode
from jaxrl_async.rollout.evaluate import PlayedPrompt
from jaxrl_async.types import CORRECT, Episode, IntArray, StopReason

log = logging.getLogger(__name__)

MAIN = ("accuracy", "reward")
"""Estimates by which evaluations are compared; the first that exists is the main one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalAnswer:
    """One answer to a prompt of an evaluation."""

    index: int  # of the prompt in the evaluation
    sample: int  # index among the prompt's answers
    seat: str  # of a game; empty: not a game
    prompt: str
    reference: str
    completion: str
    answer: str | None  # the final answer that the scorer read; None: it found none
    reward: float
    parts: Mapping[str, float]  # of the reward
    left_out: bool  # a function did not apply: a missing part `correct` is not wrong
    length: int  # sampled tokens
    stop: str  # why it ended; "length": cut off
    turns: int
    version: int  # newest version of the weights that sampled it

    @property
    def key(self) -> str:
        """Key of the prompt, by which evaluations are paired."""
        return f"{self.index}\0{self.prompt}\0{self.reference}"


def answers_of(
    played: Iterable[PlayedPrompt],
    decode: Callable[[IntArray], str],
    read: Callable[[Episode], str | None],
    index_of: Callable[[int], int] = lambda index: index,
) -> list[EvalAnswer]:
    """Return the answers to the prompts of an evaluation.

    Args:
        played: the prompts.
        decode: converts sampled tokens to text.
        read: returns the final answer in an episode; see RewardScorer.final_answer.
        index_of: of a prompt in the whole evaluation, if `played` is one process's share.
    """
    return [
        EvalAnswer(
            index=index_of(p.index),
            sample=sample,
            seat=episode.seat,
            prompt=p.prompt.text,
            reference=p.prompt.reference,
            completion=decode(episode.token_ids[episode.drawn]),
            answer=read(episode),
            reward=score.total,
            parts=dict(score.parts),
            left_out=score.left_out,
            length=episode.num_drawn,
            stop=episode.stop.value,
            turns=episode.num_turns,
            version=int(episode.versions.max(initial=0)),
        )
        for p in played
        for sample, episode, score in zip(p.samples, p.episodes, p.scores, strict=True)
    ]


# ---- files


def write_answers(file: Path, answers: Iterable[EvalAnswer]) -> None:
    """Write answers, one JSON object a line, whole or not at all."""
    fresh = file.with_name(file.name + ".tmp")
    with fresh.open("w", encoding="utf-8", errors="replace") as stream:
        stream.writelines(encode(asdict(answer)) + "\n" for answer in answers)
    os.replace(fresh, file)


def read_answers_of(file: Path) -> list[EvalAnswer]:
    """Return the answers of a file. Lines that are none are counted and logged."""
    answers: list[EvalAnswer] = []
    lines = file.read_text("utf-8", "replace").split("\n")[:-1]
    for line in lines:
        if (answer := answer_from(line)) is not None:
            answers.append(answer)
    if len(answers) < len(lines):
        left_out = len(lines) - len(answers)
        log.warning("%s: %d lines are no answers of an evaluation: skipped", file, left_out)
    return answers


def answer_from(line: str) -> EvalAnswer | None:
    """Return the answer on a line of a file; None: the line holds none."""
    try:
        entry: dict[str, Any] = json.loads(line)
        answer = EvalAnswer(**{field.name: entry[field.name] for field in fields(EvalAnswer)})
        numbers = [answer.reward, *answer.parts.values()]
        has_counts = all(isinstance(n, int) for n in (answer.index, answer.sample, answer.length))
        is_valid = has_counts and all(isinstance(n, float | int) for n in numbers)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    return answer if is_valid else None


# ---- what they measure


def grades(
    answers: Sequence[EvalAnswer], *, is_graded: bool
) -> dict[int, list[tuple[EvalAnswer, float]]]:
    """Return the answers that count, with their grades, by the index of their prompt.

    is_graded: the reward has the part `correct`, which is the grade; an answer without it counts as
    wrong, unless a function did not apply to it. Otherwise the reward is the grade.
    """
    graded: dict[int, list[tuple[EvalAnswer, float]]] = {}
    for answer in answers:
        if is_graded and CORRECT not in answer.parts and answer.left_out:
            continue
        grade = answer.parts.get(CORRECT, 0.0) if is_graded else answer.reward
        graded.setdefault(answer.index, []).append((answer, grade))
    return graded


def has_correct(answers: Iterable[EvalAnswer]) -> bool:
    """Return whether a reward has the part `correct`."""
    return any(CORRECT in answer.parts for answer in answers)


def estimates(
    answers: Sequence[EvalAnswer], *, samples: int, pass_reward: float, is_graded: bool
) -> dict[str, Estimate]:
    """Return the means of an evaluation, with their standard errors over its prompts.

    `reward`; `accuracy`, if the reward has the part `correct`; and, unless a game was played, for n
    samples `avg_at_n` (mean grade: see `grades`), `pass_at_k` for k = 1, 2, 4, ... and n, and
    `maj_at_n`, if final answers were read. An answer passes if its grade is at least `pass_reward`.
    With one sample, only pass_at_1 of these.

    Args:
        answers: at least one.
        samples: n.
        pass_reward: least grade that passes.
        is_graded: see `grades`.
    """
    rewards: dict[int, list[float]] = {}
    for answer in answers:
        rewards.setdefault(answer.index, []).append(answer.reward)
    results = {"reward": estimate([*rewards.values()])}
    groups = [*grades(answers, is_graded=is_graded).values()]
    if not groups:
        return results
    mean = estimate([[grade for _, grade in group] for group in groups])
    if is_graded:
        results["accuracy"] = mean
    if any(answer.seat for answer in answers):
        return results
    if samples > 1:
        results[f"avg_at_{samples}"] = mean
    passed = [[float(grade >= pass_reward) for _, grade in group] for group in groups]
    for k in doubling(samples):
        counts = [(len(p), int(sum(p))) for p in passed if len(p) >= k]
        if counts:
            results[f"pass_at_{k}"] = estimate([[pass_at_k(n, c, k)] for n, c in counts])
    if samples > 1 and any(answer.answer is not None for answer in answers):
        votes = [
            majority([answer.answer for answer, _ in group], p)
            for group, p in zip(groups, passed, strict=True)
        ]
        results[f"maj_at_{samples}"] = estimate([[vote] for vote in votes])
    return results


def changes(
    before: Sequence[EvalAnswer], after: Sequence[EvalAnswer], *, is_graded: bool
) -> dict[str, Estimate]:
    """Return the paired differences of `after` to `before` over the prompts that both have: of the
    reward, and of the accuracy; {}: they have no prompt in common."""
    differences: dict[str, Estimate] = {}
    pairs = [_by_key((answer, answer.reward) for answer in side) for side in (before, after)]
    if (reward := paired_difference(*pairs)) is not None:
        differences["reward"] = reward[0]
    if is_graded:
        pairs = [
            _by_key(pair for group in grades(side, is_graded=True).values() for pair in group)
            for side in (before, after)
        ]
        if (accuracy := paired_difference(*pairs)) is not None:
            differences["accuracy"] = accuracy[0]
    return differences


def _by_key(pairs: Iterable[tuple[EvalAnswer, float]]) -> dict[str, list[float]]:
    values_of: dict[str, list[float]] = {}
    for answer, value in pairs:
        values_of.setdefault(answer.key, []).append(value)
    return values_of


def facts(answers: Sequence[EvalAnswer]) -> dict[str, float]:
    """Return the mean length in tokens, the share that a limit cut off, and each seat's mean
    reward."""
    count = len(answers)
    seats: dict[str, list[float]] = {}
    for a in answers:
        if a.seat:
            seats.setdefault(a.seat, []).append(a.reward)
    return {
        "length_mean": sum(a.length for a in answers) / count,
        "truncated_share": sum(a.stop == StopReason.LENGTH.value for a in answers) / count,
        **{f"seat_{seat}": math.fsum(r) / len(r) for seat, r in sorted(seats.items())},
    }


def flat(named: Mapping[str, Estimate], suffix: str = "") -> dict[str, float]:
    """Return estimates as metrics: NAME and NAME_stderr, with a suffix after NAME."""
    means = {f"{name}{suffix}": one.mean for name, one in named.items()}
    errors = {f"{name}{suffix}_stderr": one.stderr for name, one in named.items()}
    return means | {name: error for name, error in errors.items() if error is not None}
