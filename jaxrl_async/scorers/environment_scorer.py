"""Score episodes by their environment or session, plus reward functions. No JAX."""

from jaxrl_async.errors import RolloutError
from jaxrl_async.ports.rollout import Scorer
from jaxrl_async.scorers.results import added, distinct_parts
from jaxrl_async.types import Episode, Prompt, Score

ENVIRONMENT, FUNCTIONS = "environment", "functions"
"""Names of parts for scores without parts: the environment's, and the functions'."""


class EnvironmentScorer:
    """ports.Scorer that uses Episode.score, plus the scores of reward functions."""

    def __init__(self, functions: Scorer | None = None) -> None:
        """functions: a scorer to add; None: no reward functions."""
        self._functions = functions

    async def __call__(self, episodes: tuple[Episode, ...], prompt: Prompt) -> tuple[Score, ...]:
        """Score each episode. Raises RolloutError if an episode has no score from either source."""
        if self._functions is None:
            return tuple(_earned(episode, prompt) for episode in episodes)
        by_source = {
            ENVIRONMENT: [e.score or Score(reward=0.0) for e in episodes],
            FUNCTIONS: list(await self._functions(episodes, prompt)),
        }
        pairs = zip(*distinct_parts(by_source), strict=True)
        return tuple(added([(1.0, score) for score in pair]) for pair in pairs)


def _earned(episode: Episode, prompt: Prompt) -> Score:
    if episode.score is None:
        raise RolloutError(
            f"prompt {prompt.prompt_id}: neither an environment nor a function gave a reward. Set "
            "reward.function, or let the environment give one."
        )
    return episode.score
