"""Members of a run's groups that are played by a task's program or by external agents."""

from collections.abc import Callable

from jaxrl_async.config.schema import Config, name_of
from jaxrl_async.endpoint.agent_programs import AgentPrograms, AgentSession, ProgramEndpoint
from jaxrl_async.endpoint.external_agents import ExternalAgentMembers
from jaxrl_async.endpoint.run_serving import RunServing
from jaxrl_async.endpoint.sessions import SessionLimits
from jaxrl_async.errors import ConfigError, RolloutError
from jaxrl_async.rollout.env import MakeEnv
from jaxrl_async.scorers.results import score_of
from jaxrl_async.shown_environment import key_variables
from jaxrl_async.tasks.task import Task


async def placeholder_program(session: AgentSession) -> None:
    """Placeholder program of a task for external agents; ExternalAgentMembers play instead."""
    raise RolloutError(f"{session.base_url}: external agents play this task")


def make_members(
    config: Config, task: Task, serving: RunServing, count: Callable[[str, int], None]
) -> tuple[MakeEnv, Callable[[], float]]:
    """Make the MakeEnv for programs or external agents, and a function that returns the age of the
    oldest running program, seconds. Arguments and errors as for make_programs."""
    programs = make_programs(config, task, serving, count)
    if not config.serving.external_agents:
        return programs, programs.oldest_s
    tries = config.serving.agent_tries
    outside = ExternalAgentMembers(programs=programs, tasks=serving.tasks, tries=tries)
    return outside, programs.oldest_s


def make_programs(
    config: Config, task: Task, serving: RunServing, count: Callable[[str, int], None]
) -> AgentPrograms:
    """Make the members that are played by a task's program. Raises ConfigError.

    Args:
        config: env and endpoint.
        task: one with a program.
        serving: the endpoint that the program uses.
        count: called with the name and number of faults.
    """
    section = config.env
    assert task.program is not None, "the task has a program"
    bounds = SessionLimits(
        max_calls=section.program_max_calls,
        max_tokens=section.program_max_tokens,
        idle_s=section.program_idle_s,
        total_s=section.program_timeout_s,
        max_reward=config.serving.max_reward,
    )
    if section.program_variables and callable(task.program):
        raise ConfigError(
            "env.program_variables: the task's program is a function, which runs in this process "
            "and sees all variables. Remove it."
        )
    endpoint = ProgramEndpoint(address=serving.address, model=config.serving.model)
    try:
        return AgentPrograms(
            task.program,
            serving.sessions,
            endpoint,
            bounds,
            judge=score_of,
            system_prompt=task.system_prompt,
            secrets=key_variables(config.model_dump()),
            shown=section.program_variables,
            count=count,
        )
    except RolloutError as error:
        raise ConfigError(f"task = {name_of(config.task or '')!r}: {error}") from error
