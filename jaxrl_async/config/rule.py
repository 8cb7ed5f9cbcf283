"""Rules for several sections of a configuration, and a collection of rules by name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

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
    check: Check


class Violation(NamedTuple):
    """One way in which a configuration breaks a rule, or a section its own check."""

    name: str  # of the rule or the check
    section: tuple[str, ...]  # path of the section that it is about; (): several sections
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
        """List every violation of the sections' own checks, in the order of the sections, and of
        the rules, in their order."""
        rules = (rule for rule in self.values() if rule.job in (None, config.run.job))
        return [
            *_broken_checks(config),
            *(
                Violation(rule.name, rule.section, sentence)
                for rule in rules
                for sentence in rule.check(config)
            ),
        ]


def _broken_checks(config: Config) -> Iterator[Violation]:
    """Yield the violations of the sections' own checks; a task's are found in of_task."""
    for path, section in config.inner():
        if path.startswith("tasks."):
            continue
        for name, check in section.checks().items():
            for sentence in check(section):
                yield Violation(name, tuple(path.split(".")), sentence)
