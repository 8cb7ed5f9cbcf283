"""Symptoms of a run that continues without learning, each with its line of the docs.

An update shows a symptom if its metrics exceed a limit. IN_A_ROW updates in a row that show it lead
to a warning. The next warning requires an update without the symptom, and then as many again. A
symptom that follows from another one (FOLLOWS) leads to no warning while the other one lasts. The
dashboard shows them as alerts, and milder problems, too (ALERT_RULES).
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
    text: str
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
        texts = []
        for name, symptom in SYMPTOMS.items():
            self._in_a_row[name] = self._in_a_row[name] + 1 if symptom.shown(values) else 0
            is_covered = self._in_a_row.get(FOLLOWS.get(name, ""), 0) >= IN_A_ROW
            if self._in_a_row[name] == IN_A_ROW and not is_covered:
                texts.append(
                    f"the last {IN_A_ROW} updates {symptom.text} ({DOCS}#{symptom.section})"
                )
        return texts


# ---- alerts of the dashboard

TABLE = "debugging-a-run-that-does-not-learn"
"""Section of DOCS with a table of metrics, their problems and remedies."""


@dataclass(frozen=True, slots=True)
class AlertRule:
    """A problem that updates show in their metrics."""

    title: str
    keys: tuple[str, ...]  # metrics to look at
    shown: Callable[[Mapping[str, float]], bool]  # missing metrics show no problem
    text: str  # after "N updates"
    section: str = TABLE  # of DOCS
    in_a_row: int = IN_A_ROW  # updates that make an alert
    behind: str = ""  # a rule whose alert says the same more strongly


LOOKED_AT = {
    "no gradient": ("train/grad_norm", "reward/zero_variance_share"),
    "collapsed entropy": ("policy/entropy",),
    "truncated answers": ("rollout/truncated_share",),
    "equal rewards": ("reward/std", "reward/mean"),
}
"""Metrics to look at for each symptom."""
ALERT_RULES = (
    *(
        AlertRule(
            title=name,
            keys=LOOKED_AT.get(name, ()),
            shown=symptom.shown,
            text=symptom.text,
            section=symptom.section,
            behind=FOLLOWS.get(name, ""),
        )
        for name, symptom in SYMPTOMS.items()
    ),
    AlertRule(
        title="little signal",
        keys=("reward/zero_variance_share", "reward/mean"),
        shown=_at_least("reward/zero_variance_share", 0.9),
        text="had equal rewards in at least 90 % of the groups (reward/zero_variance_share), from "
        "which nothing is learned. Unless the task is solved, give easier or harder prompts, a "
        "larger algorithm.group_size, or set algorithm.dynamic_sampling",
        behind="no gradient",
    ),
    AlertRule(
        title="far from the reference",
        keys=("policy/kl_reference",),
        shown=_at_least("policy/kl_reference", 0.5),
        text="had a policy/kl_reference of at least 0.5 nats per token: the policy writes texts "
        "that the reference finds improbable. Raise algorithm.kl_coefficient, or lower "
        "algorithm.learning_rate",
    ),
    AlertRule(
        title="far from the sampler's policy",
        keys=("policy/k3_behavior", "policy/ratio_max", "policy/ratio_min"),
        shown=_at_least("policy/k3_behavior", 0.1),
        text="had a policy/k3_behavior of at least 0.1 nats per token: the policy that is trained "
        "is far from the one that sampled. Lower algorithm.learning_rate, algorithm.epochs or "
        "staleness.max_staleness",
    ),
    AlertRule(
        title="clipped ratios",
        keys=("policy/clip_share", "policy/ratio_max", "policy/ratio_min"),
        shown=_at_least("policy/clip_share", 0.2),
        text="clipped away the gradient of at least 20 % of the tokens (policy/clip_share). Lower "
        "algorithm.learning_rate, or algorithm.epochs",
    ),
    AlertRule(
        title="data too old",
        keys=("offpolicy/ess_share", "staleness/mean"),
        shown=_at_most("offpolicy/ess_share", 0.5),
        text="had an effective sample size of at most half of the tokens (offpolicy/ess_share): "
        "the data is too old for the rate at which the policy changes. Lower "
        "staleness.max_staleness or algorithm.learning_rate",
    ),
    AlertRule(
        title="many truncated answers",
        keys=("rollout/truncated_share", "rollout/length_mean"),
        shown=_at_least("rollout/truncated_share", 0.5),
        text="had at least half of their answers cut off (rollout/truncated_share). Raise "
        "sampler.max_new_tokens, or penalise length (algorithm.shaping)",
        section="truncated-answers",
        behind="truncated answers",
    ),
    AlertRule(
        title="mismatch",
        keys=("mismatch/mean", "mismatch/max", "weights/probe_error"),
        shown=_at_least("mismatch/mean", 0.01),
        text="had a mismatch/mean of at least 0.01 nats: with the same weights, sampler and "
        "trainer compute different log-probs. See model.dtype, weights.dtype and "
        "algorithm.keep_routing",
        section="the-samplers-log-probs-on-the-probe-differ",
    ),
    AlertRule(
        title="skipped update",
        keys=("train/skipped", "train/blown_up", "train/grad_norm"),
        shown=_at_least("train/skipped", 1.0),
        text="changed no weights (train/skipped): loss, gradient or new weights were not finite "
        "or far too large. Lower algorithm.learning_rate, or raise trainer.warmup_steps",
        in_a_row=1,
    ),
)
"""What is looked for, the symptoms that are logged (metrics/symptoms.py) first."""
NEEDED_BY_RULES = (
    "train/grad_norm",  # which only updates have
    *{key for rule in ALERT_RULES for key in rule.keys},
)
