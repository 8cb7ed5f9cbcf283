"""Metrics of the prompts, the episodes and their rewards."""

from jaxrl_async.metrics.reductions import Last, Max, Mean, Metric, Sum, declared, timed

ROLLOUT_METRICS: tuple[Metric, ...] = (
    *declared(
        Mean,
        (
            "data/drawn_difficulty_mean",
            "share",
            "1 - pass rate of the step's prompts, as known when drawn; absent if none was known.",
        ),
    ),
    *declared(
        Last,
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
    *declared(
        Mean,
        ("rollout/length_mean", "tokens", "Drawn tokens in an episode."),
        (
            "rollout/truncated_share",
            "share",
            "Episodes cut off by a limit: of their length, turns or calls.",
        ),
        ("rollout/turns_mean", "turns", "Turns of the policy in an episode."),
        (
            "rollout/contexts_mean",
            "contexts",
            "Sequences in an episode; more than 1 where its history was rewritten, or its agent "
            "drew several answers or had others work for it.",
        ),
        (
            "rollout/kept_mean",
            "tokens",
            "Tokens in the sampling mask of a drawn token (keep_sampling_mask).",
        ),
    ),
    *declared(
        Max,
        ("rollout/length_max", "tokens", "Most drawn tokens in an episode."),
    ),
    *declared(
        Sum,
        (
            "rollout/unknown_tokens",
            "tokens",
            "Sampled ids that have no token, as in a vocabulary that is padded beyond the "
            "tokenizer's: texts, rewards and judges do not see them.",
        ),
        (
            "rollout/lengths_to_<n>",
            "episodes",
            "Episodes of at most n drawn tokens and more than n / 2: a histogram.",
        ),
    ),
    *timed(
        Last,
        (
            "rollout/cancelled_members",
            "episodes",
            "Members beyond algorithm.group_size that were not among the first to end.",
        ),
        (
            "rollout/cancelled_tokens",
            "tokens",
            "Drawn by those, and by requests cancelled for another reason: their group was too old "
            "or failed, a program gave up a call. Far longer than rollout/length_mean a member: "
            "a bias towards short answers.",
        ),
        ("rollout/forks", "episodes", "Continuations drawn from pivots (algorithm.pivots)."),
        ("rollout/fork_tokens", "tokens", "Drawn by those, behind their pivots."),
        (
            "rollout/shared_tokens",
            "tokens",
            "Of answers before their pivots, once for each continuation: not drawn again.",
        ),
    ),
    *declared(
        Mean,
        (
            "reward/mean",
            "reward",
            "Mean over the step's episodes, as scored, rewards of turns and tokens included.",
        ),
        ("reward/std", "reward", "Standard deviation over the step's episodes."),
        (
            "reward/zero_variance_share",
            "share",
            "Groups whose rewards are all equal, in a game those of each seat: nothing to learn.",
        ),
        ("reward/seat_<seat>", "reward", "Mean reward of a seat of a game, the policy's."),
        (
            "reward/<part>",
            "reward",
            "Mean of a named part of the reward, before weighting. Characters of its name other "
            "than letters, digits and _ . - become _.",
        ),
        (
            "reward/left_out_share",
            "share",
            "Answers to which one or several reward functions did not apply (they gave None).",
        ),
        (
            "logged/<name>",
            "as logged",
            "Mean over the answers for which a reward function called log_metric with this name.",
        ),
        ("reward/kl", "reward", "Mean KL penalty subtracted from an episode's reward."),
    ),
    *declared(
        Sum,
        (
            "process/too_old",
            "groups",
            "Groups learnt without their process rewards: older than reward.process.max_age.",
        ),
        (
            "shaping/<what>",
            "episodes",
            "Episodes whose reward or mask a shaping changed; too_few_compared: see "
            "algorithm.least_compared.",
        ),
    ),
    *declared(
        Sum,
        (
            "seats/games_<who>",
            "episodes",
            "Episodes of the policy in games where SEAT.FILLING sat (setting `seats`), of the "
            "step's groups and of those whose games all ended alike.",
        ),
    ),
    *declared(
        Mean,
        ("seats/reward_<who>", "reward", "Mean reward of the policy in these episodes."),
        ("seats/age_<who>", "versions", "Mean age of the snapshots of the policy that sat there."),
    ),
    *declared(
        Last,
        ("seats/snapshots", "snapshots", "Snapshots of the policy in the run's folder."),
    ),
    *timed(
        Last,
        ("seats/snapshot_s", "s", "Time to write this version's snapshot."),
        ("seats/loads", "loads", "Weights of opponents brought to the sampler's devices."),
        ("seats/calls", "calls", "Calls of endpoints that fill seats, repeats included."),
        ("seats/prompt_tokens", "tokens", "Tokens that those sent, as the endpoints count."),
        ("seats/completion_tokens", "tokens", "Tokens that they answered."),
        ("seats/call_s", "s", "Time of those calls, added up; they run side by side."),
    ),
    *timed(
        Last,
        (
            "judge/calls",
            "calls",
            "Calls of reward.judge's endpoint, repeats included.",
        ),
        ("judge/cached", "questions", "Questions whose scores were known: no call was made."),
        ("judge/prompt_tokens", "tokens", "Tokens that those calls sent, as the endpoint counts."),
        ("judge/completion_tokens", "tokens", "Tokens that it answered."),
        ("judge/call_s", "s", "Time of those calls, added up; they run side by side."),
    ),
    *timed(
        Last,
        ("process/steps", "steps", "Steps of answers that got a reward of their own."),
        ("process/step_reward", "reward", "Mean reward of these steps, before weighting."),
    ),
)
