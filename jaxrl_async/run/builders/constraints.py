"""What a task's answers must match (tasks.task.Task.constraint), for a run's samplers."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxrl_async.config.schema import AlgorithmSection, SamplerSection
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.errors import ConfigError, RolloutError
from jaxrl_async.later import Later
from jaxrl_async.sampler.device.sampling import Mix
from jaxrl_async.sampler.grammar import Grammars
from jaxrl_async.tasks.task import Task
from jaxrl_async.types import Constraint, LogitShaping, Prompt, Request

if TYPE_CHECKING:
    from jaxrl_async.rollout import chat_env
else:
    chat_env = Later("jaxrl_async.rollout.chat_env")

OfPrompt = Callable[[Prompt], Constraint | None]
"""Returns what the answers to a prompt must match."""


def prompt_constraint(task: Task) -> OfPrompt | None:
    """Return the constraint of each prompt of a task; None: its answers are free."""
    constraint = task.constraint
    if constraint is None:
        return None
    if isinstance(constraint, Constraint):
        return lambda prompt: constraint
    return lambda prompt: constraint(chat_env.record_of(prompt))


def check_constraint(
    algorithm: AlgorithmSection,
    sampler: SamplerSection,
    task: Task,
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    vocab: int,
) -> None:
    """Raise ConfigError if the task's constraint cannot be followed on the first of these prompts,
    or by this run."""
    of_prompt = prompt_constraint(task)
    if of_prompt is None:
        return
    if task.program is not None or task.game is not None:
        raise ConfigError(
            "Task.constraint is of answers to a task's records, and its program or game asks for "
            "answers itself. Leave it out; a program's calls ask with response_format."
        )
    if algorithm.pivots is not None:
        raise ConfigError(
            "algorithm.pivots continue answers from their middle, where Task.constraint would "
            "begin again. Set algorithm.pivots=null, or leave the constraint out."
        )
    if sampler.engine != "native":
        raise ConfigError(
            f"Task.constraint needs our own sampler: sampler.engine={sampler.engine} does "
            "not take one. Set sampler.engine=native, or leave it out."
        )
    try:
        constraint = of_prompt(prompts[0])
        if constraint is not None:
            request = Request(
                request_id="held-out 0",
                token_ids=prompts[0].token_ids,
                max_new_tokens=1,
                stop_token_ids=tokenizer.eos_ids,
                shaping=LogitShaping(constraint=constraint),
            )
            Grammars(tokenizer, vocab).check(request)
    except RolloutError as error:
        raise ConfigError(f"Task.constraint, tried on a held-out record: {error}") from None
    except Exception as error:
        raise ConfigError(
            f"Task.constraint raised {type(error).__name__} for a held-out record: {error}. "
            "Correct it."
        ) from error


def constrained(mixes: Sequence[Mix], task: Task) -> tuple[Mix, ...]:
    """Return the kinds of sampling of a run's requests with the constraints of its task."""
    if task.constraint is None:
        return tuple(mixes)
    shaped = [mix._replace(shaped=True) for mix in mixes]
    every = isinstance(task.constraint, Constraint)
    return tuple(dict.fromkeys(shaped if every else [*mixes, *shaped]))
