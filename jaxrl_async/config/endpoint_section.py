"""Settings of the run's HTTP endpoint: address, keys and limits. Needs no JAX."""

from typing import Annotated

from pydantic import Field

from jaxrl_async.config.section import Count, Positive, ReadWith, Section
from jaxrl_async.types import LARGEST_REWARD


class EndpointSection(Section):
    """The policy over HTTP while it is trained, for agent programs and for guests
    (docs/endpoint.md). null: it is served only if a task's program needs it."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: every IPv4 address. Nothing is encrypted."""
    port: int = Field(0, ge=0, le=65_535)
    """Port to listen on; 0: any free one."""
    model: str = Field("policy", min_length=1)
    """Name of the policy for clients."""
    key_variable: str = "JAXRL_ASYNC_KEY"
    """Environment variable with the key of guests, whose answers are not trained on; without it
    they are refused."""
    max_open_calls: Count = 1024
    """Maximum concurrent calls; further ones get status 429."""
    max_sessions: Count = 4096
    """Maximum number of open sessions of programs."""
    max_reward: float = Field(100.0, gt=0, le=LARGEST_REWARD)
    """Maximum absolute value of a reward, and of each part, that a call may give."""
    max_body_mib: Positive | None = None
    """Maximum size of a call's body, MiB; null: 1 MiB plus 128 bytes for each token of
    sampler.max_length."""
    call_timeout_s: float = Field(3600.0, gt=0)
    """Timeout of one answer, seconds."""
    stall_s: float = Field(60.0, gt=0)
    """Time after which a client that does not read its answer is disconnected, seconds."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages whose scripts may call, such as https://example.org; *: all."""
    external_agents: bool = False
    """Let agents outside of the run play all episodes: they ask the endpoint for tasks."""
    agent_key_variable: Annotated[str, ReadWith("external_agents")] = "JAXRL_ASYNC_AGENT_KEY"
    """Environment variable with the key of external agents."""
    agent_tries: Annotated[Count, ReadWith("external_agents")] = 3
    """Number of agents in a row that may abandon an episode before its group fails."""
