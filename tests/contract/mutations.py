"""Small mistakes in the objective's formulas, one at a time, that the tests of values must catch.

Each is a text that occurs once in a file of jaxrl_async/algorithms, and what it is replaced by.
Where the code has changed, take the same mistake in its new words; where it is gone, another one.
"""

MUTATIONS: dict[str, list[tuple[str, str]]] = {
    "advantages": [
        ("max(len(r) - 1, 1)", "max(len(r) - 2, 1)"),
        (
            "comb(wrong - 1, k - 1) / comb(size - 1, k - 1)",
            "comb(wrong - 1, k - 1) / comb(size, k)",
        ),
        ("all_wrong - others_wrong)", "all_wrong + others_wrong)"),
        ("np.where(values > 0, passed, 1 - passed)", "np.where(values > 0, passed, passed)"),
        ("steepness * (rates - middle)", "steepness * (rates + middle)"),
        ("np.append(v[1:], end)", "np.append(v[1:], v[-1:])"),
        ("np.full(len(v), gamma * lam)", "np.full(len(v), gamma)"),
        ("np.where(gaps > 1,", "np.where(gaps > 2,"),
        ("np.dot(weights, values) / weights.sum()", "np.dot(weights, values) / len(weights)"),
        ("mean if mean > 0 else", "mean if mean > 1 else"),
        ("np.cumsum(episode.drawn) - 1", "np.cumsum(episode.drawn) - 2"),
    ],
    "corrections": [
        ("excess = logs - math.log(cap)", "excess = logs + math.log(cap)"),
        ("excess > 0, logs", "excess >= 0, logs"),
        ("(logs < _log(low))", "(logs <= _log(low))"),
        ("(logs > _log(high))", "(logs >= _log(high))"),
        ("jnp.exp(clipped - logs)", "jnp.exp(logs - clipped)"),
        ("x.segment_ids) > delta", "x.segment_ids) >= delta"),
        ("(x.advantages < 0), 0.0, 1.0", "(x.advantages <= 0), 0.0, 1.0"),
        ("_ages(x) > max_age", "_ages(x) >= max_age"),
        ("jnp.exp2(-_ages(x) / half_life)", "jnp.exp(-_ages(x) / half_life)"),
        ("jnp.maximum(ages, 0)", "jnp.maximum(ages, 1)"),
        ('cap=cap, level="geometric")', 'cap=cap, level="sequence")'),
        ("logs = mean_over_sequence(logs", "logs = sum_over_sequence(logs"),
    ],
    "losses": [
        ("dual_clip * jnp.minimum(advantages, 0.0)", "dual_clip * jnp.maximum(advantages, 0.0)"),
        ("jnp.clip(ratio, 1 - low, 1 + high) * adv", "jnp.clip(ratio, 1 - high, 1 + low) * adv"),
        ("4 / tau * jax.nn.sigmoid", "2 / tau * jax.nn.sigmoid"),
        ("jnp.maximum(logs, -clip_low)", "jnp.maximum(logs, -clip_high)"),
        ("(logs > 0) & (divergence > high)", "(logs < 0) & (divergence > high)"),
        ("(divergence > low)", "(divergence > high)"),
        ("penalty * log_ratio(x) ** 2", "penalty * log_ratio(x) ** 2 / 2"),
        ("rate * (1 - jnp.exp(logs))", "rate * (1 + jnp.exp(logs))"),
        ("jnp.exp(jnp.minimum(logs, 0.0)), 1.0", "jnp.exp(jnp.minimum(logs, 1.0)), 1.0"),
        ("x.covariance_rank < share", "x.covariance_rank > share"),
        ("MAX_LOG_RATIO = 40.0", "MAX_LOG_RATIO = 4.0"),
        ("SMALLEST_REST = 1e-8", "SMALLEST_REST = 1e-2"),
        ("(1 - anchor) * rest - anchor *", "(1 - anchor) * rest + anchor *"),
    ],
    "aggregate": [
        ("1 / max(batch.num_tokens, 1)", "1 / max(batch.num_tokens, 99)"),
        ("counts[batch.sequence_ids], 1) * num", "counts[batch.sequence_ids], 3) * num"),
        ("1 / (num_sequences * divisor)", "1 / (num_sequences + divisor)"),
        ("counts[batch.group_ids], 1) * num", "counts[batch.group_ids], 9) * num"),
    ],
    "kl": [
        ("_from_reference(x) ** 2 / 2", "_from_reference(x) ** 2"),
        ("MAX_LOG_RATIO)) + difference", "MAX_LOG_RATIO)) - difference"),
        ("jnp.minimum(-difference, MAX_LOG_RATIO)", "jnp.minimum(-difference, 2.0)"),
        ("x.policy_logprobs, x.behavior_logprobs", "x.behavior_logprobs, x.policy_logprobs"),
        ("measured / target - 1, -0.2), 0.2)", "measured / target - 1, -0.2), 0.3)"),
        ("coefficient * (1 + error / horizon)", "coefficient * (1 - error / horizon)"),
    ],
    "shaping": [
        ("cache_tokens - length) / cache_tokens", "cache_tokens - length) / max_tokens"),
        ("e.num_drawn > max_tokens", "e.num_drawn >= max_tokens"),
        ("np.exp(-alpha * np.where", "np.exp(alpha * np.where"),
        ("0.5 - (lengths - shortest)", "1.0 - (lengths - shortest)"),
        ("np.minimum(x, 0.0))", "np.maximum(x, 0.0))"),
        ("() > least", "() >= least"),
    ],
}

TESTS: dict[str, tuple[str, ...]] = {
    "advantages": ("algorithms/test_advantages.py", "contract/test_advantages.py"),
    "corrections": ("algorithms/test_corrections.py",),
    "losses": ("algorithms/test_losses.py",),
    "aggregate": ("algorithms/test_aggregate.py", "contract/test_aggregates.py"),
    "kl": ("algorithms/test_kl.py",),
    "shaping": ("algorithms/test_shaping.py",),
}
"""Where each file's values are tested; no other test is asked."""
