"""The endpoint of a run: sessions from the start, and a server once the samplers exist."""

import logging
import os
import time
from collections.abc import Callable, Mapping

from jaxrl_async.config.endpoint_section import EndpointSection
from jaxrl_async.config.schema import Config
from jaxrl_async.data.tokenizer import Tokenizer
from jaxrl_async.endpoint.connection import serving_module
from jaxrl_async.endpoint.external_agents import TaskQueue
from jaxrl_async.endpoint.http_server import Endpoint
from jaxrl_async.endpoint.image_chat import with_images
from jaxrl_async.endpoint.sampling_request import CallerLimits, stop_ids
from jaxrl_async.endpoint.service import EndpointLimits, EndpointService, Served
from jaxrl_async.endpoint.sessions import Sessions
from jaxrl_async.endpoint.task_lease import TaskLeases
from jaxrl_async.errors import Closed, ConfigError
from jaxrl_async.ports.generate import Generate
from jaxrl_async.ports.rollout import ChatFormat
from jaxrl_async.types import SamplingParams

log = logging.getLogger(__name__)

REPLIES_S = 0.5
"""Time for which agents still get answers after a stop has ended their sessions, seconds."""


class RunServing:
    """The endpoint of a run. `sessions` and `address` are for the programs that play its tasks."""

    needed = True  # a run that needs no endpoint has NoServing

    def __init__(
        self,
        section: EndpointSection,
        *,
        count: Callable[[str, int], None] = lambda name, number: None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Serve nothing yet.

        Args:
            section: the settings.
            count: called with the name and number of faults (metrics/fault_counts.py).
            environ: environment variables with the keys.

        Raises ConfigError without the key for external agents, MissingExtraError if its
        dependencies are missing.
        """
        self._guest_key = environ.get(section.key_variable, "").strip()
        self._agent_key = environ.get(section.agent_key_variable, "").strip()
        self.tasks = TaskQueue()
        if section.external_agents and not self._agent_key:
            raise ConfigError(
                "endpoint.external_agents: external agents need a key. Set the environment "
                f"variable {section.agent_key_variable} (endpoint.agent_key_variable) to one."
            )
        if section.external_agents and self._agent_key == self._guest_key:
            raise ConfigError(
                f"endpoint: {section.key_variable} and {section.agent_key_variable} hold the same "
                "key, which could not distinguish guests from agents. Choose another one."
            )
        serving_module("uvicorn")
        self.sessions = Sessions(max_open=section.max_sessions, count=count)
        self._section = section
        self._endpoint: Endpoint | None = None
        self._replies_until_s = 0.0  # time until which agents of ended sessions still get answers

    def address(self) -> str:
        """Return its address for programs, without /v1. Raises Closed before `open`."""
        if self._endpoint is None:
            raise Closed("the endpoint is not open yet")
        return self._endpoint.address

    def counts(self) -> dict[str, int]:
        """Return its counts since the start, by the metric's name."""
        return {} if self._endpoint is None else self._endpoint.counts().by_name()

    def open(
        self, config: Config, generate: Generate, tokenizer: Tokenizer, chat: ChatFormat | None
    ) -> None:
        """Start serving. Arguments as for served_by_run. Raises ConfigError and
        MissingExtraError."""
        served = served_by_run(config, generate, tokenizer, chat)
        section, key = self._section, self._guest_key
        mib = section.max_body_mib
        most_waiting = section.max_open_calls // 2  # the other slots are for agents that play
        leases = TaskLeases(self.tasks, self._agent_key, most_waiting=most_waiting)
        service = EndpointService(
            served,
            EndpointLimits(
                max_open_calls=section.max_open_calls,
                max_body_bytes=None if mib is None else mib * 2**20,
                call_s=section.call_timeout_s,
                stall_s=section.stall_s,
            ),
            sessions=self.sessions,
            guest_keys=(key,) if key else (),
            leases=leases if section.external_agents else None,
            cors_origins=section.cors_origins,
        )
        self._endpoint = Endpoint(service, host=section.host, port=section.port).start()
        log.info("the policy is served at %s/v1", self.address())

    def end_sessions(self) -> None:
        """End all sessions: current and later calls get an error that the run is stopping."""
        if self.sessions.all():
            self._replies_until_s = time.monotonic() + REPLIES_S
        self.sessions.close()
        self.tasks.close()

    def close(self) -> None:
        """End all sessions, and then the server after agents had time for a reply. Idempotent."""
        self.end_sessions()
        if self._endpoint is not None:
            time.sleep(max(self._replies_until_s - time.monotonic(), 0.0))
            self._endpoint.close()


def served_by_run(
    config: Config, generate: Generate, tokenizer: Tokenizer, chat: ChatFormat | None
) -> Served:
    """Return the model that the endpoint of a run serves.

    Args:
        config: sampler, endpoint, run.
        generate: the run's samplers.
        tokenizer: the policy's tokenizer.
        chat: the run's chat format; None: chat calls are rejected.
    """
    section = config.sampler
    return Served(
        name=config.serving.model,
        generate=generate,
        tokenizer=tokenizer,
        chat=with_images(chat, tokenizer.images),
        terms=CallerLimits(
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
