"""Alerts of a run: what its metrics say of a run that does not learn, and where help is."""

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby

from jaxrl_async.metrics.symptoms import DOCS, FOLLOWS, IN_A_ROW, SYMPTOMS
from jaxrl_async.view.watched import WatchedRun

TABLE = "it-runs-and-does-not-learn"
"""Section of DOCS with a table of metrics, their problems and remedies."""


@dataclass(frozen=True, slots=True)
class AlertRule:
    """A problem that updates show in their metrics."""

    title: str
    keys: tuple[str, ...]  # metrics to look at
    shown: Callable[[Mapping[str, float]], bool]  # missing metrics show no problem
    says: str  # after "N updates"
    section: str = TABLE  # of DOCS
    in_a_row: int = IN_A_ROW  # updates that make an alert
    behind: str = ""  # a rule whose alert says the same more strongly


def _at_least(key: str, limit: float) -> Callable[[Mapping[str, float]], bool]:
    return lambda values: values.get(key, float("-inf")) >= limit


def _at_most(key: str, limit: float) -> Callable[[Mapping[str, float]], bool]:
    return lambda values: values.get(key, float("inf")) <= limit


LOOKED_AT = {
    "no gradient": ("train/grad_norm", "reward/zero_variance_share"),
    "collapsed entropy": ("policy/entropy",),
    "truncated answers": ("rollout/truncated_share",),
    "equal rewards": ("reward/std", "reward/mean"),
}
"""Metrics to look at for each symptom."""
RULES = (
    *(
        AlertRule(
            title=name,
            keys=LOOKED_AT.get(name, ()),
            shown=symptom.shown,
            says=symptom.says,
            section=symptom.section,
            behind=FOLLOWS.get(name, ""),
        )
        for name, symptom in SYMPTOMS.items()
    ),
    AlertRule(
        title="little signal",
        keys=("reward/zero_variance_share", "reward/mean"),
        shown=_at_least("reward/zero_variance_share", 0.9),
        says="had equal rewards in at least 90 % of the groups (reward/zero_variance_share), from "
        "which nothing is learned. Unless the task is solved, give easier or harder prompts, a "
        "larger algorithm.group_size, or set algorithm.dynamic_sampling",
        behind="no gradient",
    ),
    AlertRule(
        title="far from the reference",
        keys=("policy/kl_reference",),
        shown=_at_least("policy/kl_reference", 0.5),
        says="had a policy/kl_reference of at least 0.5 nats per token: the policy writes texts "
        "that the reference finds improbable. Raise algorithm.kl_coefficient, or lower "
        "algorithm.learning_rate",
    ),
    AlertRule(
        title="far from the sampler's policy",
        keys=("policy/k3_behavior", "policy/ratio_max", "policy/ratio_min"),
        shown=_at_least("policy/k3_behavior", 0.1),
        says="had a policy/k3_behavior of at least 0.1 nats per token: the policy that is trained "
        "is far from the one that sampled. Lower algorithm.learning_rate, algorithm.epochs or "
        "staleness.max_staleness",
    ),
    AlertRule(
        title="clipped ratios",
        keys=("policy/clip_share", "policy/ratio_max", "policy/ratio_min"),
        shown=_at_least("policy/clip_share", 0.2),
        says="clipped away the gradient of at least 20 % of the tokens (policy/clip_share). Lower "
        "algorithm.learning_rate, or algorithm.epochs",
    ),
    AlertRule(
        title="data too old",
        keys=("offpolicy/ess_share", "staleness/mean"),
        shown=_at_most("offpolicy/ess_share", 0.5),
        says="had an effective sample size of at most half of the tokens (offpolicy/ess_share): "
        "the data is too old for the rate at which the policy changes. Lower "
        "staleness.max_staleness or algorithm.learning_rate",
    ),
    AlertRule(
        title="many truncated answers",
        keys=("rollout/truncated_share", "rollout/length_mean"),
        shown=_at_least("rollout/truncated_share", 0.5),
        says="had at least half of their answers cut off (rollout/truncated_share). Raise "
        "sampler.max_new_tokens, or penalise length (algorithm.shaping)",
        section="truncated-answers",
        behind="truncated answers",
    ),
    AlertRule(
        title="mismatch",
        keys=("mismatch/mean", "mismatch/max", "weights/probe_error"),
        shown=_at_least("mismatch/mean", 0.01),
        says="had a mismatch/mean of at least 0.01 nats: with the same weights, sampler and "
        "trainer compute different log-probs. See model.dtype, weights.dtype and "
        "algorithm.keep_routing",
        section="the-samplers-log-probs-on-the-probe-differ",
    ),
    AlertRule(
        title="skipped update",
        keys=("train/skipped", "train/blown_up", "train/grad_norm"),
        shown=_at_least("train/skipped", 1.0),
        says="changed no weights (train/skipped): loss, gradient or new weights were not finite "
        "or far too large. Lower algorithm.learning_rate, or raise trainer.warmup_steps",
        in_a_row=1,
    ),
)
"""What is looked for, the symptoms that are logged (metrics/symptoms.py) first."""
NEEDED = (
    "train/grad_norm",  # which only updates have
    *{key for rule in RULES for key in rule.keys},
)


def alerts(run: WatchedRun) -> list[dict[str, object]]:
    """Return the alerts of a run: of each rule the last stretch of at least `in_a_row` updates that
    show it, with its first and last step, and whether it lasts; those that last come first."""
    updates: dict[int, dict[str, float]] = {step: {} for step, _ in run.points("train/grad_norm")}
    for key in NEEDED:
        for step, value in run.points(key):
            if step in updates:
                updates[step][key] = value
    steps = sorted(updates)
    found: dict[str, dict[str, object]] = {}
    for rule in RULES:
        stretch = last_stretch([rule.shown(updates[step]) for step in steps], rule.in_a_row)
        if stretch is None:
            continue
        first, last = (steps[place] for place in stretch)
        stronger = found.get(rule.behind)
        if stronger is not None and (stronger["lasts"] or stretch[1] < len(steps) - 1):
            continue
        count = stretch[1] - stretch[0] + 1
        found[rule.title] = {
            "title": rule.title,
            "says": f"{count:,} {'update' if count == 1 else 'updates'} {rule.says}.",
            "first": first,
            "last": last,
            "lasts": stretch[1] == len(steps) - 1,
            "keys": [key for key in rule.keys if run.points(key)],
            "help": f"{DOCS}#{rule.section}",
        }
    return sorted(found.values(), key=lambda alert: not alert["lasts"])


def last_stretch(shown: list[bool], in_a_row: int) -> tuple[int, int] | None:
    """Return the first and the last place of the last stretch of at least `in_a_row` true
    values."""
    end = 0
    last: tuple[int, int] | None = None
    for value, places in groupby(shown):
        begin, end = end, end + len(list(places))
        if value and end - begin >= in_a_row:
            last = begin, end - 1
    return last


@cache
def documentation() -> str:
    """Return the address of the documentation, as the installed package names it; "" if it names
    none."""
    try:
        urls = importlib.metadata.metadata("jaxrl_async").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    named = dict(url.split(", ", 1) for url in urls if ", " in url)
    address = named.get("Documentation", "")
    return address if address.startswith("https://") else ""
