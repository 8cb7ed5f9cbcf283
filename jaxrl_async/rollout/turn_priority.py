"""Priority of a run's requests while they wait for the samplers. Pure host code."""

from dataclasses import dataclass

from jaxrl_async.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPriority:
    """The priority of an episode's requests (types.Request.priority), by turn and group."""

    first: int = 0  # level of an episode's first turn
    later: int = 0  # level of the turns after it
    older_first: bool = False  # within a level, groups in the order of their prompts

    def of(self, prompt: Prompt, turn: int) -> tuple[int, int]:
        """Return the priority of a turn's request; turns count from 0."""
        level = self.later if turn else self.first
        return level, prompt.position if self.older_first else 0


BY_ARRIVAL = TurnPriority()
"""All requests in order of arrival."""
