"""Declare every metric of a run once: key, reduction, unit, meaning.

Keys are "namespace/name". A key that contains <...> is a family (`staleness/tokens_lag_<n>`): any
text matches there. docs/metrics.md is generated from this table (`markdown()`); a test compares.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean that can be merged: a sum and the count of what was summed."""

    total: float
    count: float = 1.0

    @property
    def value(self) -> float:
        """total / count; NaN if nothing was counted."""
        return self.total / self.count if self.count else math.nan

    def merge(self, other: "Mean") -> "Mean":
        """Return the mean over both."""
        return Mean(self.total + other.total, self.count + other.count)


@dataclass(frozen=True, slots=True)
class Sum:
    """A total."""

    value: float

    def merge(self, other: "Sum") -> "Sum":
        """Return the total of both."""
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Max:
    """A maximum."""

    value: float

    def merge(self, other: "Max") -> "Max":
        """Return the larger of both."""
        return Max(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Min:
    """A minimum."""

    value: float

    def merge(self, other: "Min") -> "Min":
        """Return the smaller of both."""
        return Min(min(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Last:
    """The newest value; `merge(other)` assumes that other is newer."""

    value: float

    def merge(self, other: "Last") -> "Last":
        """Return the newer of both: `other`."""
        return other


Reduction = Mean | Sum | Max | Min | Last


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One documented key of metrics.jsonl."""

    key: str
    kind: type[Mean] | type[Sum] | type[Max] | type[Min] | type[Last]
    unit: str
    help: str
    timing: bool = (
        False  # depends on wall time or on the machine: ignored when two runs are compared
    )


def _metrics(kind: type, timing: bool, *rows: tuple[str, str, str]) -> tuple[Metric, ...]:
    return tuple(Metric(key=k, kind=kind, unit=u, help=h, timing=timing) for k, u, h in rows)


METRICS: tuple[Metric, ...] = (
    *_metrics(
        Mean,
        False,
        (
            "preference/accuracy",
            "share",
            "Pairs whose chosen answer has the higher reward; a tie counts half.",
        ),
        ("preference/margin", "reward", "Reward of the chosen less that of the rejected answer."),
        (
            "preference/chosen_reward",
            "reward",
            "Mean reward of chosen answers, as the loss or the reward model defines it.",
        ),
        ("preference/rejected_reward", "reward", "The same for rejected answers."),
        ("preference/chosen_length", "tokens", "Learnt tokens of a chosen answer."),
        ("preference/rejected_length", "tokens", "Learnt tokens of a rejected answer."),
        ("critic/loss", "loss", "Clipped squared error of the values, halved."),
        ("critic/clip_share", "share", "Learnt tokens whose value gradient was clipped away."),
        ("critic/value_mean", "reward", "Mean value of the states in which tokens were drawn."),
        ("critic/return_mean", "reward", "Mean of the returns that the critic learns."),
        (
            "critic/explained_variance",
            "share",
            "1 - Var(returns - values) / Var(returns), before the update; absent without variance.",
        ),
    ),
    *_metrics(
        Sum,
        False,
        ("preference/pairs", "pairs", "Preference pairs in the step, halves included."),
        ("critic/tokens", "tokens", "Tokens whose value was learnt."),
        ("critic/skipped", "steps", "1 if the critic's loss or gradient was not finite."),
    ),
    *_metrics(
        Last,
        False,
        ("preference/kl_baseline", "nats", "Baseline z0 of the kto loss, from mismatched answers."),
        ("critic/grad_norm", "norm", "Global norm of the critic's gradient before clipping."),
        ("critic/param_norm", "norm", "Global norm of the critic's weights."),
        ("critic/learning_rate", "rate", "The critic's learning rate of the step."),
    ),
    *_metrics(
        Mean,
        False,
        ("reward/mean", "reward", "Mean over the step's episodes, as scored."),
        ("reward/std", "reward", "Standard deviation over the step's episodes."),
        (
            "reward/zero_variance_share",
            "share",
            "Groups whose rewards are all equal: nothing to learn.",
        ),
        (
            "reward/<part>",
            "reward",
            "Mean of a named part of the reward, before weighting. Characters of its name other "
            "than letters, digits and _ . - become _.",
        ),
        ("rollout/length_mean", "tokens", "Drawn tokens in an episode."),
        ("rollout/truncated_share", "share", "Episodes that hit a length limit."),
        ("rollout/turns_mean", "turns", "Turns of the policy in an episode."),
        (
            "rollout/kept_mean",
            "tokens",
            "Tokens in the sampling mask of a drawn token (keep_sampling_mask).",
        ),
        ("policy/entropy", "nats", "Entropy of the next-token distribution, over learnt tokens."),
        ("policy/kl_reference", "nats", "Divergence from the frozen reference, by algorithm.kl."),
        ("policy/teacher_divergence", "nats", "Divergence from the teacher (teacher.form=loss)."),
        ("policy/teacher_gap", "nats", "log policy - log teacher of drawn tokens: reverse KL."),
        ("supervised/loss", "nats", "Cross entropy of the worked answers mixed into the step."),
        ("reward/kl", "reward", "Mean KL penalty subtracted from an episode's reward."),
        ("policy/ratio_mean", "ratio", "exp(policy - behaviour log-prob) over learnt tokens."),
        ("policy/clip_share", "share", "Learnt tokens whose gradient the loss clipped away."),
        ("policy/truncated_share", "share", "Learnt tokens whose importance weight was truncated."),
        ("policy/weight_mean", "ratio", "Importance weight of a learnt token, after correction."),
        ("policy/k1_behavior", "nats", "Policy vs behaviour: mean of behaviour - policy."),
        ("policy/k3_behavior", "nats", "The same by r - 1 - log r, r the ratio; never negative."),
        (
            "policy/recomputed_logprob_share",
            "share",
            "Learnt tokens without a sampler's log-prob: the trainer's own was used, ratio 1.",
        ),
        (
            "routing/replayed_share",
            "share",
            "Tokens of the batch whose experts are the sampler's (algorithm.keep_routing).",
        ),
        (
            "routing/changed_share",
            "share",
            "Share of those, per layer, for which the trainer's router would choose others.",
        ),
        ("routing/changed_token_share", "share", "The same per token, in any of its layers."),
        ("mismatch/mean", "nats", "|sampler - trainer log-prob| at lag 0: same weights."),
        ("mismatch/all_mean", "nats", "The same over tokens of every lag."),
        ("offpolicy/weight_mean", "ratio", "w = proximal / behaviour, over learnt tokens."),
        ("offpolicy/weight_square_mean", "ratio", "w^2, over learnt tokens."),
        ("offpolicy/ess_share", "share", "Effective sample size of the tokens by w; 1 on-policy."),
        ("offpolicy/chi_square", "ratio", "Chi-square divergence, mean w^2 - 1; 0 on-policy."),
        ("offpolicy/k3", "nats", "KL(behaviour || proximal), mean of w - 1 - log w."),
        ("offpolicy/k3_lag0", "nats", "The same at lag 0: same weights, so only numerics differ."),
        (
            "offpolicy/geometric_ratio_mean",
            "ratio",
            "Geometric mean of w over a sequence, mean over sequences.",
        ),
        (
            "offpolicy/sequence_weight_mean",
            "ratio",
            "W, the product of w over a sequence; mean over sequences.",
        ),
        ("offpolicy/sequence_weight_square_mean", "ratio", "W^2, mean over sequences."),
        (
            "offpolicy/sequence_ess_share",
            "share",
            "Effective sample size of the sequences by W; 1 on-policy.",
        ),
        ("staleness/mean", "versions", "Trainer's version minus the token's, over learnt tokens."),
        (
            "staleness/lag_<n>_reward",
            "reward",
            "Reward of the episodes, over tokens n versions old.",
        ),
        (
            "staleness/lag_<n>_length",
            "tokens",
            "Drawn tokens of the episodes, over the same tokens.",
        ),
        (
            "staleness/lag_<n>_kl",
            "nats",
            "Divergence from the behaviour policy, over the same tokens.",
        ),
        (
            "staleness/dropped_length_mean",
            "tokens",
            "Drawn tokens of an answer in dropped groups; shows a length bias.",
        ),
        (
            "staleness/dropped_share",
            "share",
            "Finished groups that were dropped, as a share of those dropped or trained on.",
        ),
        (
            "data/drawn_difficulty_mean",
            "share",
            "1 - pass rate of the step's prompts, as known when drawn; absent if none was known.",
        ),
        (
            "train/loss",
            "loss",
            "The loss that the optimizer minimised: policy, KL and entropy terms.",
        ),
        ("train/policy_loss", "loss", "The policy loss alone."),
        ("train/packing", "share", "Share of the packed rows that is tokens; the rest is padding."),
        (
            "eval/accuracy",
            "share",
            "rl: mean of the reward's part `correct` on the held-out prompts, absent if the reward "
            "has no such part; sft: records that greedy decoding reproduces token for token; "
            "preferences: pairs ranked right.",
        ),
        ("eval/token_accuracy", "share", "sft: held-out tokens that greedy decoding predicts."),
        ("eval/loss", "loss", "Loss on the held-out examples; sft: nats per token."),
        (
            "eval/margin",
            "reward",
            "Reward of the chosen less that of the rejected answer, held-out pairs.",
        ),
        (
            "eval/chosen_reward",
            "reward",
            "As preference/chosen_reward, of held-out pairs.",
        ),
        ("eval/rejected_reward", "reward", "As preference/rejected_reward, of held-out pairs."),
        ("eval/reward", "reward", "Mean reward on the held-out prompts."),
        ("eval/length_mean", "tokens", "Drawn tokens in a held-out answer."),
        ("eval/truncated_share", "share", "Held-out answers that hit a length limit."),
        ("warm/loss", "nats", "Loss per answer token in the warm start's last update."),
    ),
    *_metrics(
        Max,
        False,
        ("rollout/length_max", "tokens", "Most drawn tokens in an episode."),
        ("policy/ratio_max", "ratio", "Largest policy / behaviour ratio of a learnt token."),
        ("mismatch/max", "nats", "Largest |sampler - trainer log-prob| at lag 0."),
        ("mismatch/all_max", "nats", "The same over tokens of every lag."),
        (
            "staleness/max",
            "versions",
            "Trainer's version minus a group's oldest token's; bounded by max_staleness.",
        ),
    ),
    *_metrics(
        Min,
        False,
        ("policy/ratio_min", "ratio", "Smallest policy / behaviour ratio of a learnt token."),
    ),
    *_metrics(
        Sum,
        False,
        ("staleness/tokens_lag_<n>", "tokens", "Learnt tokens n versions old: a histogram."),
        ("staleness/wasted_tokens", "tokens", "Drawn tokens of the groups dropped in this step."),
        ("staleness/dropped_<reason>", "groups", "Groups dropped in this step for this reason."),
        ("shaping/<what>", "episodes", "Episodes whose reward or mask a shaping changed."),
        ("train/updates", "updates", "Optimizer updates in the step."),
        (
            "train/missing_updates",
            "updates",
            "Mini-batches left out: the step has fewer sequences than algorithm.minibatches.",
        ),
        ("critic/warming", "steps", "1 if only the critic learnt in this step."),
        ("supervised/tokens", "tokens", "Tokens of worked answers mixed into the step."),
        ("train/skipped", "steps", "1 if loss or gradient was not finite: no update."),
        ("train/tokens", "tokens", "Learnt tokens."),
        ("train/sequences", "sequences", "Sequences with at least one learnt token."),
        ("train/sequence_tokens", "tokens", "Tokens in the packed rows, prompts included."),
        ("warm/updates", "updates", "Updates of the supervised warm start."),
        ("train/flops", "FLOP", "Model FLOP of the step, forward and backward."),
        ("train/rows", "rows", "Packed rows in all micro-batches."),
        ("train/micro_batches", "passes", "Forward and backward passes in the step."),
    ),
    *_metrics(
        Last,
        False,
        ("policy/kl_coefficient", "weight", "Weight of the divergence from the reference."),
        ("policy/entropy_coefficient", "weight", "Weight of the entropy bonus."),
        ("train/grad_norm", "norm", "Global norm of the gradient before clipping."),
        ("train/param_norm", "norm", "Global norm of the weights."),
        ("train/learning_rate", "rate", "Learning rate of the step."),
        ("staleness/limit", "versions", "Staleness target from now on (staleness.adapt)."),
        (
            "data/difficulty_mean",
            "share",
            "1 - pass rate, over the prompts measured by the next draw (data.curriculum).",
        ),
        ("data/measured_prompts", "prompts", "Prompts whose pass rate was known at that draw."),
        (
            "data/longest_passed_over",
            "groups",
            "Draws for which the oldest prompt of the pool has been passed over; bounded.",
        ),
    ),
    *_metrics(
        Last,
        True,
        ("time/step_s", "s", "Wall time of the step: waiting, learning, publishing, evaluating."),
        ("time/train_s", "s", "Packing, forward and backward passes, update."),
        ("time/wait_data_s", "s", "Time the trainer waited because too few groups were ready."),
        ("time/publish_s", "s", "Time the trainer spent on sending the new weights."),
        ("time/eval_s", "s", "Evaluation on the held-out prompts."),
        ("time/save_s", "s", "Time a checkpoint stopped the trainer."),
        ("time/warm_start_s", "s", "All updates of the supervised warm start."),
        ("time/elapsed_s", "s", "Time since the run, or its resume, began."),
        ("trainer/idle_share", "share", "Share of the step in which the trainer did not learn."),
        ("sampler/idle_share", "share", "Wall time in which the sampler had nothing to decode."),
        ("sampler/busy_share", "share", "Wall time in which the sampler had work on its devices."),
        ("sampler/slot_occupancy", "share", "Decode steps x slots that drew a wanted token."),
        (
            "sampler/occupancy_while_waiting",
            "share",
            "The same, over blocks that ended with requests still waiting; absent without such.",
        ),
        ("sampler/prefix_hit_share", "share", "Prompt tokens whose KV was reused, not computed."),
        ("sampler/kv_page_share", "share", "KV pages in use, including kept prefixes."),
        ("sampler/in_flight", "requests", "Requests in a slot or in the reserve."),
        (
            "sampler/failed",
            "requests",
            "Requests that raised on the sampler's thread and failed alone.",
        ),
        ("sampler/preempted", "requests", "Requests preempted because KV pages ran out."),
        (
            "sampler/restarted",
            "requests",
            "Requests restarted after a swap (on_new_weights=restart).",
        ),
        ("sampler/discarded_tokens", "tokens", "Tokens drawn, then discarded by a restart."),
        (
            "sampler/recomputed_tokens",
            "tokens",
            "Tokens prefilled again after a swap or a preemption.",
        ),
        ("sampler/gate_wait_share", "share", "Wall time that rollouts waited at the gate."),
        ("sampler/queue_s", "s", "Mean time from submit to prefill."),
        ("throughput/generated_tokens_per_s", "tokens/s", "Tokens drawn per second of wall time."),
        ("throughput/trained_tokens_per_s", "tokens/s", "Tokens learnt per second of wall time."),
        ("throughput/mfu", "share", "Model FLOP of the step / (time/train_s x peak FLOP/s)."),
        (
            "weights/transfer_bytes",
            "bytes",
            "Bytes that one publish moved to the sampler's devices.",
        ),
        (
            "weights/transfer_s",
            "s",
            "From publish until the weights are complete on the sampler's devices.",
        ),
        (
            "weights/transfers",
            "transfers",
            "Copies of the weights that reached a sampler in a process of its own in this step; "
            "this and the next four keys are there with mesh.samplers_in=processes or elsewhere.",
        ),
        ("weights/sent_bytes", "bytes", "Bytes that those samplers fetched from the trainer."),
        ("weights/passed_bytes", "bytes", "Bytes that those samplers fetched from each other."),
        ("weights/gb_per_s", "GB/s", "Mean speed of one of these transfers."),
        ("weights/repeats", "transfers", "Transfers begun again: torn, or not done in time."),
        ("sampler/joins", "samplers", "Samplers in processes of their own that joined the run."),
        ("weights/live_s", "s", "From publish to the first decode block that uses the weights."),
        (
            "weights/probe_error",
            "nats",
            "Largest |sampler - trainer log-prob| on the probe, at the newest swap seen so far.",
        ),
        ("weights/swap_pause_s", "s", "Longest pause of decoding caused by a weight swap."),
        ("sampler/living", "samplers", "Samplers at work; fewer while one restarts."),
        ("buffer/active", "groups", "Groups admitted and not yet released: in flight or waiting."),
        ("buffer/ready", "groups", "Groups finished and waiting for the trainer."),
        ("checkpoint/failed", "saves", "1 if the previous checkpoint could not be written."),
        ("memory/host_bytes", "bytes", "Resident memory of the process."),
        ("memory/trainer_bytes", "bytes", "Peak memory of one trainer device."),
        ("memory/sampler_bytes", "bytes", "Peak memory of one sampler device."),
    ),
    *_metrics(
        Sum,
        True,
        ("faults/sampler_deaths", "deaths", "Samplers whose thread ended with an exception."),
        ("faults/sampler_hangs", "hangs", "Samplers abandoned: no block within sampler_hang_s."),
        (
            "faults/sampler_restarts",
            "restarts",
            "Samplers started to replace one that failed.",
        ),
        ("faults/samplers_lost", "samplers", "Samplers given up for good."),
        (
            "faults/redone_requests",
            "requests",
            "Requests restarted in another sampler, from where they were handed to the last.",
        ),
        (
            "faults/moved_requests",
            "requests",
            "Requests that a leaving sampler handed back; another continued them.",
        ),
        (
            "faults/sampler_process_ends",
            "processes",
            "Sampler processes of this machine that ended and were started again.",
        ),
        ("faults/samplers_joined", "samplers", "Samplers that joined while the run went on."),
        ("faults/samplers_left", "samplers", "Samplers that left and handed back their requests."),
        (
            "faults/samplers_cut_off",
            "samplers",
            "Samplers whose connection was lost, by a kill or a network cut.",
        ),
        (
            "faults/refused_answers",
            "messages",
            "Messages of samplers that could not be true; each ended its connection.",
        ),
        (
            "faults/nonfinite_completions",
            "completions",
            "Completions refused because a log-prob is not finite; drawn again once.",
        ),
        (
            "faults/failed_groups",
            "groups",
            "Groups given up: environment, scorer or log-probs failed.",
        ),
        (
            "faults/failed_evaluations",
            "evaluations",
            "Evaluations left out: environment or scorer failed.",
        ),
        ("faults/scorer_retries", "calls", "Groups scored again after a failure or a timeout."),
        ("faults/scorer_timeouts", "calls", "Calls of a scorer that timed out."),
        ("faults/refused_scores", "calls", "Scores of the wrong number, type or shape, or NaN."),
        ("faults/env_timeouts", "calls", "Replies of environments that timed out."),
        ("faults/refused_replies", "calls", "Replies of environments of the wrong type or shape."),
        (
            "faults/engine_retries",
            "calls",
            "Calls to a vLLM server that broke or met an overload; made again.",
        ),
        ("faults/transfer_retries", "transfers", "Weights sent again after a failed transfer."),
        (
            "faults/torn_transfers",
            "transfers",
            "Copies of weights that did not match their checksum or did not arrive; not used.",
        ),
        (
            "faults/transfers_given_up",
            "samplers",
            "Samplers let go because the weights did not reach them in several tries.",
        ),
        (
            "faults/oom_retries",
            "retries",
            "Updates restarted with half the rows in a micro-batch: out of memory.",
        ),
    ),
)
"""Every key of a run. Logging an undeclared key is a programmer's error."""

_EXACT = {m.key: m for m in METRICS if "<" not in m.key}
_FAMILIES = tuple(
    (re.compile(re.sub(r"<\w+>", r"[\\w.\\-]+", m.key)), m) for m in METRICS if "<" in m.key
)


MAX_PART = 80
"""Longest name of a part of the reward."""


def part_name(name: object) -> str:
    """Turn text into the name of a reward's part: all but letters, digits and _ . - become _."""
    return re.sub(r"[^\w.-]+", "_", str(name))[:MAX_PART] or "_"


def names_a_metric(part: str) -> bool:
    """Return whether the part's key (reward/PART) is already another metric's (reward/mean)."""
    return f"reward/{part}" in _EXACT


def metric_of(key: str) -> Metric:
    """Return the declaration of a key; assert that it is declared."""
    metric = _EXACT.get(key) or next(
        (m for pattern, m in _FAMILIES if pattern.fullmatch(key)), None
    )
    assert metric is not None, (
        f"metric {key!r} is not declared: add it to METRICS in metrics/metric.py"
    )
    return metric


def merge(parts: Iterable[Mapping[str, Reduction]]) -> dict[str, float]:
    """Reduce one step's metrics from several sources (micro-batches, processes) to numbers."""
    grouped: dict[str, list[Reduction]] = {}
    for part in parts:
        for key, value in part.items():
            kind = metric_of(key).kind
            assert isinstance(value, kind), f"metric {key!r} is a {kind.__name__}, got {value!r}"
            grouped.setdefault(key, []).append(value)
    return {key: reduce(_merged, values).value for key, values in grouped.items()}


def _merged(a: Any, b: Any) -> Any:
    return a.merge(b)


def comparable(line: Mapping[str, float]) -> dict[str, float]:
    """Return a line of metrics.jsonl without timing keys: equal for two equal runs."""
    return {k: v for k, v in line.items() if k == "step" or not metric_of(k).timing}


def markdown() -> str:
    """Return docs/metrics.md: one table per namespace, sorted by name."""
    spaces: dict[str, list[Metric]] = {}
    for m in METRICS:
        spaces.setdefault(m.key.split("/")[0], []).append(m)
    parts = [_HEAD]
    for space in sorted(spaces):
        parts.append(
            f"\n## {space}\n\n| key | unit | kind | meaning |\n| --- | --- | --- | --- |\n"
        )
        parts += [
            f"| `{m.key}` | {m.unit} | {m.kind.__name__.lower()}{', timing' if m.timing else ''} "
            f"| {m.help.replace('|', chr(92) + '|')} |\n"
            for m in sorted(spaces[space], key=lambda m: m.key)
        ]
    return "".join(parts)


_HEAD = """# Metrics

Generated by `python -m jaxrl_async.metrics.metric > docs/metrics.md`; change the table there.

`metrics.jsonl` in the run folder has one JSON object per step: `step` (the version that the step
made; 0 is before the first update), then the keys below, sorted. A key is absent if there was
nothing to measure. JSON cannot write numbers that are not finite: such a value is the string
`"nan"`, `"inf"` or `"-inf"` (Python's `float()` reads it back). The same keys are TensorBoard tags.

A resumed run continues in the same file. Lines of steps after the one from which it resumes are
moved to `metrics.superseded.jsonl` (samples: `samples.superseded.jsonl`): the run will make these
steps again.

A warm start has a `metrics.jsonl` of its own, in `warm_start/`, with one object per update: `step`
is the update, from 1. TensorBoard shows it as a run of its own.

*Kind* says how values of one step from several sources are merged. *timing* keys depend on wall
time or on the machine; all others are equal for two runs with the same seed at
`staleness.max_staleness=0`. `<...>` in a key stands for any name or number.
"""

if __name__ == "__main__":
    print(markdown(), end="")
