"""Settings of rewards, and of evaluations. Needs no JAX."""

from collections.abc import Iterator, Mapping
from sys import float_info
from typing import Annotated, Any

from pydantic import Field

from jaxrl_async.config.choice import Choice, Choices, arguments_of, each_of, name_of
from jaxrl_async.config.judge_section import JudgeSection, ProcessSection
from jaxrl_async.config.section import (
    Count,
    NonNegative,
    Positive,
    ReadWith,
    Section,
    as_text,
    check,
)
from jaxrl_async.config.userfile import is_own


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= float_info.max  # isfinite(10**400) raises


class RewardSection(Section):
    function: Choices | None = None
    """Reward function: a built-in (exact, gsm8k, math), your own (FILE.py:FUNCTION), a list with
    weights ([math, {my.py:short: {weight: 0.1}}]), or none with a reward model; null: the task's or
    the judge's, or exact. Only it scores the evaluation; its part `correct` is the accuracy."""
    function_weight: Annotated[float, ReadWith("model", switches=())] = 1.0
    """Weight of the function's reward in training; 0: it only scores the evaluation."""
    model: str | None = None
    """Folder of a reward model, as written by run.job=reward_model."""
    model_weight: Annotated[float, ReadWith("model")] = 1.0
    """Weight of the reward model's score."""
    judge: JudgeSection | None = None
    """A language model that judges answers by a rubric, in addition to functions and model."""
    process: ProcessSection | None = None
    """Rewards of the steps within an answer."""
    timeout_s: float = Field(30.0, gt=0)
    """Timeout of a function for one answer, or for all answers to a prompt if it judges them
    together, seconds."""
    threads: Count = 16
    """Maximum threads for reward functions that are not async."""
    processes: NonNegative = 0
    """Maximum processes for your reward functions that are not async, each killed at timeout_s; 0:
    threads, which cannot be killed. Processes load functions by name and share no memory."""

    @property
    def judged(self) -> bool:
        """Whether a judge scores whole answers."""
        return self.judge is not None and self.judge.judges_answers

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each function by name; empty: there is no function."""
        unset = "none" if self.judged else "exact"
        chosen = unset if self.function is None else self.function
        choices = [c for c in each_of(chosen) if name_of(c) != "none"]
        return {name_of(c): arguments_of(c).get("weight", 1.0) for c in choices}

    @check
    def a_reward_function_takes_one_weight(self) -> Iterator[str]:
        """Require that a reward function has no argument but its weight, a finite number."""
        for choice in each_of(self.function):
            arguments = arguments_of(choice)
            if arguments.keys() - {"weight"} or not _is_number(arguments.get("weight", 1.0)):
                yield (
                    f"reward.function: {name_of(choice)} takes one argument, weight, a number; "
                    f"given {as_text(arguments)}. Correct it."
                )

    @check
    def reward_functions_are_listed_once(self) -> Iterator[str]:
        """Require each function at most once in the list, and `none` only alone."""
        names = [name_of(choice) for choice in each_of(self.function)]
        if len(set(names)) < len(names) or (len(names) != 1 and "none" in names):
            yield (
                f"reward.function lists {', '.join(names)}: give each function once, and none only "
                "alone."
            )

    @check
    def a_judge_judges_something(self) -> Iterator[str]:
        """Require process rewards for a judge that does not judge whole answers."""
        judge, process = self.judge, self.process
        function = None if process is None else process.function
        if judge is not None and judge.weight == 0 and function != "judge":
            yield (
                "reward.judge.weight=0 uses the judge only for reward.process.function=judge, and "
                f"that is {as_text(function)}. Set it, or a weight, or reward.judge=null."
            )

    @check
    def process_rewards_come_from_somewhere(self) -> Iterator[str]:
        """Require a function of the user's, or a judge and steps that it can score."""
        judge, process = self.judge, self.process
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
                "reward.process.split=token asks for a number for every token, which the judge "
                "cannot give. Set separator or turn, or your own function."
            )


class EvalSection(Section):
    every: NonNegative = 10
    """Updates between two evaluations; 0: only at the start and at the end."""
    asynchronous: bool = False
    """Evaluate while rollouts and the next update continue; the next weights are published once it
    has ended."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0: greedy."""
    episodes_at_once: Count = 64
    """Maximum concurrent held-out episodes of environments, games and programs."""


EVAL_NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$"
"""Pattern of the name of an evaluation: of its metrics, and of its folder."""
EvalName = Annotated[str, Field(pattern=EVAL_NAME)]


OF_OWN_DATA = ReadWith("data", switches=())
IF_SAMPLED = ReadWith("temperature", switches=())
"""Marks bounds that nothing reads at temperature 0, which always takes the likeliest token."""


class NamedEvalSection(Section):
    """An evaluation in addition to `eval`."""

    data: str | None = None
    """Held-out records, named as in data.jsonl.path; null: its task's, or the run's."""
    prompt_field: Annotated[str | None, OF_OWN_DATA] = None
    """Field of `data` with the question; null: data.jsonl.prompt_field."""
    answer_field: Annotated[str | None, OF_OWN_DATA] = None
    """Field of `data` with the answer; null: data.jsonl.answer_field."""
    answer_mark: Annotated[str | None, OF_OWN_DATA] = None
    """Text before the final answer of `data`; null: data.jsonl.answer_mark."""
    task: Choice | None = None
    """Task to evaluate: one of the run's `tasks`, or as the setting `task`, but without a program
    or a game; null: the run's."""
    reward: Choices | None = None
    """Functions that score it, as reward.function; null: its task's, or the run's."""
    prompts: Positive | None = None
    """Maximum number of prompts, the first ones."""
    samples: Count = 1
    """Answers to each prompt, for avg@n, pass@k and maj@n."""
    every: NonNegative = 10
    """Updates between two evaluations; 0: only at the start and at the end."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0: greedy, only for samples=1."""
    top_p: Annotated[float, IF_SAMPLED] = Field(1.0, gt=0, le=1)
    """As sampler.top_p."""
    top_k: Annotated[NonNegative, IF_SAMPLED] = 0
    """As sampler.top_k."""
    max_new_tokens: Positive | None = None
    """Maximum tokens of an answer; null: sampler.max_new_tokens, the limit."""
    pass_reward: float = 1.0
    """Least reward of an answer that passes, or least part `correct` where rewards have it."""

    @property
    def own_prompts(self) -> bool:
        """Whether its prompts are not the run's held-out ones."""
        return self.data is not None or self.task is not None


NamedEvals = Mapping[str, NamedEvalSection]
