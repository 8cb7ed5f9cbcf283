"""Metrics of how far the training data are from the policy: age, mismatch, importance weights."""

from jaxrl_async.metrics.reductions import Last, Max, Mean, Metric, Sum, declared

STALENESS_METRICS: tuple[Metric, ...] = (
    *declared(
        Mean,
        ("staleness/mean", "versions", "Trainer's version minus the token's, over trained tokens."),
        (
            "staleness/lag_<n>_reward",
            "reward",
            "Reward of the episodes, over tokens n versions old.",
        ),
        (
            "staleness/lag_<n>_length",
            "tokens",
            "Generated tokens of the episodes, over the same tokens.",
        ),
        (
            "staleness/lag_<n>_kl",
            "nats",
            "Divergence from the behaviour policy, over the same tokens.",
        ),
        (
            "staleness/dropped_length_mean",
            "tokens",
            "Generated tokens of an answer in finished groups that were dropped; shows a length "
            "bias.",
        ),
        (
            "staleness/dropped_share",
            "share",
            "Groups dropped, finished or not, as a share of groups dropped or trained on.",
        ),
    ),
    *declared(
        Max,
        (
            "staleness/max",
            "versions",
            "Trainer's version minus a group's oldest token's; bounded by max_staleness.",
        ),
    ),
    *declared(
        Sum,
        ("staleness/tokens_lag_<n>", "tokens", "Trained tokens n versions old: a histogram."),
        (
            "staleness/wasted_tokens",
            "tokens",
            "Generated tokens of groups dropped in this step.",
        ),
        (
            "staleness/cancelled",
            "groups",
            "Groups of staleness/dropped_stale that were cancelled while they were being "
            "generated.",
        ),
        ("staleness/dropped_<reason>", "groups", "Groups dropped in this step for this reason."),
    ),
    *declared(
        Last,
        ("staleness/limit", "versions", "Staleness target from now on (staleness.adapt)."),
    ),
    *declared(
        Mean,
        ("mismatch/mean", "nats", "|sampler - trainer log-prob| at lag 0: same weights."),
        ("mismatch/all_mean", "nats", "The same over tokens of every lag."),
    ),
    *declared(
        Max,
        ("mismatch/max", "nats", "Largest |sampler - trainer log-prob| at lag 0."),
        ("mismatch/all_max", "nats", "The same over tokens of every lag."),
    ),
    *declared(
        Mean,
        ("offpolicy/weight_mean", "ratio", "w = proximal / behaviour, over trained tokens."),
        ("offpolicy/weight_square_mean", "ratio", "w^2, over trained tokens."),
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
    ),
    *declared(
        Mean,
        (
            "routing/replayed_share",
            "share",
            "Tokens of the batch whose experts are the sampler's (algorithm.keep_routing).",
        ),
        (
            "routing/changed_share",
            "share",
            "Share of these, per layer, for which the trainer's router would choose others.",
        ),
        ("routing/changed_token_share", "share", "The same per token, in any of its layers."),
    ),
)
