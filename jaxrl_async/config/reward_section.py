"""Settings of rewards, and of evaluations. Needs no JAX."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from jaxrl_async.config.choice import Choice, Choices, arguments_of, each_of, name_of
from jaxrl_async.config.judge_section import JudgeSection, ProcessSection
from jaxrl_async.config.section import Count, NonNegative, Positive, Section


class RewardSection(Section):
    function: Choices | None = None
    """Built-in reward (exact, gsm8k, math), your own (FILE.py:FUNCTION), a list of these with
    weights ([math, {my.py:short: {weight: 0.1}}]), or none if there is a reward model; null: the
    reward of the task or the judge, or exact. If there is a function, only it scores the
    evaluation; its part `correct`, 0 to 1, is the accuracy."""
    function_weight: float = 1.0
    """Weight of the function's reward, added to reward.model's in training; 0: it only scores the
    evaluation."""
    model: str | None = None
    """Folder of a reward model, as written by run.job=reward_model; null: none."""
    model_weight: float = 1.0
    """Weight of the reward model's score, which is added to the function's reward."""
    judge: JudgeSection | None = None
    """A language model that judges answers by a rubric, in addition to functions and model; null:
    none."""
    process: ProcessSection | None = None
    """Rewards of the steps within an answer; null: none."""
    timeout_s: float = Field(30.0, gt=0)
    """Timeout of a function for one answer (for all answers to a prompt if it judges them
    together), seconds."""
    threads: Count = 16
    """Maximum threads for reward functions that are not async; async functions run concurrently."""
    processes: NonNegative = 0
    """Maximum processes for your reward functions that are not async, each killed at timeout_s; 0:
    threads, which cannot be killed. For functions that can keep Python busy for long within one
    call (a regular expression that backtracks). Another process must be able to load them:
    FILE.py:FUNCTION, or functions of a module's top level; it does not share their memory."""

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


class EvalSection(Section):
    every: NonNegative = 10
    """Updates between two evaluations; 0: only at the start and at the end."""
    asynchronous: bool = False
    """Evaluate while rollouts and the next update continue. The next weights are published once the
    evaluation has ended. The run waits for the last evaluation, and for each one where several
    processes train. With several adapters (runs), the others train during the evaluation of
    one."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature in the evaluation; 0: greedy."""
    episodes_at_once: Count = 64
    """Maximum held-out episodes of environments, games and programs that run concurrently; episodes
    of one turn are all requested at the same time."""


EVAL_NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$"
"""Pattern of the name of an evaluation: of its metrics, and of its folder."""
EvalName = Annotated[str, Field(pattern=EVAL_NAME)]


class NamedEvalSection(Section):
    """An evaluation by name, in addition to `eval`: its records, sampling settings and cadence."""

    data: str | None = None
    """File of held-out records, or OWNER/NAME:CONFIG:SPLIT, as data.jsonl.path; null: its task's,
    or the run's held-out records."""
    prompt_field: str | None = None
    """Field of `data` with the question; null: data.jsonl.prompt_field."""
    answer_field: str | None = None
    """Field of `data` with the answer; null: data.jsonl.answer_field."""
    answer_mark: str | None = None
    """Text before the final answer of `data`; null: data.jsonl.answer_mark."""
    task: Choice | None = None
    """Task whose held-out records, environment and reward are evaluated: a name as for the setting
    `task`, with its arguments, but without a program or a game; null: the run's."""
    reward: Choices | None = None
    """Functions that score it, as reward.function; null: its task's, or the run's."""
    prompts: Positive | None = None
    """Maximum number of prompts, the first ones; null: all."""
    samples: Count = 1
    """Answers to each prompt, n, for avg@n, pass@k up to n and maj@n."""
    every: NonNegative = 10
    """Updates between two evaluations; 0: only at the start and at the end."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0: greedy, only for samples=1."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the likeliest tokens whose probabilities sum to this."""
    top_k: NonNegative = 0
    """Sample from this many of the likeliest tokens; 0: all."""
    max_new_tokens: Positive | None = None
    """Maximum tokens of an answer, at most sampler.max_new_tokens; null: that."""
    pass_reward: float = 1.0
    """Least reward of an answer that passes; where rewards have the part `correct`, least value of
    that part."""

    @property
    def own_prompts(self) -> bool:
        """Whether its prompts are not the run's held-out ones."""
        return self.data is not None or self.task is not None


NamedEvals = Mapping[str, NamedEvalSection]
