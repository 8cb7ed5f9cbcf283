"""Settings of a task's environments: the section `env`. Needs no JAX."""

from pydantic import Field

from jaxrl_async.config.section import Count, NonNegative, Positive, Section


class EnvSection(Section):
    """Limits of a task's environments; faults.env_timeout_s is the timeout of one reply."""

    max_turns: Positive = 16
    """Maximum turns of the policy in an episode; the environment still answers the last one."""
    tool_timeout_s: float = Field(30.0, gt=0)
    """Timeout of one call of a tool, seconds; the policy gets an error message."""
    tool_result_chars: Positive = 8192
    """Maximum length of a tool's result, characters; longer ones are truncated, with a note to the
    policy."""
    threads: Count = 64
    """Maximum threads for environments and tools that are not async; async ones run
    concurrently."""
    program_timeout_s: float = Field(3600.0, gt=0)
    """Timeout of a task's program for a whole episode, seconds."""
    program_idle_s: float = Field(600.0, gt=0)
    """Maximum time between two calls of the policy by a program, seconds."""
    program_max_calls: Count = 256
    """Maximum calls of the policy by a program in one episode."""
    program_max_tokens: Positive = 262_144
    """Maximum tokens of a program's episode, in all its contexts: new prompt tokens plus sampled
    ones."""
    program_variables: tuple[str, ...] = ()
    """Environment variables that a program's command sees in addition to the usual ones (PATH,
    HOME, LANG; docs/agents.md); NAME* stands for all names with this prefix."""
    retries: NonNegative = 2
    """Retries of an environment's reset, and of its step if it is `repeatable`, after it raised;
    and of a held-out episode that failed."""
