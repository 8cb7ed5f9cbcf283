"""Balance of a mixture's experts in an update (model.balance): a loss and a bias update."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from jaxrl_async.algorithms.expert_load import (
    ExpertLoad,
    correction_step,
    load_balance_loss,
    load_measures,
    summed_load,
)
from jaxrl_async.algorithms.objective import Totals
from jaxrl_async.config.model_section import BalanceSection
from jaxrl_async.errors import ConfigError
from jaxrl_async.model.spec import ModelSpec, Params

CORRECTION = "correction"
"""Name of the layer weight that the bias update moves."""


@dataclass(frozen=True, slots=True)
class ExpertBalance:
    """The load-balance loss and the bias update of one model; no-ops if they are off."""

    spec: ModelSpec
    section: BalanceSection

    def counts(self) -> Array | None:
        """Return zero counts, [routed layers, experts] int32; None if no correction moves."""
        if not self.section.bias_rate:
            return None
        return jnp.zeros((len(self.spec.routed_layers), self.spec.experts), jnp.int32)

    def added(
        self, loss: Array, totals: Totals, counted: ExpertLoad | None
    ) -> tuple[Array, Totals]:
        """Add a micro-batch's share of the balance loss; inside jit.

        counted: the whole update's load, odds not read; None: the micro-batch is the whole update.
        """
        load = totals.load
        if load is None or not self.section.loss:
            return loss, totals
        whole = load if counted is None else counted
        share = self.section.loss * load_balance_loss(
            load.odds, whole.chosen, whole.tokens, each_layer=self.section.each_layer
        )
        held = jax.lax.stop_gradient(share)
        sums = {**totals.sums, "train/loss": totals.sums["train/loss"] + held}
        return loss + share, totals._replace(sums=sums)

    def moved(self, params: Params, chosen: Array | None) -> Params:
        """Move each router's correction by bias_rate towards an even load; inside jit.

        params: float32. chosen: counts of the whole update; None: nothing moves.
        """
        if chosen is None:
            return params
        steps = self.section.bias_rate * correction_step(chosen)
        row = {layer: i for i, layer in enumerate(self.spec.routed_layers)}
        after = dict(params)
        for stack, numbers in self.spec.stacks.items():
            if CORRECTION in params[stack]:
                correction = steps[jnp.array([row[layer] for layer in numbers])]
                after[stack] = {**params[stack], CORRECTION: params[stack][CORRECTION] + correction}
        return after


def expert_balance(spec: ModelSpec, section: BalanceSection) -> ExpertBalance:
    """Return the configured balance. Raise ConfigError if the model cannot be balanced so."""
    if section == BalanceSection():
        return ExpertBalance(spec, section)
    if not spec.experts:
        raise ConfigError(
            f"model.balance spreads tokens over experts, but the {spec.family} model is dense. "
            "Leave model.balance out, or take a model with experts."
        )
    if spec.own is not None:
        raise ConfigError(
            "model.balance reads the routers of built-in layers, and model.decoder defines other "
            "layers. Leave model.balance out."
        )
    if section.bias_rate and not spec.router.corrected:
        raise ConfigError(
            f"model.balance.bias_rate ({section.bias_rate:g}) moves a router's correction "
            f"(e_score_correction_bias), which the {spec.family} model's routers lack. Set "
            "model.balance.loss instead."
        )
    return ExpertBalance(spec, section)


def load_report(totals: Sequence[Totals], section: BalanceSection) -> dict[str, float]:
    """Report the load of all micro-batches, on the host; {} for a model without experts."""
    loads = [t.load for t in totals if t.load is not None]
    return load_measures(summed_load(loads), each_layer=section.each_layer) if loads else {}
