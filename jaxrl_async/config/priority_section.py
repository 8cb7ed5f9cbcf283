"""Priorities of requests that wait for the samplers. Needs no JAX."""

from typing import Annotated

from pydantic import Field

from jaxrl_async.config.section import Section

Level = Annotated[int, Field(ge=-1000, le=1000)]
"""A priority: lower levels first."""


class PrioritySection(Section):
    """Priority of waiting requests: lower levels first, first come first served within a level.
    First turns of training have level 0. Priorities change no token. The request that has waited
    longest is overtaken at most 64 times in a row."""

    evaluation: Level = 0
    """Level of an evaluation's requests; -1: before training, which makes it short."""
    later_turns: Level = 0
    """Level of training's turns after an episode's first; -1: running episodes before new ones."""
    guests: Level = 0
    """Level of the endpoint's guests; -1: before training, 1: after it."""
    older_first: bool = False
    """Within a level of training, serve older groups before younger ones."""
