"""Loss components: further terms of the policy's loss, per token, each with its own coefficient.

    algorithm.losses: {NAME: {loss: FUNCTION, coefficient: c, tokens: answers}}

    loss = the algorithm's loss + sum over the components of c * sum over tokens of weight * value

A component's function gives each token a value. `component_weights` gives the tokens that the
component covers their weights, before the first micro-batch, as algorithm.aggregate does for the
policy loss: denominators are global. PRIME-RL composes the losses of its algorithms in this way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxrl_async.algorithms import kl as estimators
from jaxrl_async.algorithms.aggregate import AggregateFn, token_mean
from jaxrl_async.algorithms.losses import (
    TokenInputs,
    cross_entropy,
    log_ratio,
    negative_entropy,
)
from jaxrl_async.algorithms.registry import Above0, Registry
from jaxrl_async.config import function_facts
from jaxrl_async.config.algorithm_section import LossSection
from jaxrl_async.types import BoolArray, FloatArray, PackedBatch

Values = Array | tuple[Array, dict[str, Array]]
"""A component's value of each token, [rows, length] float32; and metrics by name, each a value per
token that is averaged over the tokens that the component covers."""
ComponentFn = Callable[..., Values]  # (TokenInputs, **settings) -> Values


class ComponentFacts(NamedTuple):
    """The facts that a loss component declares."""

    needs: tuple[Literal["entropy", "reference_logprobs"], ...] = ()
    """entropy: the entropy's gradient, which costs memory; reference_logprobs: a reference."""
    of_answers: bool = False  # reads log-probs that only sampled tokens have


component: Registry[ComponentFn, ComponentFacts] = Registry(
    "loss component",
    "algorithm.losses",
    ComponentFacts,
    assumed=ComponentFacts(needs=("entropy",)),
)


@component(needs=("reference_logprobs",), of_answers=True)
def kl(x: TokenInputs, *, estimator: Literal["k2", "k3", "unbiased"] = "k3") -> Array:
    """KL(policy || reference) at each token, nats, by an estimator of algorithm.kl."""
    return estimators.kl[estimator](x)


@component(needs=("entropy",))
def entropy(x: TokenInputs, *, below: Above0 | None = None) -> Array:
    """-entropy of the policy at each token, nats: a coefficient above 0 is an entropy bonus.

    below: only tokens with less entropy, nats; None: all.
    """
    return negative_entropy(x, below)


@component
def nll(x: TokenInputs) -> Array:
    """-log policy: maximum likelihood of the tokens.

    With tokens=demonstrations it is supervised fine-tuning alongside; with tokens=right it is the
    positive example loss of VAPO, Yue et al. 2025 (arXiv:2504.05118).
    """
    return cross_entropy(x).loss


@component(of_answers=True)
def squared_log_ratio(x: TokenInputs) -> Array:
    """(log policy - log behavior)^2 / 2: pulls the policy back to the one that sampled the token.

    Its gradient is that of the second term of Kimi k1.5 (arXiv:2501.12599), eq. 3, per token.
    """
    return log_ratio(x._replace(anchor_logprobs=None)) ** 2 / 2


component.check_known(
    function_facts.REFERRING_COMPONENTS, lambda facts: "reference_logprobs" in facts.needs
)
component.check_known(function_facts.COMPONENTS_OF_ANSWERS, lambda facts: facts.of_answers)


class Component(NamedTuple):
    """A component with its settings bound; hashable, as what programs are compiled for must be."""

    name: str
    values: ComponentFn
    tokens: str = "answers"  # as LossSection.tokens
    right_reward: float = 0.5  # above which an answer is right
    tasks: tuple[int, ...] | None = None  # that it covers, by PackedBatch.task_ids; None: all


def components_of(
    sections: Mapping[str, LossSection], tasks: Sequence[str] = ()
) -> tuple[Component, ...]:
    """Resolve algorithm.losses. Raise ConfigError.

    tasks: names of the run's several tasks; (): components cover all tokens.
    """
    return tuple(
        Component(
            name,
            component.resolve(one.loss),
            one.tokens,
            one.right_reward,
            tuple(map(tasks.index, one.tasks)) if tasks and one.tasks else None,
        )
        for name, one in sections.items()
    )


def need_entropy(sections: Mapping[str, LossSection]) -> bool:
    """Return whether a component needs the entropy's gradient. Raise ConfigError."""
    return any("entropy" in component.facts(one.loss).needs for one in sections.values())


# ---- host


def component_weights(
    components: Sequence[Component],
    batch: PackedBatch,
    rewards: FloatArray | None,
    aggregate: AggregateFn,
) -> FloatArray:
    """Return the weight of each token in each component, [rows, length, components] float32; 0 for
    tokens that a component does not cover.

    Args:
        components: of the recipe.
        batch: the whole step; with task_ids, if a component covers only some tasks.
        rewards: [rows, length] float32, the reward of a token's answer; None: unknown, and no
            component covers only right answers.
        aggregate: algorithm.aggregate. Demonstrations are averaged over their tokens.
    """
    weights = [_weights(one, batch, rewards, aggregate) for one in components]
    return np.stack(weights, axis=-1).astype(np.float32)


def _weights(
    one: Component, batch: PackedBatch, rewards: FloatArray | None, aggregate: AggregateFn
) -> FloatArray:
    if one.tokens == "demonstrations":
        return token_mean(replace(batch, mask=batch.supervised))
    covered: BoolArray = batch.mask
    if one.tokens == "right":
        assert rewards is not None, "the rewards say which answers are right"
        covered = covered & (rewards > one.right_reward)
    if one.tasks is not None:
        assert batch.task_ids is not None, "the run has several tasks"
        covered = covered & np.isin(batch.task_ids, one.tasks)
    return aggregate(replace(batch, mask=covered))


# ---- inside jit


class ComponentTerms(NamedTuple):
    """The components' share of a micro-batch's loss and metrics."""

    loss: Array | float
    sums: dict[str, Array]
    means: dict[str, tuple[Array, Array]]  # total, count


def component_terms(
    components: Sequence[Component],
    x: TokenInputs,
    weights: Array | None,
    coefficients: Sequence[Array | float],
) -> ComponentTerms:
    """Return the components' terms of the loss of a micro-batch.

    A function gets 0 for log-probs and advantages outside the tokens that it covers, and what it
    returns there is discarded.

    Args:
        components: of the recipe.
        x: the inputs of the losses; its log-probs are known wherever a weight is above 0.
        weights: from `component_weights`; None: there are no components.
        coefficients: of this step, in the components' order.
    """
    total: Array | float = 0.0
    sums: dict[str, Array] = {}
    means: dict[str, tuple[Array, Array]] = {}
    for index, (name, function, *_) in enumerate(components):
        assert weights is not None, "components have weights"
        covered = weights[..., index] > 0
        values, more = called(function, x._replace(mask=covered))
        term = jnp.sum(jnp.where(covered, weights[..., index] * values, 0.0))
        total += coefficients[index] * term
        sums[f"loss/{name}"] = term
        sums[f"loss_tokens/{name}"] = count = jnp.sum(covered)
        for metric, of_token in more.items():
            means[f"loss/{name}/{metric}"] = jnp.sum(jnp.where(covered, of_token, 0.0)), count
    return ComponentTerms(total, sums, means)


def called(function: ComponentFn, x: TokenInputs) -> tuple[Array, dict[str, Array]]:
    """Return a component's values and metrics; see `component_terms`."""
    clean = x._replace(
        policy_logprobs=jnp.where(x.mask, x.policy_logprobs, 0.0),
        behavior_logprobs=jnp.where(x.mask, x.behavior_logprobs, 0.0),
        advantages=jnp.where(x.mask, x.advantages, 0.0),
        entropy=jnp.where(x.mask, x.entropy, 0.0),
    )
    result = function(clean)
    values, metrics = result if isinstance(result, tuple) else (result, {})
    return values, metrics
