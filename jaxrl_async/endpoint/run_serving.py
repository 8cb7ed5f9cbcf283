"""The endpoint of a run: its sessions from the start, its server once there are samplers."""

import logging
import os
import time
from collections.abc import Callable, Mapping

from jaxrl_async.config.endpoint_section import EndpointSection
from jaxrl_async.config.schema import Config
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.endpoint.connection import serving_module
from jaxrl_async.endpoint.external_agents import Lobby
from jaxrl_async.endpoint.http_server import Endpoint
from jaxrl_async.endpoint.sampling_request import Terms, stop_ids
from jaxrl_async.endpoint.service import Desk, EndpointLimits, Served
from jaxrl_async.endpoint.sessions import Sessions
from jaxrl_async.endpoint.task_lease import AgentDoor
from jaxrl_async.errors import Closed, ConfigError
from jaxrl_async.ports.rollout import ChatFormat
from jaxrl_async.ports.sampling import Generate
from jaxrl_async.types import SamplingParams

log = logging.getLogger(__name__)

HEARD_S = 0.5
"""How long agents whose sessions a stop has ended are still answered, seconds."""


class RunServing:
    """The endpoint of a run. `sessions` and `address` are for the programs that play its tasks."""

    def __init__(
        self,
        section: EndpointSection,
        *,
        needed: bool = False,
        count: Callable[[str, int], None] = lambda name, number: None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Serve nobody yet.

        Args:
            section: the settings.
            needed: whether the run cannot do without it, whatever endpoint.enabled says.
            count: called with the name and number of faults (metrics/fault_counts.py).
            environ: where the keys are.

        Raises ConfigError without the key of agents outside, MissingExtraError if it will be needed
        and cannot be.
        """
        self.needed = needed or section.enabled
        self._guest_key = environ.get(section.key_variable, "").strip()
        self._agent_key = environ.get(section.agent_key_variable, "").strip()
        self.lobby = Lobby()
        if section.external_agents and not self._agent_key:
            raise ConfigError(
                "endpoint.external_agents: agents outside of the run need a key. Set the "
                f"environment variable {section.agent_key_variable} (endpoint.agent_key_variable)."
            )
        if section.external_agents and self._agent_key == self._guest_key:
            raise ConfigError(
                f"endpoint: {section.key_variable} and {section.agent_key_variable} hold the "
                "same key, and whoever shows it would be a guest and an agent. Choose another."
            )
        if self.needed:
            serving_module("uvicorn")
        self.sessions = Sessions(max_open=section.max_sessions, count=count)
        self._section = section
        self._endpoint: Endpoint | None = None
        self._heard_by = 0.0  # until when agents whose sessions were ended are answered

    def address(self) -> str:
        """Return where programs reach it, without /v1. Raises Closed before `open`."""
        if self._endpoint is None:
            raise Closed("the endpoint is not open yet")
        return self._endpoint.address

    def counts(self) -> dict[str, int]:
        """Return what it has done since the start, by the metric's name."""
        return {} if self._endpoint is None else self._endpoint.counts().by_name()

    def open(
        self, config: Config, generate: Generate, tokenizer: Tokenizer, chat: ChatFormat | None
    ) -> None:
        """Listen and answer. Arguments as served_by_run. Raises ConfigError and
        MissingExtraError."""
        served = served_by_run(config, generate, tokenizer, chat)
        section, key = self._section, self._guest_key
        mib = section.max_body_mib
        most_waiting = section.max_open_calls // 2  # the other places are for those that play
        door = AgentDoor(self.lobby, self._agent_key, most_waiting=most_waiting)
        desk = Desk(
            served,
            EndpointLimits(
                max_open_calls=section.max_open_calls,
                max_body_bytes=None if mib is None else mib * 2**20,
                call_s=section.call_timeout_s,
                stall_s=section.stall_s,
            ),
            sessions=self.sessions,
            guest_keys=(key,) if key else (),
            door=door if section.external_agents else None,
        )
        self._endpoint = Endpoint(desk, host=section.host, port=section.port).start()
        log.info("the policy is served at %s/v1", self.address())

    def end_sessions(self) -> None:
        """End all sessions: their calls, also those to come, are told that the run stops."""
        if self.sessions.all():
            self._heard_by = time.monotonic() + HEARD_S
        self.sessions.close()
        self.lobby.close()

    def close(self) -> None:
        """End all sessions, and then the server, once agents can have heard it. Idempotent."""
        self.end_sessions()
        if self._endpoint is not None:
            time.sleep(max(self._heard_by - time.monotonic(), 0.0))
            self._endpoint.close()


def served_by_run(
    config: Config, generate: Generate, tokenizer: Tokenizer, chat: ChatFormat | None
) -> Served:
    """Return what the endpoint of a run serves.

    Args:
        config: sampler, endpoint, run.
        generate: the run's samplers.
        tokenizer: the policy's.
        chat: the run's chat format; None: there is none, and chat is refused.
    """
    section = config.sampler
    return Served(
        name=config.endpoint.model,
        generate=generate,
        tokenizer=tokenizer,
        chat=chat,
        terms=Terms(
            sampling=SamplingParams(
                temperature=section.temperature,
                top_k=section.top_k,
                top_p=section.top_p,
                min_p=section.min_p,
            ),
            stop_token_ids=stop_ids(tokenizer, chat),
            max_new_tokens=section.max_new_tokens,
            max_length=section.max_length,
            priority=(config.priorities.guests, 0),
        ),
        label=config.run.name.replace("-", "_"),
        streams_early=section.on_new_weights != "restart",
    )
