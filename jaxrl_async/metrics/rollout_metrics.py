"""Metrics of the prompts, the episodes and their rewards."""

from jaxrl_async.metrics.reductions import Last, Max, Mean, Metric, Sum, declared, timed

TASK_METRICS: tuple[Metric, ...] = (
    *declared(
        Sum,
        ("task/<task>/groups", "groups", "Groups of the task in the step."),
    ),
    *declared(
        Mean,
        ("task/<task>/reward/mean", "reward", "Mean reward of its episodes."),
        (
            "task/<task>/reward/<part>",
            "reward",
            "As reward/<part>, reward/std and reward/zero_variance_share.",
        ),
        ("task/<task>/length_mean", "tokens", "Generated tokens of an episode."),
        ("task/<task>/truncated_share", "share", "Its episodes cut off by a limit."),
        ("task/<task>/turns_mean", "turns", "Turns of the policy in an episode."),
        ("task/<task>/staleness_mean", "versions", "Mean age of its tokens."),
        ("task/<task>/drawn_difficulty_mean", "share", "As data/drawn_difficulty_mean."),
    ),
    *declared(
        Last,
        (
            "task/<task>/share",
            "share",
            "Its share of all groups started and not dropped, since the start.",
        ),
        ("task/<task>/behind", "groups", "Groups behind its share by weight; negative: ahead."),
        ("task/<task>/difficulty_mean", "share", "As data/difficulty_mean."),
        ("task/<task>/measured_prompts", "prompts", "As data/measured_prompts."),
        ("task/<task>/longest_passed_over", "groups", "As data/longest_passed_over."),
    ),
    *timed(
        Last,
        ("task/<task>/in_flight", "groups", "Its groups that are sampled or scored."),
        ("task/<task>/resting", "flag", "1: its last groups failed; it starts none for now."),
    ),
    *timed(
        Sum,
        (
            "task/<task>/dropped_<reason>",
            "groups",
            "Its dropped groups, by reason (failed: also timeouts).",
        ),
        (
            "task/overruled",
            "groups",
            "Choices of the function of `mixing` that could not start a group.",
        ),
    ),
)
"""Metrics of each of several tasks."""

ROLLOUT_METRICS: tuple[Metric, ...] = (
    *TASK_METRICS,
    *declared(
        Mean,
        (
            "data/drawn_difficulty_mean",
            "share",
            "1 - pass rate of the step's prompts, as known when drawn.",
        ),
    ),
    *declared(
        Last,
        (
            "data/difficulty_mean",
            "share",
            "1 - pass rate of all prompts measured so far (data.curriculum).",
        ),
        ("data/measured_prompts", "prompts", "Prompts whose pass rate is known."),
        (
            "data/longest_passed_over",
            "groups",
            "Draws that skipped the pool's oldest prompt; bounded.",
        ),
    ),
    *declared(
        Mean,
        ("rollout/length_mean", "tokens", "Generated tokens of an episode."),
        (
            "rollout/truncated_share",
            "share",
            "Episodes cut off by a limit of length, turns or calls.",
        ),
        ("rollout/turns_mean", "turns", "Turns of the policy in an episode."),
        (
            "rollout/contexts_mean",
            "contexts",
            "Contexts of an episode; above 1 after rewritten history, with sub-agents or several "
            "answers.",
        ),
        (
            "rollout/kept_mean",
            "tokens",
            "Tokens that a generated token was sampled from (keep_sampling_mask).",
        ),
    ),
    *declared(
        Max,
        ("rollout/length_max", "tokens", "Most generated tokens of an episode."),
    ),
    *declared(
        Sum,
        (
            "rollout/unknown_tokens",
            "tokens",
            "Sampled ids that the tokenizer lacks: texts and rewards do not see them.",
        ),
        (
            "rollout/lengths_to_<n>",
            "episodes",
            "Episodes of more than n / 2 and at most n generated tokens.",
        ),
    ),
    *timed(
        Last,
        (
            "rollout/cancelled_members",
            "episodes",
            "Members cancelled because algorithm.group_size others finished first.",
        ),
        (
            "rollout/cancelled_tokens",
            "tokens",
            "Generated tokens of cancelled requests. Far more per cancelled member than "
            "rollout/length_mean: a bias towards short answers.",
        ),
        ("rollout/forks", "episodes", "Continuations of pivots (algorithm.pivots)."),
        ("rollout/fork_tokens", "tokens", "Tokens generated after pivots."),
        (
            "rollout/shared_tokens",
            "tokens",
            "Tokens before pivots, once per continuation: not generated again.",
        ),
    ),
    *declared(
        Mean,
        (
            "reward/mean",
            "reward",
            "Mean reward of the step's episodes, as scored, rewards of turns and tokens included.",
        ),
        ("reward/std", "reward", "Standard deviation over the episodes."),
        (
            "reward/zero_variance_share",
            "share",
            "Groups (in games, seats of groups) whose rewards are all equal: nothing to learn.",
        ),
        ("reward/seat_<seat>", "reward", "Mean reward of a game's seat that the policy filled."),
        ("reward/<part>", "reward", "Mean of a named part, before weighting."),
        (
            "reward/left_out_share",
            "share",
            "Answers to which a reward function did not apply (None).",
        ),
        (
            "logged/<name>",
            "as logged",
            "Mean of what reward functions logged by this name (log_metric).",
        ),
        ("reward/kl", "reward", "KL penalty subtracted from an episode's reward."),
    ),
    *declared(
        Sum,
        (
            "process/too_old",
            "groups",
            "Groups trained without process rewards: older than reward.process.max_age.",
        ),
        ("shaping/<what>", "episodes", "Episodes whose reward or mask a shaping changed."),
    ),
    *declared(
        Sum,
        (
            "seats/games_<who>",
            "episodes",
            "The policy's episodes against SEAT.PLAYER of the setting `seats`, those without "
            "signal included.",
        ),
    ),
    *declared(
        Mean,
        ("seats/reward_<who>", "reward", "Mean reward of the policy in these games."),
        ("seats/age_<who>", "versions", "Mean age of the policy's snapshots in that seat."),
    ),
    *declared(
        Last,
        ("seats/snapshots", "snapshots", "Snapshots of the policy in the run's folder."),
    ),
    *timed(
        Last,
        ("seats/snapshot_s", "s", "Time to write the snapshot."),
        ("seats/loads", "loads", "Loads of opponents' weights to sampler devices."),
        ("seats/calls", "calls", "Calls of endpoints that fill seats, retries included."),
        ("seats/prompt_tokens", "tokens", "Prompt tokens of the seats' calls."),
        ("seats/completion_tokens", "tokens", "Completion tokens of the seats' calls."),
        ("seats/call_s", "s", "Total time of the seats' calls, which overlap."),
    ),
    *timed(
        Last,
        ("judge/calls", "calls", "Calls of reward.judge's endpoint, retries included."),
        ("judge/cached", "questions", "Questions answered from the cache."),
        ("judge/prompt_tokens", "tokens", "Prompt tokens of the judge's calls."),
        ("judge/completion_tokens", "tokens", "Completion tokens of the judge's calls."),
        ("judge/call_s", "s", "Total time of the judge's calls, which overlap."),
    ),
    *timed(
        Last,
        ("teacher/<name>/calls", "calls", "Calls of the teacher, retries included."),
        ("teacher/<name>/call_s", "s", "Total time of the teacher's calls, which overlap."),
        ("teacher/<name>/retries", "calls", "Calls that repeated a failed one."),
        ("teacher/<name>/failures", "answers", "Answers without this teacher's log-probs."),
        (
            "teacher/<name>/unknown_tokens",
            "tokens",
            "Generated tokens from the first on that its tokenizer lacks: not asked about.",
        ),
        (
            "teacher/<name>/unaligned_tokens",
            "tokens",
            "Generated tokens in no aligned span of text (teachers.NAME.tokenizer).",
        ),
        (
            "teacher/<name>/dropped_groups",
            "groups",
            "Groups that waited longer than teachers.NAME.max_wait_s.",
        ),
    ),
    *timed(
        Last,
        ("process/steps", "steps", "Steps of answers that got a reward."),
        ("process/step_reward", "reward", "Mean reward of an answer's step, before weighting."),
    ),
)
