"""Rules about judges and process rewards (reward.judge, reward.process). Needs no JAX."""

from collections.abc import Iterator

from jaxrl_async.config.rule import RuleBook
from jaxrl_async.config.schema import Config

rule = RuleBook()

MARGIN_S = 10.0
"""Minimum difference between two time limits if one is to act before the other, seconds."""


@rule()
def a_judge_gives_up_in_time(config: Config) -> Iterator[str]:
    """Require each time limit of a judge to fit into the one around it."""
    judge, faults = config.reward.judge, config.faults
    if judge is None:
        return
    if judge.timeout_s > judge.patience_s:
        yield (
            f"reward.judge.timeout_s ({judge.timeout_s:g}) of one call must be at most patience_s "
            f"({judge.patience_s:g}) of all calls for a prompt. Raise patience_s."
        )
    if judge.patience_s + MARGIN_S > faults.scorer_timeout_s:
        yield (
            f"reward.judge.patience_s ({judge.patience_s:g}) must be {MARGIN_S:g} s below "
            f"faults.scorer_timeout_s ({faults.scorer_timeout_s:g}), or on_failure would never "
            "act. Lower it, or raise faults.scorer_timeout_s."
        )


@rule()
def a_ranking_judge_has_answers_to_compare(config: Config) -> Iterator[str]:
    """Require several answers to a prompt for a judge that compares them."""
    judge = config.reward.judge
    ranks = judge is not None and judge.judges_answers and judge.mode == "rank"
    if ranks and config.algorithm.group_size == 1:
        yield (
            "reward.judge.mode=rank compares the answers to a prompt, and algorithm.group_size=1 "
            "samples one. Raise it, or set mode=score."
        )


@rule()
def late_process_rewards_are_noticed(config: Config) -> Iterator[str]:
    """Require the wait for process rewards to end before the wait for all scores of a group."""
    process, whole_s = config.reward.process, config.faults.scorer_timeout_s
    limit_s = None if process is None else process.max_age_s
    if limit_s is not None and limit_s >= whole_s:
        yield (
            f"reward.process.max_age_s ({limit_s:g}) must be below faults.scorer_timeout_s "
            f"({whole_s:g}), which ends the scoring of a group. Lower it, or leave it null."
        )
