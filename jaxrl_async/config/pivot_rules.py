"""Rules about pivots (algorithm.pivots). Needs no JAX."""

from collections.abc import Iterator

from jaxrl_async.config import function_facts as facts
from jaxrl_async.config.rule import RuleBook
from jaxrl_async.config.schema import Config, name_of
from jaxrl_async.config.userfile import is_own

rule = RuleBook()


@rule(job="rl")
def continuations_are_compared(config: Config) -> Iterator[str]:
    """Require an advantage that compares answers from one state, and no downsampling."""
    algorithm, pivots = config.algorithm, config.algorithm.pivots
    if pivots is None:
        return
    name = name_of(algorithm.advantage)
    if name not in facts.COMPARED_IN_GROUP | facts.DIVIDED_IN_GROUP and not is_own(name):
        yield (
            f"algorithm.pivots.continuations ({pivots.continuations}) need an advantage that "
            f"compares the answers of a group, and algorithm.advantage={name} does not. Choose "
            "one that does (group_normalized, group_mean, rloo), or set algorithm.pivots=null."
        )
    if any(name_of(choice) == "downsample" for choice in algorithm.shaping):
        yield (
            "algorithm.pivots compares continuations with the answer from which they branch, which "
            "downsample in algorithm.shaping may drop. Remove one of them."
        )


@rule(job="rl")
def a_fork_draws_on_a_branch(config: Config) -> Iterator[str]:
    """Require our sampler, whose requests have branches: otherwise continuations could be equal."""
    if config.algorithm.pivots is not None and config.sampler.engine != "native":
        yield (
            f"algorithm.pivots needs our sampler's branches, which sampler.engine="
            f"{config.sampler.engine} does not have. Set algorithm.pivots=null."
        )
