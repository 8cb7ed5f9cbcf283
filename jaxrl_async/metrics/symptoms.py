"""Symptoms of a run that continues without learning, each with its line of the docs.

An update shows a symptom if its metrics exceed a limit. IN_A_ROW updates in a row that show it lead
to a warning. The next warning requires an update without the symptom, and then as many again. A
symptom that follows from another one (FOLLOWS) leads to no warning while the other one lasts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

IN_A_ROW = 10
"""Number of updates in a row after which a symptom leads to a warning."""
NO_GRADIENT = 1e-12
"""Gradient norm up to which an update changes nothing."""
COLLAPSED = 1e-4
"""Mean token entropy up to which a policy always gives the same answer, nats."""
NEARLY_ALL = 0.999
"""Share of answers from which on it counts as all of them."""
EQUAL = 1e-9
"""Standard deviation up to which rewards count as equal, as a share of their mean: rounding."""
DOCS = "docs/troubleshooting.md"


@dataclass(frozen=True, slots=True)
class Symptom:
    """A symptom that an update may show."""

    shown: Callable[[Mapping[str, float]], bool]  # from its metrics; missing ones show no symptom
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
        f"had a policy/entropy below {COLLAPSED:g} nats: the policy gives only one answer, and "
        "samples no other to learn from. Unless that answer is right, lower "
        "algorithm.learning_rate and start from an earlier checkpoint",
        "collapsed-entropy",
    ),
    "truncated answers": Symptom(
        _at_least("rollout/truncated_share", NEARLY_ALL),
        "had only answers that were cut off (rollout/truncated_share 1): rewards judge "
        "unfinished answers. Raise sampler.max_new_tokens",
        "truncated-answers",
    ),
    "equal rewards": Symptom(
        _equal_rewards,
        "had only answers of the same reward (reward/std 0): no answer is better than another. "
        "Unless all are right, test the reward function by hand on lines of samples.jsonl",
        "equal-rewards",
    ),
}
"""The symptoms that are checked, by name."""
FOLLOWS = {"equal rewards": "no gradient"}
"""Symptoms with the same cause as another, more specific one."""


class Symptoms:
    """Counts a run's updates in a row with each symptom. Used by one thread at a time."""

    def __init__(self) -> None:
        self._in_a_row = dict.fromkeys(SYMPTOMS, 0)

    def warnings(self, values: Mapping[str, float]) -> list[str]:
        """Count an update by its metrics; return the warnings to log after it. Reports without an
        update (evaluations) are ignored."""
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
