"""Facts about registered functions, by name, for the rules of the configuration.

The rules run before any part is imported, and config imports none. Each function declares the same
facts at its registration (in `algorithms`), and those modules fail to import if a set here differs.
"""

NEEDS_VALUES = frozenset({"gae"})
"""Advantages that need a critic's values."""
COMPARED_IN_GROUP = frozenset(
    {
        "group_normalized", "group_mean", "kimi", "rloo", "opo", "maxrl", "pass_at_k", "grpo_lead",
        "reinforce_pp_baseline", "gdpo",
    }
)  # fmt: skip
"""Advantages that compare the answers to one prompt: 0 for a group of one."""
DIVIDED_IN_GROUP = frozenset({"group_normalized", "grpo_lead", "gdpo", "discounted", "maxrl"})
"""Advantages that divide by the spread or the mean of a group's rewards: a KL in a group of equal
rewards alone is amplified to advantages of full size."""
CENTERED_IN_STEP = frozenset({"reinforce_pp", "discounted_batch", "batch_mean"})
"""Advantages that are 0 for a step of one undiscounted answer, as `discounted` is for a group of
one."""
WEIGHS_PARTS = frozenset({"gdpo"})
"""Advantages that weigh the parts of the reward themselves."""
MASKS_EPISODES = frozenset({"mask_truncated", "overlong_filter"})
"""Shapings that may mask whole episodes."""
WITHOUT_RATIO = frozenset({"gpg"})
"""Losses without a ratio: without a correction the anchor has no effect."""
AGAINST_BEHAVIOR = frozenset({"topr", "vespo", "flash_reinforce"})
"""Losses whose weight or gate is a function of the whole ratio to the policy that sampled the
tokens: they have no other anchor."""
REFERRING_COMPONENTS = frozenset({"kl"})
"""Loss components that compare with a reference policy."""
COMPONENTS_OF_ANSWERS = frozenset({"kl", "squared_log_ratio"})
"""Loss components that compare with another policy, whose log-probs only sampled tokens have."""
WHOLE_VOCABULARY = frozenset({"full"})
"""KL estimators over the whole vocabulary, which can only be a term of the loss."""
WITHOUT_GRADIENT = frozenset({"k1"})
"""KL estimators whose expected gradient is 0."""
WITHOUT_REFERENCE = frozenset({"simpo", "orpo"})
"""Preference losses that do not compare with a reference."""
SINGLE_ANSWERS = frozenset({"kto"})
"""Preference losses that train on single answers, against a baseline."""
