"""Symptoms of a run that continues and learns nothing, each with its line of the docs.

An update shows a symptom if its metrics are beyond a limit. IN_A_ROW updates in a row that show one
are a warning; the next warning of it comes only after an update without it, and as many again. A
symptom that follows from another one (FOLLOWS) is no warning while that one lasts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

IN_A_ROW = 10
"""Updates in a row after which a symptom is a warning."""
NO_GRADIENT = 1e-12
"""Largest norm of a gradient that changes nothing."""
COLLAPSED = 1e-4
"""Largest mean entropy of a token, nats, of a policy that always gives the same answer."""
NEARLY_ALL = 0.999
"""Smallest share of answers that counts as all of them."""
EQUAL = 1e-9
"""Largest standard deviation of rewards that are equal, as a share of their mean: rounding."""
DOCS = "docs/troubleshooting.md"


@dataclass(frozen=True, slots=True)
class Symptom:
    """What an update may show."""

    shown: Callable[[Mapping[str, float]], bool]  # by its metrics; missing ones show nothing
    says: str
    section: str  # of DOCS


def _at_most(key: str, limit: float) -> Callable[[Mapping[str, float]], bool]:
    return lambda values: values.get(key, float("inf")) <= limit


def _at_least(key: str, limit: float) -> Callable[[Mapping[str, float]], bool]:
    return lambda values: values.get(key, float("-inf")) >= limit


def _equal_rewards(values: Mapping[str, float]) -> bool:
    if "reward/std" not in values:
        return False
    return values["reward/std"] <= EQUAL * abs(values.get("reward/mean", 0.0))


def _collapsed(values: Mapping[str, float]) -> bool:
    return "reward/mean" in values and values.get("policy/entropy", 1.0) <= COLLAPSED


SYMPTOMS = {
    "no gradient": Symptom(
        _at_most("train/grad_norm", NO_GRADIENT),
        "had no gradient (train/grad_norm 0): nothing is learned. In reinforcement learning all "
        "answers of each group then earn the same (reward/zero_variance_share)",
        "no-gradient",
    ),
    "collapsed entropy": Symptom(
        _collapsed,
        f"had a policy/entropy below {COLLAPSED:g} nats: the policy gives one answer alone, and "
        "samples no other to learn from. Unless that answer is right, lower "
        "algorithm.learning_rate and start from an earlier checkpoint",
        "collapsed-entropy",
    ),
    "truncated answers": Symptom(
        _at_least("rollout/truncated_share", NEARLY_ALL),
        "had only answers that were cut off (rollout/truncated_share 1): rewards judge what is "
        "unfinished. Raise sampler.max_new_tokens",
        "truncated-answers",
    ),
    "equal rewards": Symptom(
        _equal_rewards,
        "had only answers of the same reward (reward/std 0): none is better than another. Unless "
        "all are right, try the reward function by hand on lines of samples.jsonl",
        "equal-rewards",
    ),
}
"""What is looked for, by name."""
FOLLOWS = {"equal rewards": "no gradient"}
"""What has the same cause as another symptom, which says more."""


class Symptoms:
    """Counts the symptoms of a run's updates in a row. Used by one thread at a time."""

    def __init__(self) -> None:
        self._in_a_row = dict.fromkeys(SYMPTOMS, 0)

    def warnings(self, values: Mapping[str, float]) -> list[str]:
        """Count an update by its metrics; return what is to be said after it. Reports without an
        update (evaluations) count for nothing."""
        if "train/grad_norm" not in values:
            return []
        said = []
        for name, symptom in SYMPTOMS.items():
            self._in_a_row[name] = self._in_a_row[name] + 1 if symptom.shown(values) else 0
            is_said = self._in_a_row.get(FOLLOWS.get(name, ""), 0) >= IN_A_ROW
            if self._in_a_row[name] == IN_A_ROW and not is_said:
                said.append(
                    f"the last {IN_A_ROW} updates {symptom.says} ({DOCS}#{symptom.section})"
                )
        return said
