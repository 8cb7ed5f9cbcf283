"""The charts of a run's page, by section."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: a title, a unit, and the keys drawn in it with their labels."""

    title: str
    unit: str
    curves: tuple[tuple[str, str], ...]
    from_zero: bool = False


SECTIONS: tuple[tuple[str, tuple[Chart, ...]], ...] = (
    (
        "Learning",
        (
            Chart("Reward", "reward", (("reward/mean", "mean"), ("reward/std", "std"))),
            Chart("Held-out accuracy", "share", (("eval/accuracy", "accuracy"),), True),
            Chart("Held-out reward", "reward", (("eval/reward", "mean"),)),
            Chart("Held-out loss", "loss", (("eval/loss", "loss"),)),
            Chart(
                "Groups without signal",
                "share",
                (("reward/zero_variance_share", "zero variance"),),
                True,
            ),
            Chart("Loss", "loss", (("train/loss", "loss"), ("train/policy_loss", "policy loss"))),
            Chart("Gradient norm", "norm", (("train/grad_norm", "before clipping"),), True),
            Chart("Learning rate", "rate", (("train/learning_rate", "rate"),), True),
        ),
    ),
    (
        "Preferences",
        (
            Chart(
                "Pairs ranked right",
                "share",
                (("preference/accuracy", "in the step"),),
                True,
            ),
            Chart(
                "Margin",
                "reward",
                (("preference/margin", "training"), ("eval/margin", "held-out")),
            ),
            Chart(
                "Reward of the answers",
                "reward",
                (
                    ("preference/chosen_reward", "chosen"),
                    ("preference/rejected_reward", "rejected"),
                ),
            ),
        ),
    ),
    (
        "Policy",
        (
            Chart("Entropy", "nats", (("policy/entropy", "entropy"),), True),
            Chart("KL to the reference", "nats", (("policy/kl_reference", "KL"),), True),
            Chart(
                "KL to the behaviour",
                "nats",
                (("policy/k3_behavior", "k3"), ("policy/k1_behavior", "k1")),
            ),
            Chart(
                "Policy / behaviour ratio",
                "ratio",
                (
                    ("policy/ratio_mean", "mean"),
                    ("policy/ratio_max", "max"),
                    ("policy/ratio_min", "min"),
                ),
            ),
            Chart(
                "Clipped and truncated",
                "share",
                (("policy/clip_share", "clipped"), ("policy/truncated_share", "weight truncated")),
                True,
            ),
            Chart(
                "Sampler vs trainer log-prob, same weights",
                "nats",
                (
                    ("mismatch/mean", "mean"),
                    ("mismatch/max", "max"),
                    ("weights/probe_error", "probe"),
                ),
                True,
            ),
        ),
    ),
    (
        "Answers",
        (
            Chart(
                "Answer length",
                "tokens",
                (
                    ("rollout/length_mean", "mean"),
                    ("rollout/length_max", "max"),
                    ("eval/length_mean", "held-out mean"),
                ),
                True,
            ),
            Chart(
                "Cut off at the length limit",
                "share",
                (("rollout/truncated_share", "training"), ("eval/truncated_share", "held-out")),
                True,
            ),
        ),
    ),
    (
        "Asynchrony and speed",
        (
            Chart(
                "Idle share",
                "share",
                (("sampler/idle_share", "sampler"), ("trainer/idle_share", "trainer")),
                True,
            ),
            Chart(
                "Staleness",
                "versions",
                (("staleness/mean", "mean"), ("staleness/max", "max")),
                True,
            ),
            Chart("Staleness target", "versions", (("staleness/limit", "limit"),), True),
            Chart(
                "Effective sample size",
                "share",
                (
                    ("offpolicy/ess_share", "of tokens"),
                    ("offpolicy/sequence_ess_share", "of sequences"),
                ),
                True,
            ),
            Chart("Groups dropped", "share", (("staleness/dropped_share", "dropped"),), True),
            Chart(
                "Difficulty",
                "share",
                (("data/difficulty_mean", "all"), ("data/drawn_difficulty_mean", "drawn")),
                True,
            ),
            Chart(
                "Throughput",
                "tokens/s",
                (
                    ("throughput/generated_tokens_per_s", "generated"),
                    ("throughput/trained_tokens_per_s", "trained"),
                    ("throughput/aside_tokens_per_s", "evaluations and guests"),
                ),
                True,
            ),
            Chart(
                "Where a step's time goes",
                "s",
                (
                    ("time/step_s", "step"),
                    ("time/train_s", "train"),
                    ("time/wait_data_s", "wait for data"),
                    ("time/wait_eval_s", "wait for an evaluation"),
                    ("time/publish_s", "publish"),
                ),
                True,
            ),
            Chart(
                "Sampler",
                "share",
                (
                    ("sampler/slot_occupancy", "slots in use"),
                    ("sampler/gate_wait_share", "waiting at the gate"),
                ),
                True,
            ),
            Chart("FLOP utilisation", "share", (("throughput/mfu", "MFU"),), True),
            Chart(
                "Weights",
                "s",
                (("weights/transfer_s", "transfer"), ("weights/swap_pause_s", "longest pause")),
                True,
            ),
            Chart(
                "Buffer", "groups", (("buffer/active", "active"), ("buffer/ready", "ready")), True
            ),
        ),
    ),
)

WARM = "warm_start/"
"""Prefix of the keys of the warm start's own metrics, used only here."""
WARM_CHARTS = (
    Chart("Loss", "nats", ((f"{WARM}train/loss", "per answer token"),)),
    Chart("Gradient norm", "norm", ((f"{WARM}train/grad_norm", "before clipping"),), True),
    Chart("Learning rate", "rate", ((f"{WARM}train/learning_rate", "rate"),), True),
    Chart("Time of an update", "s", ((f"{WARM}time/step_s", "update"),), True),
)
