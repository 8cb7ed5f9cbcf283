"""Metrics of training: losses, the policy, the critic, preferences and evaluation; and of how
far the training data are from the policy."""

from jaxrl_async.metrics.reductions import Last, Max, Mean, Metric, Min, Sum, declared

NAMED_EVALS = (
    ("eval/<name>/prompts", "prompts", "Prompts of an evaluation by name, without skipped ones."),
    (
        "eval/<name>/reward",
        "reward",
        "Mean reward of an evaluation by name (evals), or of a task's held-out prompts (tasks).",
    ),
    ("eval/<name>/reward_stderr", "reward", "Its standard error over the prompts."),
    (
        "eval/<name>/reward_change",
        "reward",
        "Mean difference to the previous evaluation of this name, on the prompts of both.",
    ),
    ("eval/<name>/reward_change_stderr", "reward", "Its standard error over the prompts."),
    ("eval/<name>/accuracy", "share", "Mean of the reward's part `correct`."),
    ("eval/<name>/accuracy_stderr", "share", "Its standard error over the prompts."),
    ("eval/<name>/accuracy_change", "share", "As reward_change, for the accuracy."),
    ("eval/<name>/accuracy_change_stderr", "share", "Its standard error over the prompts."),
    ("eval/<name>/avg_at_<n>_stderr", "share", "Its standard error over the prompts."),
    (
        "eval/<name>/avg_at_<n>",
        "share",
        "Mean over n samples a prompt of the part `correct`, or else of the reward.",
    ),
    ("eval/<name>/pass_at_<k>_stderr", "share", "Its standard error over the prompts."),
    (
        "eval/<name>/pass_at_<k>",
        "share",
        "Probability that at least one of k samples passes, estimated without bias from n.",
    ),
    ("eval/<name>/maj_at_<n>_stderr", "share", "Its standard error over the prompts."),
    ("eval/<name>/maj_at_<n>", "share", "Prompts whose most frequent answer of n passes."),
    ("eval/<name>/length_mean", "tokens", "Generated tokens of an answer."),
    ("eval/<name>/truncated_share", "share", "Answers cut off by a limit."),
    ("eval/<name>/seat_<seat>", "reward", "Mean reward of a seat of its games."),
)
"""Metrics of the evaluations by name; a family comes before one that matches its keys, too."""

LEARNING_METRICS: tuple[Metric, ...] = (
    *declared(
        Mean,
        (
            "train/loss",
            "loss",
            "The loss that the optimizer minimized: policy, KL and entropy terms, and components.",
        ),
        ("train/policy_loss", "loss", "The policy loss only."),
        ("train/packing", "share", "Share of the packed rows that is tokens, not padding."),
        (
            "train/shared_tokens",
            "share",
            "Share of the contexts' tokens that are not computed again, since several contexts "
            "share them in a row (trainer.share_prefixes).",
        ),
    ),
    *declared(
        Sum,
        ("train/updates", "updates", "Optimizer updates in the step."),
        (
            "train/missing_updates",
            "updates",
            "Mini-batches skipped: the step has fewer sequences than algorithm.minibatches.",
        ),
        (
            "train/skipped",
            "steps",
            "1 if the loss or the gradient was not finite, or the new weights blew up: no update.",
        ),
        (
            "train/blown_up",
            "steps",
            "1 if the new weights were extremely large, or gave NaN: lower the learning rate.",
        ),
        (
            "train/tokens",
            "tokens",
            "Tokens that the step trained on, each counted once for any number of epochs.",
        ),
        (
            "train/sequences",
            "sequences",
            "Sequences (contexts of episodes) with at least one trained token, each once.",
        ),
        (
            "train/flops",
            "FLOP",
            "Model FLOP of the step, forward and backward; frozen weights have no gradient.",
        ),
        (
            "teacher/<name>/tokens",
            "tokens",
            "Trained tokens with a log-prob of this teacher (teachers).",
        ),
        ("train/rows", "rows", "Packed rows in all micro-batches."),
        ("train/micro_batches", "passes", "Forward and backward passes in the step."),
    ),
    *declared(
        Last,
        ("train/grad_norm", "norm", "Global norm of the gradient before clipping."),
        ("train/param_norm", "norm", "Global norm of the weights."),
        ("train/learning_rate", "rate", "Learning rate of the step."),
    ),
    *declared(
        Mean,
        ("policy/entropy", "nats", "Entropy of the next-token distribution, over trained tokens."),
        ("policy/kl_reference", "nats", "Divergence from the frozen reference, by algorithm.kl."),
        ("policy/teacher_divergence", "nats", "Divergence from the teacher (teacher.form=loss)."),
        ("policy/teacher_gap", "nats", "log policy - log teacher of sampled tokens: reverse KL."),
        (
            "teacher/<name>/kl",
            "nats",
            "log behaviour - log teacher of sampled tokens that this teacher knows: reverse KL.",
        ),
        ("policy/ratio_mean", "ratio", "exp(policy - behaviour log-prob) over trained tokens."),
        ("policy/clip_share", "share", "Trained tokens whose gradient the loss clipped away."),
        (
            "policy/truncated_share",
            "share",
            "Trained tokens with a truncated importance weight.",
        ),
        ("policy/weight_mean", "ratio", "Importance weight of a trained token, after correction."),
        ("policy/k1_behavior", "nats", "Policy vs behaviour: mean of behaviour - policy."),
        ("policy/k3_behavior", "nats", "The same as r - 1 - log r, r the ratio; never negative."),
        (
            "policy/recomputed_logprob_share",
            "share",
            "Trained tokens without a sampler's log-prob: the trainer's own was used, ratio 1.",
        ),
    ),
    *declared(
        Max,
        ("policy/ratio_max", "ratio", "Largest policy / behaviour ratio of a trained token."),
    ),
    *declared(
        Min,
        ("policy/ratio_min", "ratio", "Smallest policy / behaviour ratio of a trained token."),
    ),
    *declared(
        Last,
        ("policy/kl_coefficient", "weight", "Weight of the divergence from the reference."),
        ("policy/entropy_coefficient", "weight", "Weight of the entropy bonus."),
    ),
    *declared(
        Mean,
        ("critic/loss", "loss", "Clipped squared error of the values, halved."),
        ("critic/clip_share", "share", "Trained tokens whose value gradient was clipped away."),
        ("critic/value_mean", "reward", "Mean value of the states in which tokens were sampled."),
        ("critic/return_mean", "reward", "Mean of the critic's target returns."),
        (
            "critic/explained_variance",
            "share",
            "1 - Var(returns - values) / Var(returns), before the update; absent without variance.",
        ),
    ),
    *declared(
        Sum,
        ("critic/tokens", "tokens", "Tokens whose value was trained."),
        (
            "critic/skipped",
            "steps",
            "1 if the critic's loss or gradient was not finite, or its new weights blew up.",
        ),
        ("critic/blown_up", "steps", "1 if the critic's new weights blew up."),
        ("critic/warming", "steps", "1 if only the critic was trained in this step."),
    ),
    *declared(
        Last,
        ("critic/grad_norm", "norm", "Global norm of the critic's gradient before clipping."),
        ("critic/param_norm", "norm", "Global norm of the critic's weights."),
        ("critic/learning_rate", "rate", "The critic's learning rate of the step."),
    ),
    *declared(
        Mean,
        (
            "preference/accuracy",
            "share",
            "Pairs whose chosen answer has the higher reward; a tie counts half.",
        ),
        ("preference/margin", "reward", "Reward of the chosen minus the rejected answer."),
        (
            "preference/chosen_reward",
            "reward",
            "Mean reward of chosen answers, as the loss or the reward model defines it.",
        ),
        ("preference/rejected_reward", "reward", "The same for rejected answers."),
        ("preference/chosen_length", "tokens", "Trained tokens of a chosen answer."),
        ("preference/rejected_length", "tokens", "Trained tokens of a rejected answer."),
    ),
    *declared(
        Sum,
        ("preference/pairs", "pairs", "Preference pairs in the step, halves included."),
        ("preference/ties", "pairs", "Pairs not formed, since both answers are equally good."),
        ("preference/unpaired", "episodes", "Answers of the step without a pair."),
    ),
    *declared(
        Last,
        ("preference/kl_baseline", "nats", "Baseline z0 of the kto loss, from mismatched answers."),
    ),
    *declared(
        Mean,
        ("supervised/loss", "nats", "Cross entropy of the demonstrations mixed into the step."),
    ),
    *declared(
        Sum,
        ("supervised/tokens", "tokens", "Tokens of demonstrations mixed into the step."),
    ),
    *declared(
        Mean,
        (
            "loss/<name>/<what>",
            "as returned",
            "Mean over its tokens of a metric that a loss component of your own returns.",
        ),
        (
            "loss/<name>",
            "loss",
            "A loss component (algorithm.losses), before its coefficient; train/loss contains it.",
        ),
    ),
    *declared(
        Sum,
        (
            "loss_tokens/<name>",
            "tokens",
            "Tokens that a loss component covers, each counted once for any number of epochs.",
        ),
    ),
    *declared(
        Last,
        ("loss_coefficient/<name>", "weight", "Weight of a loss component in this step."),
        (
            "loss_grad_norm/<name>",
            "norm",
            "Norm of a loss component's gradient, with its weight, before the step "
            "(gradient_every); compare with train/grad_norm.",
        ),
    ),
    *declared(
        Mean,
        (
            "experts/load_max",
            "ratio",
            "Tokens of a layer's busiest expert over the mean of its experts, averaged over the "
            "layers; 1: even. Counts an update's tokens without padding, as do the other "
            "experts/*.",
        ),
        (
            "experts/load_entropy",
            "share",
            "Entropy of a layer's tokens over its experts, over its maximum, averaged over the "
            "layers; 1: even.",
        ),
        ("experts/idle_share", "share", "Experts of all layers that got no token."),
        (
            "experts/balance_loss",
            "loss",
            "The load-balance loss, without its coefficient, even if it is not part of the loss "
            "(model.balance.loss); equals experts per token if the load is even.",
        ),
    ),
    *declared(
        Max,
        ("experts/load_worst", "ratio", "As experts/load_max, for the worst layer."),
    ),
    *declared(
        Mean,
        ("warm/loss", "nats", "Loss per answer token in the warm start's last update."),
    ),
    *declared(
        Sum,
        ("warm/updates", "updates", "Updates of the supervised warm start."),
    ),
    *declared(
        Mean,
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
            "Reward of the chosen minus the rejected answer, held-out pairs.",
        ),
        (
            "eval/chosen_reward",
            "reward",
            "As preference/chosen_reward, for held-out pairs.",
        ),
        ("eval/rejected_reward", "reward", "As preference/rejected_reward, for held-out pairs."),
        ("eval/reward", "reward", "Mean reward on the held-out prompts."),
        (
            "eval/reward_stderr",
            "reward",
            "Standard error of eval/reward over the prompts; 95 % interval: 1.96 times it.",
        ),
        ("eval/accuracy_stderr", "share", "Standard error of eval/accuracy over the prompts."),
        *NAMED_EVALS,
        ("eval/seat_<seat>", "reward", "Mean reward of a seat of the held-out games."),
        ("eval/length_mean", "tokens", "Generated tokens in a held-out answer."),
        ("eval/truncated_share", "share", "Held-out episodes cut off by a limit."),
    ),
)


# ---- how far the training data are from the policy: age, mismatch, importance weights


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
