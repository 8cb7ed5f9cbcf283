"""Settings of the run's HTTP endpoint: where it listens, who may call, how much at once. Needs no
JAX."""

from pydantic import Field

from jaxrl_async.config.section import Count, Positive, Section
from jaxrl_async.types import LARGEST_REWARD


class EndpointSection(Section):
    """The policy over HTTP while it is trained, for agent programs and for guests
    (docs/endpoint.md)."""

    enabled: bool = False
    """Serve the run's policy. It is served in any case where a task's program needs it."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every IPv4 address. Nothing is encrypted."""
    port: int = Field(0, ge=0, le=65_535)
    """Port to listen on; 0 takes any free one."""
    model: str = Field("policy", min_length=1)
    """Name of the policy for clients."""
    key_variable: str = "JAXRL_ASYNC_KEY"
    """Environment variable with the key of guests: callers beside the run, whose answers are not
    trained on. Not set there: there are no guests."""
    max_open_calls: Count = 1024
    """Most calls that are answered at once; others are told to come back (429)."""
    max_sessions: Count = 4096
    """Most sessions of programs that are open at once."""
    max_reward: float = Field(100.0, gt=0, le=LARGEST_REWARD)
    """Largest reward, and part of one, that a session may be given by a call, positive or negative;
    a larger one is refused."""
    max_body_mib: Positive | None = None
    """Longest body of a call, MiB. null: 1 MiB, and 128 bytes for each token of
    sampler.max_length."""
    call_timeout_s: float = Field(3600.0, gt=0)
    """Longest time for one answer, seconds."""
    stall_s: float = Field(60.0, gt=0)
    """Longest time that a client may leave its answer unread, seconds; then it is cut off."""
    external_agents: bool = False
    """Have agents outside of the run play all episodes: they ask the endpoint for tasks."""
    agent_key_variable: str = "JAXRL_ASYNC_AGENT_KEY"
    """Environment variable with the key that they ask for tasks with."""
    agent_tries: Count = 3
    """How many of them in a row may leave an episode before its group fails."""
