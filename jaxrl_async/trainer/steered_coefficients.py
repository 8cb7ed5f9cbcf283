"""Weights of the KL and the entropy in the loss, adapted to their targets after each step."""

import math
from collections.abc import Mapping

from jaxrl_async.algorithms.kl import next_coefficient
from jaxrl_async.algorithms.objective import (
    Coefficients,
    active_entropy_coefficient,
    next_entropy_coefficient,
)
from jaxrl_async.config.algorithm_section import AlgorithmSection


class SteeredCoefficients:
    """The coefficients of the next update. Without targets they are constant."""

    def __init__(self, algorithm: AlgorithmSection, start: Coefficients) -> None:
        """start: as configured."""
        self.current, self._algorithm = start, algorithm
        self._entropy = float(algorithm.entropy_coefficient)  # while the entropy is too low

    def numbers(self) -> dict[str, float]:
        """Return the numbers that change from step to step."""
        current = {name: float(value) for name, value in self.current._asdict().items()}
        return {**current, "steered_entropy": self._entropy}

    def restore(self, numbers: Mapping[str, float]) -> None:
        """Continue from `numbers`; coefficients without a target stay as configured."""
        kl, entropy = self.current
        if self._algorithm.kl_target is not None:
            kl = numbers["kl"]
        if self._algorithm.entropy_target is not None:
            entropy, self._entropy = numbers["entropy"], numbers["steered_entropy"]
        self.current = Coefficients(kl=kl, entropy=entropy)

    def steer(self, report: Mapping[str, float]) -> None:
        """Move them towards their targets, if the step measured finite KL and entropy."""
        algorithm = self._algorithm
        divergence = report.get("policy/kl_reference", math.nan)
        if algorithm.kl_target is not None and math.isfinite(divergence):
            kl = next_coefficient(
                self.current.kl,
                divergence,
                target=algorithm.kl_target,
                horizon=algorithm.kl_horizon,
            )
            self.current = self.current._replace(kl=kl)
        entropy = report.get("policy/entropy", math.nan)
        if algorithm.entropy_target is not None and math.isfinite(entropy):
            target = algorithm.entropy_target
            self._entropy = next_entropy_coefficient(
                self._entropy, entropy, target=target, step=algorithm.entropy_step
            )
            active = active_entropy_coefficient(self._entropy, entropy, target=target)
            self.current = self.current._replace(entropy=active)
