"""Settings of a task's environments: the section `env`. Needs no JAX."""

from pydantic import Field

from jaxrl_async.config.section import Count, NonNegative, Positive, Section


class EnvSection(Section):
    """How the environments of a task are played; faults.env_timeout_s is the limit of one reply."""

    max_turns: Positive = 16
    """Most turns of the policy in an episode; the environment then has the last word."""
    tool_timeout_s: float = Field(30.0, gt=0)
    """Timeout of one call of a tool, seconds; the policy is told."""
    tool_result_chars: Positive = 8192
    """Longest result of a tool, characters; longer ones are cut, and the policy is told."""
    threads: Count = 64
    """Most threads that run environments and tools that are not async; async ones wait side by
    side."""
    program_timeout_s: float = Field(3600.0, gt=0)
    """Timeout of a task's program for a whole episode, seconds."""
    program_idle_s: float = Field(600.0, gt=0)
    """Longest time that a program may let pass between two calls of the policy, seconds."""
    program_max_calls: Count = 256
    """Most calls of the policy by a program in one episode."""
    program_max_tokens: Positive = 262_144
    """Most tokens of a program's episode, in all its contexts: read anew, and drawn."""
    program_variables: tuple[str, ...] = ()
    """Environment variables that a program's command sees beside the usual ones (PATH, HOME, LANG;
    docs/tasks.md), by name; NAME* shows all that begin so."""
    retries: NonNegative = 2
    """Retries of an environment's reset, and of its step if it is `repeatable`, after it raised;
    and of a held-out episode that failed."""
