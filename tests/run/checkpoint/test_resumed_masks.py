"""Answers that were sampled before a run kept sampling masks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl_async.buffer.contents import BufferState
from jaxrl_async.config import schema
from jaxrl_async.config.load import dump
from jaxrl_async.config.schema import Config
from jaxrl_async.errors import CheckpointError
from jaxrl_async.rollout.episode import SavedEpisode
from jaxrl_async.rollout.episode_assembly import Turn
from jaxrl_async.rollout.running_groups import SavedGroup
from jaxrl_async.run.checkpoint.resumed_masks import with_masks
from jaxrl_async.run.checkpoint.rollout_state import NOTHING_YET, RolloutsState
from jaxrl_async.run.checkpoint.store import Saved
from jaxrl_async.testing.fakes import make_group, make_prompt
from jaxrl_async.types import Completion, StopReason, Ticket

pytestmark = pytest.mark.full


def completion(length: int) -> Completion:
    return Completion(
        request_id="a",
        token_ids=np.arange(length, dtype=np.int32),
        logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        stop=StopReason.EOS,
    )


def state() -> RolloutsState:
    """A finished group, one to be used again, and one that is played."""
    tickets = [Ticket(group=i, version=0) for i in range(3)]
    played = SavedEpisode(
        turns=(Turn(completion=completion(2), reply=np.zeros(1, np.int32)),),
        completion=completion(3),
    )
    buffer = BufferState(
        next_group=3,
        next_untaken=1,
        pending=(tickets[2],),
        ready=(make_group(tickets[1], [0]),),
        kept=((make_group(tickets[0], [0]), 1),),
    )
    group = SavedGroup(ticket=tickets[2], prompt=make_prompt(2), episodes=(played,))
    return RolloutsState(buffer=buffer, groups=(group,))


def config_of(keep: bool | None = None, **sampler: Any) -> Config:
    return Config(
        sampler=schema.SamplerSection(**sampler),
        algorithm=schema.AlgorithmSection(keep_sampling_mask=keep),
    )


def resumed(of: RolloutsState, before: Config, now: Config) -> RolloutsState:
    saved = Saved(step=4, state=None, loop={"config": dump(before)})
    return with_masks(of, saved, now, Path("checkpoints"))


def test_answers_from_the_whole_vocabulary_get_masks_that_leave_nothing_out(caplog):
    filled = resumed(state(), config_of(), config_of(top_p=0.9))
    groups = [filled.buffer.ready[0], filled.buffer.kept[0][0]]
    episodes = [e for g in groups for e in g.episodes]
    assert episodes and filled.buffer.kept[0][1] == 1
    for episode in episodes:
        assert episode.kept is not None and not len(episode.kept.ids)
        assert episode.kept.starts.tolist() == [0] * (episode.num_drawn + 1)
    played = filled.groups[0].episodes[0]
    assert played.completion is not None and played.completion.kept is not None
    assert played.completion.kept.starts.tolist() == [0, 0, 0, 0]
    assert played.turns[0].completion.kept is not None
    assert f"{len(episodes) + 2} answers that are not trained on yet" in caplog.text
    again = resumed(filled, config_of(top_p=0.9), config_of(top_p=0.9))
    assert again is filled, "all have masks now"


def test_answers_of_a_cut_distribution_without_masks_are_refused_with_what_to_set():
    before, now = config_of(keep=False, top_p=0.9), config_of(top_p=0.9)
    with pytest.raises(CheckpointError, match=r"top_p=0\.9.*keep_sampling_mask=false, as"):
        resumed(state(), before, now)
    same = state()
    assert resumed(same, before, before) is same
    assert resumed(NOTHING_YET, before, now) is NOTHING_YET, "nothing was sampled yet"
