"""Metrics of training: losses, the policy, the critic, preferences and evaluation; and of how
far the training data are from the policy."""

from jaxrl_async.metrics.reductions import Last, Max, Mean, Metric, Min, Sum, declared

NAMED_EVALS = (
    ("eval/<name>/prompts", "prompts", "Prompts evaluated, without skipped ones."),
    (
        "eval/<name>/reward",
        "reward",
        "Mean reward of an evaluation (evals), or of a task's held-out prompts (tasks).",
    ),
    ("eval/<name>/reward_stderr", "reward", "Standard error over the prompts."),
    (
        "eval/<name>/reward_change",
        "reward",
        "Mean difference to the previous evaluation, on the prompts of both.",
    ),
    ("eval/<name>/reward_change_stderr", "reward", "Standard error over the prompts."),
    ("eval/<name>/accuracy", "share", "Mean of the reward's part `correct`."),
    ("eval/<name>/accuracy_stderr", "share", "Standard error over the prompts."),
    ("eval/<name>/accuracy_change", "share", "As reward_change, of the accuracy."),
    ("eval/<name>/accuracy_change_stderr", "share", "Standard error over the prompts."),
    ("eval/<name>/avg_at_<n>_stderr", "share", "Standard error over the prompts."),
    (
        "eval/<name>/avg_at_<n>",
        "share",
        "Mean over n samples of the part `correct`, or else of the reward.",
    ),
    ("eval/<name>/pass_at_<k>_stderr", "share", "Standard error over the prompts."),
    (
        "eval/<name>/pass_at_<k>",
        "share",
        "Probability that at least one of k samples passes (unbiased estimate).",
    ),
    ("eval/<name>/maj_at_<n>_stderr", "share", "Standard error over the prompts."),
    ("eval/<name>/maj_at_<n>", "share", "Prompts whose most frequent answer of n passes."),
    ("eval/<name>/length_mean", "tokens", "Generated tokens of an answer."),
    ("eval/<name>/truncated_share", "share", "Answers cut off by a limit."),
    ("eval/<name>/seat_<seat>", "reward", "Mean reward of a game's seat."),
)
"""Metrics of the evaluations by name; a family comes before one that matches its keys, too."""

LEARNING_METRICS: tuple[Metric, ...] = (
    *declared(
        Mean,
        ("train/loss", "loss", "The loss that is minimized: policy, KL, entropy and components."),
        ("train/policy_loss", "loss", "The policy loss alone."),
        ("train/packing", "share", "Tokens of the packed rows, without padding."),
        (
            "train/shared_tokens",
            "share",
            "Tokens of contexts not computed again (trainer.share_prefixes).",
        ),
    ),
    *declared(
        Sum,
        ("train/updates", "updates", "Optimizer updates."),
        (
            "train/missing_updates",
            "updates",
            "Mini-batches skipped: fewer sequences than algorithm.minibatches.",
        ),
        (
            "train/skipped",
            "steps",
            "1 if there was no update: loss or gradient not finite, or blown_up.",
        ),
        (
            "train/blown_up",
            "steps",
            "1 if the new weights were extremely large or gave NaN: lower the learning rate.",
        ),
        ("train/tokens", "tokens", "Trained tokens, each once for any number of epochs."),
        ("train/sequences", "sequences", "Sequences (contexts of episodes) with a trained token."),
        (
            "train/flops",
            "FLOP",
            "Model FLOP, forward and backward; frozen weights have no gradient.",
        ),
        ("teacher/<name>/tokens", "tokens", "Trained tokens with this teacher's log-prob."),
        ("train/rows", "rows", "Packed rows."),
        ("train/micro_batches", "passes", "Forward and backward passes."),
    ),
    *declared(
        Last,
        ("train/grad_norm", "norm", "Norm of the gradient before clipping."),
        ("train/param_norm", "norm", "Norm of the weights."),
        ("train/learning_rate", "rate", "Learning rate."),
    ),
    *declared(
        Mean,
        ("policy/entropy", "nats", "Entropy of the next-token distribution."),
        ("policy/kl_reference", "nats", "Divergence from the reference, by algorithm.kl."),
        ("policy/teacher_divergence", "nats", "Divergence from the teacher (teacher.form=loss)."),
        ("policy/teacher_gap", "nats", "log policy - log teacher of sampled tokens: reverse KL."),
        (
            "teacher/<name>/kl",
            "nats",
            "log behaviour - log teacher of sampled tokens that it knows: reverse KL.",
        ),
        ("policy/ratio_mean", "ratio", "Mean policy / behaviour ratio of a trained token."),
        ("policy/clip_share", "share", "Trained tokens whose gradient the loss clipped away."),
        ("policy/truncated_share", "share", "Trained tokens with a truncated importance weight."),
        ("policy/weight_mean", "ratio", "Importance weight of a trained token, after correction."),
        ("policy/k1_behavior", "nats", "Mean of behaviour - policy log-prob."),
        ("policy/k3_behavior", "nats", "Mean of r - 1 - log r, r the policy / behaviour ratio."),
        (
            "policy/recomputed_logprob_share",
            "share",
            "Trained tokens without a sampler's log-prob: the trainer's was used, ratio 1.",
        ),
    ),
    *declared(
        Max,
        ("policy/ratio_max", "ratio", "Largest policy / behaviour ratio."),
    ),
    *declared(
        Min,
        ("policy/ratio_min", "ratio", "Smallest policy / behaviour ratio."),
    ),
    *declared(
        Last,
        ("policy/kl_coefficient", "weight", "Coefficient of the divergence from the reference."),
        ("policy/entropy_coefficient", "weight", "Coefficient of the entropy bonus."),
    ),
    *declared(
        Mean,
        ("critic/loss", "loss", "Clipped squared error of the values, halved."),
        ("critic/clip_share", "share", "Trained tokens whose value gradient was clipped away."),
        ("critic/value_mean", "reward", "Mean value where tokens were sampled."),
        ("critic/return_mean", "reward", "Mean target return."),
        (
            "critic/explained_variance",
            "share",
            "1 - Var(returns - values) / Var(returns), before the update.",
        ),
    ),
    *declared(
        Sum,
        ("critic/tokens", "tokens", "Tokens whose value was trained."),
        (
            "critic/skipped",
            "steps",
            "1 if there was no update: loss or gradient not finite, or blown_up.",
        ),
        ("critic/blown_up", "steps", "1 if the critic's new weights blew up."),
        ("critic/warming", "steps", "1 if only the critic was trained."),
    ),
    *declared(
        Last,
        ("critic/grad_norm", "norm", "Norm of the critic's gradient before clipping."),
        ("critic/param_norm", "norm", "Norm of the critic's weights."),
        ("critic/learning_rate", "rate", "The critic's learning rate."),
    ),
    *declared(
        Mean,
        (
            "preference/accuracy",
            "share",
            "Pairs whose chosen answer has the higher reward; ties count half.",
        ),
        ("preference/margin", "reward", "Reward of the chosen minus the rejected answer."),
        (
            "preference/chosen_reward",
            "reward",
            "Reward of chosen answers, by the loss or the reward model.",
        ),
        ("preference/rejected_reward", "reward", "Reward of rejected answers."),
        ("preference/chosen_length", "tokens", "Trained tokens of a chosen answer."),
        ("preference/rejected_length", "tokens", "Trained tokens of a rejected answer."),
    ),
    *declared(
        Sum,
        ("preference/pairs", "pairs", "Preference pairs, halves included."),
        ("preference/ties", "pairs", "Pairs not formed: both answers are equally good."),
        ("preference/unpaired", "episodes", "Answers without a pair."),
    ),
    *declared(
        Last,
        ("preference/kl_baseline", "nats", "Baseline z0 of kto, from mismatched answers."),
    ),
    *declared(
        Mean,
        ("supervised/loss", "nats", "Cross entropy of the demonstrations in the step."),
    ),
    *declared(
        Sum,
        ("supervised/tokens", "tokens", "Tokens of the demonstrations in the step."),
    ),
    *declared(
        Mean,
        (
            "loss/<name>/<what>",
            "as returned",
            "Mean of a metric that your own loss component returns.",
        ),
        ("loss/<name>", "loss", "A loss component (algorithm.losses), before its coefficient."),
    ),
    *declared(
        Sum,
        (
            "loss_tokens/<name>",
            "tokens",
            "Tokens that a loss component covers, each once for any number of epochs.",
        ),
    ),
    *declared(
        Last,
        ("loss_coefficient/<name>", "weight", "Coefficient of a loss component."),
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
            "Tokens of a layer's busiest expert over its experts' mean, mean over layers; 1: even.",
        ),
        (
            "experts/load_entropy",
            "share",
            "Entropy of a layer's load over its maximum, mean over layers; 1: even.",
        ),
        ("experts/idle_share", "share", "Experts that got no token."),
        (
            "experts/balance_loss",
            "loss",
            "Load-balance loss without its coefficient (model.balance.loss); experts per token if "
            "the load is even.",
        ),
    ),
    *declared(
        Max,
        ("experts/load_worst", "ratio", "As experts/load_max, for the worst layer."),
    ),
    *declared(
        Mean,
        ("warm/loss", "nats", "Loss per answer token in the last update."),
    ),
    *declared(
        Sum,
        ("warm/updates", "updates", "Updates of the warm start."),
    ),
    *declared(
        Mean,
        (
            "eval/accuracy",
            "share",
            "rl: mean of the reward's part `correct`; sft: records that greedy decoding "
            "reproduces; preferences: pairs ranked right.",
        ),
        ("eval/token_accuracy", "share", "sft: held-out tokens that greedy decoding predicts."),
        ("eval/loss", "loss", "Loss on held-out examples; sft: nats per token."),
        ("eval/margin", "reward", "As preference/margin, for held-out pairs."),
        ("eval/chosen_reward", "reward", "As preference/chosen_reward, for held-out pairs."),
        ("eval/rejected_reward", "reward", "As preference/rejected_reward, for held-out pairs."),
        ("eval/reward", "reward", "Mean reward on the held-out prompts."),
        ("eval/reward_stderr", "reward", "Standard error over the prompts."),
        ("eval/accuracy_stderr", "share", "Standard error over the prompts."),
        *NAMED_EVALS,
        ("eval/seat_<seat>", "reward", "Mean reward of a seat in held-out games."),
        ("eval/length_mean", "tokens", "Generated tokens of a held-out answer."),
        ("eval/truncated_share", "share", "Held-out episodes cut off by a limit."),
    ),
)


# ---- how far the training data are from the policy: age, mismatch, importance weights


STALENESS_METRICS: tuple[Metric, ...] = (
    *declared(
        Mean,
        ("staleness/mean", "versions", "Trainer's version minus a trained token's."),
        ("staleness/lag_<n>_reward", "reward", "Reward of the episodes, tokens n versions old."),
        ("staleness/lag_<n>_length", "tokens", "Length of the episodes, tokens n versions old."),
        (
            "staleness/lag_<n>_kl",
            "nats",
            "Divergence from the behaviour policy, tokens n versions old.",
        ),
        (
            "staleness/dropped_length_mean",
            "tokens",
            "Generated tokens of an answer in dropped groups; shows a length bias.",
        ),
        ("staleness/dropped_share", "share", "Groups dropped, of all dropped or trained on."),
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
        ("staleness/tokens_lag_<n>", "tokens", "Trained tokens n versions old."),
        ("staleness/wasted_tokens", "tokens", "Generated tokens of dropped groups."),
        (
            "staleness/cancelled",
            "groups",
            "Groups of staleness/dropped_stale that were still being generated.",
        ),
        ("staleness/dropped_<reason>", "groups", "Groups dropped for this reason."),
    ),
    *declared(
        Last,
        ("staleness/limit", "versions", "Staleness target from now on (staleness.adapt)."),
    ),
    *declared(
        Mean,
        (
            "mismatch/mean",
            "nats",
            "Mean |sampler - trainer log-prob| of tokens from the current weights.",
        ),
        ("mismatch/all_mean", "nats", "Mean |sampler - trainer log-prob|, tokens of every age."),
    ),
    *declared(
        Max,
        (
            "mismatch/max",
            "nats",
            "Largest |sampler - trainer log-prob| of tokens from the current weights.",
        ),
        ("mismatch/all_max", "nats", "Largest |sampler - trainer log-prob|, tokens of every age."),
    ),
    *declared(
        Mean,
        (
            "offpolicy/weight_mean",
            "ratio",
            "w = proximal (before the update) / behaviour probability of a trained token.",
        ),
        ("offpolicy/weight_square_mean", "ratio", "Mean of w^2."),
        ("offpolicy/ess_share", "share", "Effective sample size of the tokens by w; 1 on-policy."),
        ("offpolicy/chi_square", "ratio", "Chi-square divergence, mean of w^2 - 1; 0 on-policy."),
        ("offpolicy/k3", "nats", "KL(behaviour || proximal), mean of w - 1 - log w."),
        (
            "offpolicy/k3_lag0",
            "nats",
            "As offpolicy/k3, tokens from the current weights: only numerics differ.",
        ),
        ("offpolicy/geometric_ratio_mean", "ratio", "Geometric mean of w over a sequence."),
        ("offpolicy/sequence_weight_mean", "ratio", "W, the product of w over a sequence."),
        ("offpolicy/sequence_weight_square_mean", "ratio", "Mean of W^2."),
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
            "Tokens whose experts are the sampler's (algorithm.keep_routing).",
        ),
        (
            "routing/changed_share",
            "share",
            "Replayed tokens, by layer, for which the trainer's router would choose other experts.",
        ),
        ("routing/changed_token_share", "share", "As routing/changed_share, in any layer."),
    ),
)
