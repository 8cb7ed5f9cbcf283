"""Rules about judges and process rewards (reward.judge, reward.process). Needs no JAX."""

from collections.abc import Iterator

from jaxrl_async.config.rule import RuleBook, as_text
from jaxrl_async.config.schema import Config
from jaxrl_async.config.userfile import is_own

rule = RuleBook()

OWN_FIELDS = ("model", "messages", "stream", "n", "temperature", "max_tokens")
"""Fields of a judge's call that other settings decide, or that would make replies unreadable."""
MARGIN_S = 10.0
"""Minimum difference between two time limits if one is to act before the other, seconds."""


@rule("reward", "judge")
def a_judge_has_one_rubric(config: Config) -> Iterator[str]:
    """Require a rubric in one place for a judge of whole answers."""
    judge = config.reward.judge
    if judge is None or not judge.judges_answers:
        return
    if (judge.rubric is None) == (judge.rubric_file is None):
        yield (
            "reward.judge.rubric and rubric_file: set exactly one of them; it describes what makes "
            "an answer good."
        )


@rule("reward", "judge")
def a_judges_scale_rises(config: Config) -> Iterator[str]:
    """Require the worst number of the scale to be below the best."""
    if config.reward.judge is None:
        return
    worst, best = config.reward.judge.scale
    if worst >= best:
        yield (
            f"reward.judge.scale ({worst:g}, {best:g}): the first number is the worst and must be "
            "below the second. Swap them or correct them."
        )


@rule("reward", "judge")
def a_judges_call_keeps_its_form(config: Config) -> Iterator[str]:
    """Refuse extra fields of a call that other settings decide or that change its format."""
    extra = {} if config.reward.judge is None else config.reward.judge.extra
    if taken := [name for name in OWN_FIELDS if name in extra]:
        yield (
            f"reward.judge.extra has {', '.join(taken)}, which the other settings of reward.judge "
            "decide. Leave it out of extra."
        )


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


@rule("reward")
def a_judge_judges_something(config: Config) -> Iterator[str]:
    """Require process rewards for a judge that does not judge whole answers."""
    judge, process = config.reward.judge, config.reward.process
    asked = None if process is None else process.function
    if judge is not None and judge.weight == 0 and asked != "judge":
        yield (
            "reward.judge.weight=0 uses the judge only for reward.process.function=judge, and that "
            f"is {as_text(asked)}. Set it, or a weight, or reward.judge=null."
        )


@rule("reward")
def process_rewards_come_from_somewhere(config: Config) -> Iterator[str]:
    """Require a function of the user's, or a judge and steps that it can score."""
    judge, process = config.reward.judge, config.reward.process
    if process is None:
        return
    if process.function != "judge" and not is_own(process.function):
        yield (
            f"reward.process.function={process.function} is unknown. Give your own as "
            "FILE.py:FUNCTION, or judge."
        )
    if process.function == "judge" and judge is None:
        yield (
            "reward.process.function=judge asks reward.judge, which is null. Set "
            "reward.judge.model (with weight=0 if it is to judge only steps)."
        )
    if process.function == "judge" and process.split == "token":
        yield (
            "reward.process.split=token asks for a number for every token, which the judge cannot "
            "give. Set separator or turn, or your own function."
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
