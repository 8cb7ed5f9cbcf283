"""Settings of who goes first where requests wait for the samplers. Needs no JAX."""

from typing import Annotated

from pydantic import Field

from jaxrl_async.config.section import Section

Level = Annotated[int, Field(ge=-1000, le=1000)]
"""A priority: lower goes first."""


class PrioritySection(Section):
    """Who goes first where requests wait for the samplers: the lowest level, and within a level the
    order of asking. First turns of training have level 0. Changes no token. The request that has
    waited longest is overtaken at most 64 times in a row."""

    evaluation: Level = 0
    """Level of an evaluation's requests; -1: before training, so that it ends soon."""
    later_turns: Level = 0
    """Level of training's turns after an episode's first; -1: episodes under way before new
    ones."""
    guests: Level = 0
    """Level of the endpoint's guests; -1: before training, 1: behind it."""
    older_first: bool = False
    """Within a level of training, older groups before younger ones, whichever asked first."""
