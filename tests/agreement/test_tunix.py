"""Losses and advantages against Tunix's own code, on the same logits."""

import jax.numpy as jnp
import numpy as np
import pytest
from agree import (
    GROUP,
    LENGTH,
    SEEDS,
    SEQUENCES,
    VOCAB,
    agree,
    arrays,
    ask,
    our_advantages,
    padded,
    per_sequence,
    policy_function,
    value_and_gradient,
)

from jaxrl_async.algorithms.preference_losses import PairInputs, preference_loss
from jaxrl_async.algorithms.shaping import soft_overlong_penalty
from jaxrl_async.algorithms.value_loss import value_loss
from jaxrl_async.model.logprobs import chunked_logprobs
from jaxrl_async.trainer.distill import distill_logits

pytestmark = pytest.mark.full

POLICY = {
    # name: (Tunix's settings of grpo_loss_fn, ours)
    "ppo_clip, token_mean": ({"epsilon_high": 0.28}, {"loss": {"ppo_clip": {"clip_high": 0.28}}}),
    "ppo_clip, sequence_mean": (
        {"loss_agg_mode": "sequence-mean-token-mean"},
        {"aggregate": "sequence_mean"},
    ),
    "ppo_clip, constant": (
        {"loss_agg_mode": "sequence-mean-token-scale"},
        {"aggregate": {"constant": {"divisor": LENGTH}}},
    ),
    "ppo_clip, sequence_sum": (
        {"loss_agg_mode": "seq-mean-token-sum"},
        {"aggregate": "sequence_sum"},
    ),
    "ppo_clip with dual_clip": ({"epsilon_c": 1.3}, {"loss": {"ppo_clip": {"dual_clip": 1.3}}}),
    "ppo_clip at a temperature": ({"temperature": 0.8}, {}),
    "gspo_token": (
        {"loss_algo": "gspo-token", "epsilon": 0.05, "epsilon_high": 0.06},
        {"loss": {"gspo_token": {"clip_low": 0.05, "clip_high": 0.06}}},
    ),
    "kl k1": ({"beta": 0.7, "kl": "kl"}, {"kl": "k1", "kl_coefficient": 0.7}),
    "kl k2": ({"beta": 0.7, "kl": "mse_kl"}, {"kl": "k2", "kl_coefficient": 0.7}),
    "kl k3": ({"beta": 0.7, "kl": "low_var_kl"}, {"kl": "k3", "kl_coefficient": 0.7}),
    "correction: truncate token": (
        {"sampler_cap": 1.2},
        {"behavior": "behavior", "anchor": "proximal", "correction": {"truncate": {"cap": 1.2}}},
    ),
}
PPO = {
    # the same of ppo_policy_loss_fn, with an advantage for each token
    "ppo_clip, advantages of tokens": (
        {"epsilon_low": 0.1, "epsilon_high": 0.3},
        {"loss": {"ppo_clip": {"clip_low": 0.1, "clip_high": 0.3}}},
    ),
    "entropy bonus": ({"entropy_coef": 0.3}, {"entropy_coefficient": 0.3}),
    "ppo_clip with dual_clip, advantages of tokens": (
        {"epsilon_c": 1.3},
        {"loss": {"ppo_clip": {"dual_clip": 1.3}}},
    ),
    "kl k1, advantages of tokens": ({"kl_coef": 0.4}, {"kl": "k1", "kl_coefficient": 0.4}),
}
GAE = {"gamma": 0.97, "lam": 0.9}
DISTILL = {"temperature": 1.7, "alpha": 0.6}
OVERLONG = {"lengths": [3, 10, 13, 16, 19, 20], "longest": 20, "buffer": 8}
CASES = {
    **{name: ("grpo", theirs) for name, (theirs, _) in POLICY.items()},
    **{name: ("ppo", theirs) for name, (theirs, _) in PPO.items()},
    "value_loss": ("value", {"clip": 0.3}),
    "gae": ("gae", GAE),
    **{n: ("in_groups", {"name": n}) for n in ("group_normalized", "group_mean", "rloo")},
    "dpo": ("preference", {"mask": "pair_drawn", "beta": 0.3, "label_smoothing": 0.1}),
    "orpo": ("preference", {"mask": "pair_single", "algorithm": "orpo", "lambda_orpo": 0.3}),
    "distill_logits forward": ("logit", DISTILL),
    "overlong": ("overlong", OVERLONG),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Tunix's results, from one process."""
    return ask("tunix", CASES, tmp_path_factory.mktemp("tunix"))


@pytest.fixture(params=SEEDS)
def both(request, answers):
    """The arrays of a seed, and Tunix's results on them."""
    return arrays(request.param), answers[request.param]


def of_logits(logits, tokens, temperature=1.0):
    """Our log-probs and entropies of tokens, [sequences, length] each, from logits."""
    hidden, targets = logits.reshape(-1, VOCAB), jnp.asarray(tokens.reshape(-1), jnp.int32)
    found = chunked_logprobs(hidden, jnp.eye(VOCAB), targets, chunk=50, temperature=temperature)
    return tuple(x.reshape(tokens.shape) for x in found)


def by_logits(a, settings, temperature=1.0):
    """policy_loss's loss, and its gradient with respect to the logits."""
    behavior = settings.pop("behavior", "proximal")
    loss = policy_function(a, behavior, settings)
    return value_and_gradient(
        lambda logits: loss(*of_logits(logits, a["tokens"], temperature)), a["logits"]
    )


def test_every_setting_makes_a_difference(both):
    """Nothing below can agree because a setting does nothing on these arrays."""
    _, tunix = both
    for cases in (POLICY, PPO):
        gradients = np.array([tunix[name]["gradient"].ravel() for name in cases])
        apart = np.abs(gradients[:, None] - gradients[None]).max(-1) / np.abs(gradients).max()
        assert apart[~np.eye(len(apart), dtype=bool)].min() > 1e-3


@pytest.mark.parametrize("name", POLICY)
def test_policy_losses(both, name):
    a, tunix = both
    theirs, ours = POLICY[name]
    found = by_logits(a, dict(ours), theirs.get("temperature", 1.0))
    agree(name, "Tunix grpo_loss_fn", found, tunix[name])


@pytest.mark.parametrize("name", PPO)
def test_policy_losses_with_an_advantage_for_each_token(both, name):
    a, tunix = both
    found = by_logits({**a, "advantages": a["token_advantages"]}, dict(PPO[name][1]))
    agree(name, "Tunix ppo_policy_loss_fn", found, tunix[name])


def test_the_critics_loss(both):
    a, tunix = both

    def loss(values):
        found = value_loss(values[..., 0], a["old_values"], a["returns"], a["mask"], clip=0.3)
        return found.loss.sum() / a["mask"].sum()

    ours = value_and_gradient(loss, a["values"][..., None])
    agree("value_loss", "Tunix ppo_value_loss_fn", ours, tunix["value_loss"])


def test_gae_up_to_the_standard_deviation(both):
    """Tunix's whitening divides by (tokens - 1) in the variance, ours by tokens."""
    a, tunix = both
    drawn, tokens = a["mask"], a["mask"].sum()
    found = our_advantages(
        a,
        {"gae": GAE},
        rewards=np.zeros(SEQUENCES),
        token_rewards=a["token_rewards"] * drawn,
        values=a["values"],
    )
    theirs, version = tunix["gae"], {"version": tunix["gae"]["version"]}
    for name, ours, factor in (
        ("gae", found.advantages, np.sqrt(tokens / (tokens - 1))),
        ("gae, returns", found.returns, 1.0),
    ):
        key = "returns" if "returns" in name else "advantages"
        there = {**version, "loss": theirs[key][drawn]}
        agree(f"advantage: {name}", "Tunix", {"loss": padded(ours)[drawn]}, there, factor=factor)


@pytest.mark.parametrize("name", ["group_normalized", "group_mean", "rloo"])
def test_advantages_of_groups(both, name):
    """Tunix divides by (G - 1) in the variance, ours by G; its epsilon is 1e-6 as well."""
    a, tunix = both
    factor = np.sqrt((GROUP - 1) / GROUP) if name == "group_normalized" else 1.0
    choice = {name: {"epsilon": float(1e-6 * factor)}} if name == "group_normalized" else name
    theirs = tunix[name]
    found = per_sequence(our_advantages(a, choice, rewards=a["rewards"].sum(1)).advantages)
    theirs = {**theirs, "loss": theirs["advantages"]}
    agree(f"advantage: {name}", "Tunix", {"loss": found * factor}, theirs)


@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_preference_losses(both, name):
    """orpo on answers of one token: Tunix takes the odds of whole answers, the paper (eq. 3) and
    ours those of the mean log-prob."""
    a, tunix = both
    mask = a["pair_drawn" if name == "dpo" else "pair_single"]
    lengths = jnp.split(jnp.asarray(mask.sum(1)), 2)
    references = np.split((a["pair_logits_reference"] * mask).sum(1), 2)
    settings = {"dpo": {"beta": 0.3, "label_smoothing": 0.1}, "orpo": {"beta": 0.3}}[name]

    def loss(logits):
        logprobs, _ = of_logits(logits, a["pair_tokens"])
        x = PairInputs(*jnp.split(jnp.sum(logprobs * mask, 1), 2), *lengths, *references)
        return preference_loss[name](x, **settings).loss.mean()

    ours = value_and_gradient(loss, a["pair_logits"])
    agree(name, "Tunix dpo_loss_fn", ours, tunix[name])


def test_distillation_of_logits(both):
    """Tunix multiplies by temperature^2 (Hinton et al. 2015, sec. 2); we leave that to the user."""
    a, tunix = both
    temperature, alpha = DISTILL["temperature"], DISTILL["alpha"]

    def loss(logits):
        teacher = jnp.asarray(a["teacher_logits"]) / temperature
        divergence = distill_logits(logits / temperature, teacher, kind="forward").mean()
        likelihood = of_logits(logits, a["tokens"])[0].mean()
        return alpha * temperature**2 * divergence - (1 - alpha) * likelihood

    name = "distill_logits forward"
    agree(name, "Tunix LogitStrategy", value_and_gradient(loss, a["logits"]), tunix[name])


def test_the_overlong_penalty_up_to_the_longest_answer(both):
    """Beyond it DAPO's (eq. 13) and ours stay at -1; Tunix's goes on falling."""
    _, tunix = both
    longest, buffer = OVERLONG["longest"], OVERLONG["buffer"]
    ours = [soft_overlong_penalty(n, longest, buffer) for n in OVERLONG["lengths"]]
    theirs = tunix["overlong"]
    agree(
        "shaping: soft_overlong", "Tunix", {"loss": ours}, {**theirs, "loss": theirs["penalties"]}
    )
