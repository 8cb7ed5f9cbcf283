"""Rules for configurations, and a collection of rules by name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxrl_async.config.schema import Config

Check = Callable[[Config], Iterator[str]]
"""Yields a sentence for each way in which a configuration breaks a rule: the settings, the reason,
and the remedy."""


@dataclass(frozen=True, slots=True)
class ConfigRule:
    """A rule for all configurations of some jobs."""

    name: str
    section: tuple[str, ...]  # path of the section that the rule is about; (): several sections
    job: str | None  # the run.job that the rule is for; None: all
    broken: Check


@dataclass(frozen=True, slots=True)
class Violation:
    """One way in which a configuration breaks a rule."""

    rule: ConfigRule
    sentence: str


class RuleBook(dict[str, ConfigRule]):
    """Rules by name, in the order of registration. A call returns the decorator that registers.

    @rule("mesh")
    def a_sampler_has_no_context_axis(config: Config) -> Iterator[str]:
        if config.mesh.sampler.context > 1:
            yield "mesh.sampler.context (...) must be 1: ..."
    """

    def __call__(self, *section: str, job: str | None = None) -> Callable[[Check], Check]:
        """Register a function as a rule under its own name.

        Args:
            section: path of the section that the rule is about; empty for several sections.
            job: the run.job that the rule is for; None: all.
        """

        def register(check: Check) -> Check:
            name = check.__name__
            assert name not in self, f"two rules are called {name}"
            self[name] = ConfigRule(name, section, job, check)
            return check

        return register

    def violations(self, config: Config) -> list[Violation]:
        """List every violation of the rules by a configuration, in the order of the rules."""
        rules = (rule for rule in self.values() if rule.job in (None, config.run.job))
        return [Violation(rule, sentence) for rule in rules for sentence in rule.broken(config)]


def as_text(value: Any) -> str:
    """Return a value for a sentence; integers may be too long for Python to print."""
    try:
        return str(value)
    except ValueError:
        return "a very long number"
