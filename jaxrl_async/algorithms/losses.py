"""Token losses: a formula over named arrays. No averaging here (aggregate.py), no configuration.

Every array is `[rows, length]`. Values outside the mask may be anything, even NaN; they add neither
loss nor gradient.

A loss uses the ratio r = policy / anchor. With `algorithm.anchor=behavior` the anchor is the
distribution that the token was sampled from, and r is the whole importance ratio. With `proximal`
the anchor is the policy at the start of the step, and the corrections (corrections.py) handle
proximal / behaviour: decoupled PPO (AReaL, arXiv:2505.24298). All losses here can be decoupled,
except losses whose weight is a function of the whole ratio (topr, vespo).
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from numpy.typing import ArrayLike
from pydantic import Field

from jaxrl_async.algorithms.aggregate import mean_over_sequence, sum_over_sequence
from jaxrl_async.algorithms.columns import COLUMNS, check_fields
from jaxrl_async.algorithms.registry import (
    Above0,
    AtLeast0,
    AtLeast1,
    NoFacts,
    Registry,
    Share,
    UpTo1,
    rule,
)
from jaxrl_async.config import function_facts
from jaxrl_async.config.choice import Choice

MAX_LOG_RATIO = 40.0
"""Bound on |log ratio|, nats, which keeps a ratio and its square finite in float32.

Beyond it a sampled token has a probability below 1e-17 under the other policy: only corrupt data
exceeds the bound.
"""
SMALLEST_REST = 1e-8
"""Minimum total probability of all other tokens, before its logarithm is taken."""


class TokenInputs(NamedTuple):
    """The input of a token loss; position t holds token t's log-prob under each policy."""

    policy_logprobs: (
        Array  # [rows, length] float32, of the weights being trained; carries the gradient
    )
    behavior_logprobs: Array  # [rows, length] float32, of the distribution sampled from
    advantages: Array  # [rows, length] float32
    mask: Array  # [rows, length] bool, trained tokens
    versions: Array  # [rows, length] int32, policy version that sampled the token
    entropy: Array  # [rows, length] float32, of the policy at the token, nats
    reference_logprobs: Array | None = None  # [rows, length] float32, of the frozen reference
    anchor_logprobs: Array | None = None
    """[rows, length] float32, the denominator of the loss's ratio. None: behavior_logprobs."""
    proximal_logprobs: Array | None = None
    """[rows, length] float32, of the weights at the start of the step. None: the policy's own."""
    segment_ids: Array | None = None
    """[rows, length] int32, sequences of a row from 1, 0 is padding. None: a row is a sequence."""
    ages: Array | None = None
    """[rows, length] int32, trained version minus the version that sampled. None: 0."""
    reference_divergence: Array | None = None
    """[rows, length] float32, exact KL(policy || reference) at the token; carries the gradient."""
    teacher_divergence: Array | None = None
    """[rows, length] float32, divergence from the teacher at the token; carries the gradient."""
    covariance_rank: Array | None = None
    """[rows, length] float32 in [0, 1): share of the step's tokens with a larger covariance of
    log-prob and advantage, (log policy - mean) * (A - mean)."""
    rewards: Array | None = None
    """[rows, length] float32, the reward of the token's answer, before shaping. None: the algorithm
    has no loss components (algorithm.losses)."""


check_fields("TokenInputs", TokenInputs._fields, (n for n, c in COLUMNS.items() if c.in_loss))


def token_inputs(columns: Mapping[str, ArrayLike | None]) -> TokenInputs:
    """Return these columns as TokenInputs, in the dtypes that COLUMNS declares."""
    return TokenInputs(
        **{k: None if v is None else jnp.asarray(v, COLUMNS[k].dtype) for k, v in columns.items()}  # type: ignore[arg-type]
    )


class TokenLoss(NamedTuple):
    """The output of a token loss."""

    loss: Array  # [rows, length] float32, 0 outside the mask
    clipped: Array  # [rows, length] bool, tokens whose gradient the loss removed or bounded


TokenLossFn = Callable[..., TokenLoss]  # (TokenInputs, **settings) -> TokenLoss


class DefaultCorrections(NamedTuple):
    """The correction of a loss if algorithm.correction is not set, by algorithm.anchor.

    It is at the level of the loss's own ratio, or none: a factor per token would distort a ratio
    per sequence. With the proximal anchor no loss's ratio contains proximal / behaviour, and the
    correction adds it, bounded.
    """

    behavior: Choice = "truncate_token"
    proximal: Choice | None = "truncate_token"  # None: the loss has no such anchor


OPEN_RATIO = DefaultCorrections()
"""A ratio per token, unbounded for at least one sign of A: the correction bounds it."""
OWN_BOUND = DefaultCorrections(behavior="none")
"""The loss bounds its ratio per token, or how far it may move the token's probability."""
OWN_MEAN_BOUND = DefaultCorrections(behavior="none", proximal={"truncate": {"level": "geometric"}})
"""The loss bounds a ratio that is the geometric mean over the sequence."""
OWN_PRODUCT_BOUND = DefaultCorrections(behavior="none", proximal=None)
"""The loss weighs by a function of the product over the sequence of policy / behaviour. A factor
for part of that ratio would change the weights, even of answers whose weight has no ratio in it."""
OWN_GATE = DefaultCorrections(behavior="none", proximal=None)
"""The loss drops sequences by their divergence from the policy that sampled them."""
NO_RATIO = DefaultCorrections(behavior="none", proximal="none")
"""The loss has no importance weight, for off-policy tokens either."""


ON_REQUEST = frozenset({"covariance_rank", "proximal_logprobs"})
"""Fields of TokenInputs that a loss may declare as needed; they cost a pass before the updates."""


class LossFacts(NamedTuple):
    """The facts that a token loss declares."""

    correction: DefaultCorrections = OPEN_RATIO
    needs: tuple[Literal["covariance_rank", "proximal_logprobs"], ...] = ()  # see ON_REQUEST
    ratio_of: Literal["token", "sequence"] = "token"  # the ratio that weighs a token
    gradient_of: Literal["token", "sequence"] = "token"
    """The advantage in a token's on-policy gradient: its own, or the mean over its sequence."""


token_loss: Registry[TokenLossFn, LossFacts] = Registry(
    "token loss", "algorithm.loss", LossFacts, assumed=LossFacts(needs=("covariance_rank",))
)
supervised_loss: Registry[TokenLossFn, NoFacts] = Registry("supervised loss", "run.job", NoFacts)


def masked_loss(function: TokenLossFn) -> TokenLossFn:
    """Wrap a user's loss to return a TokenLoss that is 0 outside the mask.

    The function gets 0 outside the mask, and may return the loss alone: [rows, length].
    """

    def masked(x: TokenInputs) -> TokenLoss:
        clean = x._replace(
            policy_logprobs=jnp.where(x.mask, x.policy_logprobs, 0.0),
            advantages=jnp.where(x.mask, x.advantages, 0.0),
        )
        result: TokenLoss | Array = function(clean)
        loss, clipped = result if isinstance(result, tuple) else (result, jnp.zeros_like(x.mask))
        return TokenLoss(jnp.where(x.mask, loss, 0.0), x.mask & clipped)

    return masked


def log_ratio(x: TokenInputs) -> Array:
    """Return log(policy / anchor) per token, within MAX_LOG_RATIO; 0 outside the mask."""
    return bounded_difference(x, x.policy_logprobs, _anchor(x))


def mismatch(x: TokenInputs) -> Array:
    """Return log(proximal / behavior) per token, as `log_ratio` but without gradient."""
    proximal = x.policy_logprobs if x.proximal_logprobs is None else x.proximal_logprobs
    return jax.lax.stop_gradient(bounded_difference(x, proximal, x.behavior_logprobs))


def sequence_log_ratio(x: TokenInputs) -> Array:
    """Return log(policy / anchor) of each token's whole sequence, within MAX_LOG_RATIO."""
    total = sum_over_sequence(log_ratio(x), x.mask, x.segment_ids)
    return jnp.clip(total, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def bounded_difference(x: TokenInputs, logprobs: Array, others: Array) -> Array:
    """Return logprobs - others, within MAX_LOG_RATIO; 0 outside the mask."""
    difference = jnp.where(x.mask, logprobs - others, 0.0)
    return jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def binary_kl(x: TokenInputs) -> Array:
    """Return KL(anchor || policy) of "the sampled token or another", nats; without gradient.

    q log(q/p) + (1 - q) log((1 - q)/(1 - p)), q the anchor's probability of the token and p the
    policy's.
    """
    anchor, rest = _probability(_anchor(x)), _log_rest(_anchor(x)) - _log_rest(x.policy_logprobs)
    return (1 - anchor) * rest - anchor * jax.lax.stop_gradient(log_ratio(x))


def negative_entropy(x: TokenInputs, below: float | None = None) -> Array:
    """Return -entropy of the policy at each token, nats; 0 outside the mask, and for tokens with at
    least the entropy `below`."""
    covered = x.mask if below is None else x.mask & (x.entropy < below)
    return jnp.where(covered, -x.entropy, 0.0)


# --- ratio times advantage, with clipped gradient -----------------------------------------------


@token_loss
@rule("dual_clip must be 0 or above 1", lambda dual_clip: dual_clip == 0 or dual_clip > 1)
def ppo_clip(
    x: TokenInputs, *, clip_low: UpTo1 = 0.2, clip_high: Above0 = 0.2, dual_clip: AtLeast0 = 0.0
) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = policy / anchor.

    Schulman et al. 2017 (arXiv:1707.06347), eq. 7; two bounds: DAPO (arXiv:2503.14476), sec. 3.1.
    dual_clip > 1 also bounds the objective where A < 0, to max(that minimum, dual_clip A): Ye et
    al. 2020 (arXiv:1912.09729), dual-clip PPO. 0: off.
    """
    advantages = _advantages(x)
    objective, clipped = _surrogate(jnp.exp(log_ratio(x)), advantages, clip_low, clip_high)
    if dual_clip:
        below = objective < dual_clip * jnp.minimum(advantages, 0.0)
        below &= advantages < 0
        objective = jnp.where(below, dual_clip * advantages, objective)
        clipped |= below
    return _masked(x, -objective, clipped)


@token_loss(correction=OWN_MEAN_BOUND, ratio_of="sequence", gradient_of="sequence")
def gspo(x: TokenInputs, *, clip_low: UpTo1 = 3e-4, clip_high: Above0 = 4e-4) -> TokenLoss:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean over the sequence of log r).

    Each token has its sequence's ratio s, so a sequence is clipped as a whole. The gradient of the
    sequence's summed loss at each of its tokens is -s mean(A): on-policy -A, if A is constant over
    the sequence. GSPO, Zheng et al. 2025 (arXiv:2507.18071), eq. 5 to 7; with
    aggregate=sequence_mean it is the paper's objective.
    """
    ratio = jnp.exp(mean_over_sequence(log_ratio(x), x.mask, x.segment_ids))
    objective, clipped = _surrogate(ratio, _advantages(x), clip_low, clip_high)
    return _masked(x, -objective, clipped)


@token_loss(correction=OWN_MEAN_BOUND, ratio_of="sequence")
def gspo_token(x: TokenInputs, *, clip_low: UpTo1 = 3e-4, clip_high: Above0 = 4e-4) -> TokenLoss:
    """-min(s_t A, clip(s_t) A), s_t = stop_gradient(s) policy / stop_gradient(policy), s of gspo.

    Its gradient is -s A_t: for advantages that differ within a sequence. GSPO (arXiv:2507.18071),
    eq. 13 and 14.
    """
    logprobs = jnp.where(x.mask, x.policy_logprobs, 0.0)
    own = jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))
    mean = jax.lax.stop_gradient(mean_over_sequence(log_ratio(x), x.mask, x.segment_ids))
    objective, clipped = _surrogate(jnp.exp(mean) * own, _advantages(x), clip_low, clip_high)
    return _masked(x, -objective, clipped)


@token_loss(correction=OWN_MEAN_BOUND, ratio_of="sequence", gradient_of="sequence")
def geo_mean(x: TokenInputs, *, clip_low: Above0 = 0.4, clip_high: Above0 = 0.4) -> TokenLoss:
    """-A exp(mean over the sequence of l), l = min(log r, clip_high) where A > 0, else
    max(log r, -clip_low).

    Bounds are in nats, per token. The gradient is gspo's without the clipped tokens. GMPO,
    Zhao et al. 2025 (arXiv:2507.20673).
    """
    advantages, logs = _advantages(x), log_ratio(x)
    bounded = jnp.where(advantages > 0, jnp.minimum(logs, clip_high), jnp.maximum(logs, -clip_low))
    ratio = jnp.exp(mean_over_sequence(bounded, x.mask, x.segment_ids))
    return _masked(x, -ratio * advantages, bounded != logs)


@token_loss(correction=OWN_BOUND)
def sapo(x: TokenInputs, *, tau_pos: Above0 = 1.0, tau_neg: Above0 = 1.05) -> TokenLoss:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau = tau_pos where A > 0, else tau_neg.

    A soft gate instead of clipping: its slope is 1 at r = 1, so the gradient there is -A. Soft
    Adaptive Policy Optimization, Gao et al. 2025 (arXiv:2511.20347).
    """
    advantages = _advantages(x)
    tau = jnp.where(advantages > 0, tau_pos, tau_neg)
    gate = 4 / tau * jax.nn.sigmoid(tau * (jnp.exp(log_ratio(x)) - 1))
    return _masked(x, -gate * advantages, jnp.zeros_like(x.mask))


@token_loss(correction=OWN_BOUND)
def dppo_tv(x: TokenInputs, *, low: UpTo1 = 0.2, high: UpTo1 = 0.2) -> TokenLoss:
    """-r A; 0 where A > 0 and policy - anchor > high, or A < 0 and policy - anchor < -low.

    The trust region is in probabilities, not ratios: |policy - anchor| of the sampled token is the
    total variation of "this token or another". Divergence PPO, Qi et al. 2026 (arXiv:2602.04879),
    eq. 11 to 13 (there low = high = delta). r is not bounded: a rare token may have a large weight
    by design. verl also caps r at 20: correction={tis: {cap: 20}}.
    """
    shift = _probability(x.policy_logprobs) - _probability(_anchor(x))
    return _trust_region(x, jnp.abs(shift), low, high)


@token_loss(correction=OWN_BOUND)
def dppo_kl(x: TokenInputs, *, low: Above0 = 0.05, high: Above0 = 0.05) -> TokenLoss:
    """-r A; 0 where A > 0, r > 1 and D > high, or A < 0, r < 1 and D > low.

    D = q log(q/p) + (1 - q) log((1 - q)/(1 - p)), nats: KL(anchor || policy) of "the sampled token
    or another", q the anchor's probability and p the policy's. Divergence PPO (arXiv:2602.04879),
    eq. 11, 12 and 14.
    """
    return _trust_region(x, binary_kl(x), low, high)


@token_loss(correction=OWN_BOUND)
def ipo(
    x: TokenInputs, *, low: UpTo1 = 0.2, high: UpTo1 = 0.2, penalty: AtLeast0 = 1e-3
) -> TokenLoss:
    """dppo_tv's loss + penalty (log r)^2, which has no gradient on-policy.

    The penalty also pulls back tokens that the trust region masks. PRIME-RL's policy loss, with the
    squared log ratio of Kimi K2.5. For a band of ratios instead of probabilities, use
    correction=icepop.
    """
    inner = dppo_tv(x, low=low, high=high)
    return TokenLoss(inner.loss + penalty * log_ratio(x) ** 2, inner.clipped)


@token_loss(needs=("covariance_rank",))
def clip_cov(
    x: TokenInputs,
    *,
    share: Annotated[float, Field(gt=0, lt=1)] = 2e-4,
    clip_low: UpTo1 = 0.2,
    clip_high: Above0 = 0.2,
) -> TokenLoss:
    """ppo_clip, but 0 for the share of tokens whose log-prob and advantage covary most.

    Those tokens reduce entropy most. Cui et al. 2025, "The Entropy Mechanism"
    (arXiv:2505.22617), Clip-Cov. The paper samples the tokens at random from a band of covariances;
    here they are the step's top tokens, which is deterministic.
    """
    selected = _top_covariance(x, share)
    ratio = jnp.where(selected, 0.0, jnp.exp(log_ratio(x)))
    objective, clipped = _surrogate(ratio, _advantages(x), clip_low, clip_high)
    objective = jnp.where(selected, 0.0, objective)
    return _masked(x, -objective, clipped | selected)


@token_loss(needs=("covariance_rank",))
def kl_cov(x: TokenInputs, *, share: UpTo1 = 2e-3, penalty: Above0 = 1.0) -> TokenLoss:
    """-r A, + penalty |log r| for the share of tokens with the largest covariance (see clip_cov).

    Cui et al. 2025 (arXiv:2505.22617), KL-Cov. Nothing is clipped.
    """
    held = jnp.where(_top_covariance(x, share), penalty * jnp.abs(log_ratio(x)), 0.0)
    objective = jnp.exp(log_ratio(x)) * _advantages(x)
    return _masked(x, held - objective, jnp.zeros_like(x.mask))


# --- log-prob times advantage, with a weight that has no gradient --------------------------------


@token_loss
def reinforce(x: TokenInputs) -> TokenLoss:
    """-stop_gradient(r) A log policy, r = policy / anchor: gradient -r A d log policy.

    The score function estimator of Williams 1992 (Machine Learning 8), with the importance ratio
    that corrects for tokens of an older policy (1 on-policy). A correction bounds r.
    """
    return _score(x, jnp.exp(log_ratio(x)), jnp.zeros_like(x.mask))


@token_loss(correction=OWN_GATE)
def flash_reinforce(x: TokenInputs, *, delta: Above0 = 3e-3) -> TokenLoss:
    """-stop_gradient(r) A log policy, r = policy / behavior; 0 for all tokens of a sequence whose
    mean divergence exceeds `delta`, nats.

    The divergence is KL(behavior || policy) of "the sampled token or another", as in dppo_kl. The
    ratio is not clipped: the gate alone bounds it. FlashREINFORCE, Hu, Zhang, Zhang et al. 2026
    ("Critic-Free Single-Rollout Asynchronous RL for Agentic Language Models"), whose other parts
    are advantage=batch_mean, aggregate=sequence_mean and group_size=1: a gated sequence still
    counts in the mean.
    """
    divergence = mean_over_sequence(binary_kl(x), x.mask, x.segment_ids)
    cut = divergence > delta
    weights = jnp.where(cut, 0.0, jnp.exp(log_ratio(x)))
    return _score(x, weights, cut)


@token_loss(correction=NO_RATIO)
def gpg(x: TokenInputs) -> TokenLoss:
    """-A log policy, without a ratio. GPG, Chu et al. 2025 (arXiv:2504.02546)."""
    return _score(x, jnp.ones(x.mask.shape, jnp.float32), jnp.zeros_like(x.mask))


@token_loss(correction=OWN_BOUND)
def cispo(x: TokenInputs, *, clip_low: Share = 1.0, clip_high: AtLeast0 = 4.0) -> TokenLoss:
    """-stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) A log policy: no token is dropped.

    MiniMax-M1 (arXiv:2506.13585), eq. 4 and 5; it has no lower bound (clip_low 1) either.
    """
    ratio = jnp.exp(log_ratio(x))
    weights = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return _score(x, weights, weights != ratio)


@token_loss(correction=OWN_BOUND)
def aipo(x: TokenInputs, *, rho: AtLeast1 = 4.0) -> TokenLoss:
    """-stop_gradient(min(r, rho)) A log policy.

    Asynchronous importance weighted policy optimization of LlamaRL, Wu et al. 2025
    (arXiv:2505.24034).
    """
    ratio = jnp.exp(log_ratio(x))
    return _score(x, jnp.minimum(ratio, rho), ratio > rho)


@token_loss(correction=OWN_PRODUCT_BOUND, ratio_of="sequence")
def topr(x: TokenInputs) -> TokenLoss:
    """-w A log policy; w = 1 where A >= 0, else stop_gradient(min(R, 1)), R the sequence's ratio.

    R is the product of r over the sequence. Tapered off-policy REINFORCE, Le Roux et al. 2025
    (arXiv:2503.14286).
    """
    negative = _advantages(x) < 0
    logs = sequence_log_ratio(x)
    weights = jnp.where(negative, jnp.exp(jnp.minimum(logs, 0.0)), 1.0)
    return _score(x, weights, negative & (logs > 0))


@token_loss(correction=OWN_PRODUCT_BOUND, ratio_of="sequence")
def vespo(
    x: TokenInputs,
    *,
    power_pos: AtLeast0 = 2.0,
    rate_pos: Above0 = 3.0,
    power_neg: AtLeast0 = 3.0,
    rate_neg: Above0 = 2.0,
) -> TokenLoss:
    """-stop_gradient(R^k exp(lambda (1 - R))) A log policy, R the sequence's ratio.

    The weight is 1 on-policy and falls off smoothly on both sides; k and lambda are power_pos and
    rate_pos where A >= 0, else power_neg and rate_neg. VESPO, Shen et al. 2026 (arXiv:2602.10693).
    """
    negative = _advantages(x) < 0
    power = jnp.where(negative, power_neg, power_pos)
    rate = jnp.where(negative, rate_neg, rate_pos)
    logs = sequence_log_ratio(x)
    weights = jnp.exp(power * logs + rate * (1 - jnp.exp(logs)))
    return _score(x, weights, jnp.zeros_like(x.mask))


@supervised_loss
def cross_entropy(x: TokenInputs) -> TokenLoss:
    """-log policy: maximum likelihood of the given tokens."""
    return TokenLoss(jnp.where(x.mask, -x.policy_logprobs, 0.0), jnp.zeros_like(x.mask))


token_loss.check_known(function_facts.WITHOUT_RATIO, lambda facts: facts.correction == NO_RATIO)
token_loss.check_known(
    function_facts.AGAINST_BEHAVIOR, lambda facts: facts.correction.proximal is None
)

# --- helpers --------------------------------------------------------------------------------------


def _anchor(x: TokenInputs) -> Array:
    return x.behavior_logprobs if x.anchor_logprobs is None else x.anchor_logprobs


def _advantages(x: TokenInputs) -> Array:
    """Return the advantages, 0 outside the mask: a NaN there would reach a sequence's gradient."""
    return jnp.where(x.mask, x.advantages, 0.0)


def _masked(x: TokenInputs, loss: Array, clipped: Array) -> TokenLoss:
    return TokenLoss(jnp.where(x.mask, loss, 0.0), x.mask & clipped)


def _score(x: TokenInputs, weights: Array, clipped: Array) -> TokenLoss:
    """Return the loss -stop_gradient(weights) A log policy."""
    logprobs = jnp.where(x.mask, x.policy_logprobs, 0.0)
    return _masked(x, -jax.lax.stop_gradient(weights) * _advantages(x) * logprobs, clipped)


def _surrogate(ratio: Array, advantages: Array, low: float, high: float) -> tuple[Array, Array]:
    """Return min(r A, clip(r, 1 - low, 1 + high) A), and the tokens where the bound is active."""
    bounded = jnp.clip(ratio, 1 - low, 1 + high) * advantages
    return jnp.minimum(ratio * advantages, bounded), bounded < ratio * advantages


def _trust_region(x: TokenInputs, divergence: Array, low: float, high: float) -> TokenLoss:
    """Return -r A, but 0 for tokens beyond the divergence bound that A would push further."""
    logs, advantages = log_ratio(x), _advantages(x)
    above = (advantages > 0) & (logs > 0) & (divergence > high)
    below = (advantages < 0) & (logs < 0) & (divergence > low)
    cut = jax.lax.stop_gradient(above | below)
    objective = jnp.where(cut, 0.0, jnp.exp(logs) * advantages)
    return _masked(x, -objective, cut)


def _top_covariance(x: TokenInputs, share: float) -> Array:
    assert x.covariance_rank is not None, "clip_cov and kl_cov need the rank of the covariance"
    return x.mask & (x.covariance_rank < share)


def _probability(logprobs: Array) -> Array:
    return jnp.exp(jnp.minimum(jax.lax.stop_gradient(logprobs), 0.0))


def _log_rest(logprobs: Array) -> Array:
    """Return log(1 - p), at least log(SMALLEST_REST)."""
    rest = -jnp.expm1(jnp.minimum(jax.lax.stop_gradient(logprobs), 0.0))
    return jnp.log(jnp.maximum(rest, SMALLEST_REST))
