"""Tasks for external agents: /v1/session/begin."""

import hmac
import json
from collections.abc import Mapping
from typing import Any

from jaxrl_async.endpoint.body_fields import BodyFields
from jaxrl_async.endpoint.external_agents import TaskQueue
from jaxrl_async.endpoint.http_errors import CallRefused

MAX_WAIT_S = 60.0
"""Maximum time for which an agent may wait for a task in one call, seconds."""
EVALUATED = "eval/"
"""Prefix of the labels of held-out episodes."""


class TaskLeases:
    """Gives tasks to agents that send the run's agent key."""

    def __init__(self, tasks: TaskQueue, key: str, *, most_waiting: int) -> None:
        """Make it.

        Args:
            tasks: the waiting tasks.
            key: key of the agents.
            most_waiting: maximum number of waiting agents; others get a reply immediately.
        """
        self._tasks, self._key = tasks, key
        self._most_waiting, self._waiting = most_waiting, 0

    def check(self, key: str | None) -> None:
        """Raise CallRefused unless this is the agents' key."""
        if key is None or not hmac.compare_digest(key.encode(), self._key.encode()):
            raise CallRefused(
                "this path needs the key of the run's agents", status=401, code="invalid_api_key"
            )

    async def begin(self, body: object, *, address: str, model: str) -> Mapping[str, Any]:
        """Give a task to an agent. Raises CallRefused, 503 if no task is available; and Closed.

        Args:
            body: `wait_s`, maximum time to wait for a task.
            address: the endpoint's address as used by the agent, without /v1.
            model: the policy's name.
        """
        fields = BodyFields(body)
        wait_s = fields.number("wait_s", 0.0, MAX_WAIT_S) or 0.0
        fields.close()
        if self._waiting >= self._most_waiting:
            wait_s = 0.0  # the other slots are for agents that play
        self._waiting += 1
        try:
            session = await self._tasks.take(wait_s)
        finally:
            self._waiting -= 1
        if session is None:
            raise CallRefused(
                "no task is waiting; ask again", status=503, code="no_task", retry_after_s=1.0
            )
        prompt, bounds = session.prompt, session.bounds
        task = {
            "session": session.label,
            "held_out": session.member.label.startswith(EVALUATED),
            "base_url": f"{address}/v1",
            "api_key": session.key,
            "reward_key": session.reward_key,
            "model": model,
            "record": dict(prompt.columns),
            "prompt": prompt.text,
            "messages": list(prompt.messages),
            "limits": {
                "calls": bounds.max_calls,
                "tokens": bounds.max_tokens,
                "idle_s": bounds.idle_s,
                "total_s": bounds.total_s,
            },
        }
        plain: dict[str, Any] = json.loads(json.dumps(task, default=str))
        return plain
