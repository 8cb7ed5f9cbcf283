"""Sampling masks and expert ids with the packed tokens: nothing is lost, moved or made up."""

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.errors import DataError
from jaxrl_async.trainer.data_metrics import group_measures
from jaxrl_async.trainer.learning_settings import MicroSizes
from jaxrl_async.trainer.pack import micro_batches, pack_groups
from jaxrl_async.trainer.token_columns import (
    NO_MASK,
    Routing,
    SamplerColumns,
    SparseBits,
    sequence_masks,
)
from jaxrl_async.types import Episode, EpisodeGroup, KeptTokens, Prompt, Score, StopReason, Ticket

pytestmark = pytest.mark.full

VOCAB, ROUTING = 29, Routing(layers=3, chosen=2, dtype=np.int8)
PROMPT = Prompt(prompt_id=0, position=0, token_ids=np.zeros(1, np.int32), text="", reference="")


def kept_of(mask: np.ndarray) -> KeptTokens:
    """[sampled, vocab] bool as the sampler gives it."""
    starts = np.concatenate([[0], np.cumsum(mask.sum(axis=1))]).astype(np.int32)
    return KeptTokens(ids=np.nonzero(mask)[1].astype(np.int32), starts=starts)


def episode_of(sampled: list[bool], seed: int) -> tuple[Episode, np.ndarray]:
    """An episode with masks and experts, and its masks as [sampled, vocab] bool."""
    rng = np.random.default_rng(seed)
    flags = np.array([False, *sampled])
    tokens = rng.integers(0, VOCAB, len(flags)).astype(np.int32)
    mask = rng.random((flags.sum(), VOCAB)) < 0.3
    mask[np.arange(len(mask)), tokens[flags]] = True
    episode = Episode(
        token_ids=tokens,
        drawn=flags,
        logprobs=np.zeros(len(flags), np.float32),
        versions=np.where(flags, 1, -1).astype(np.int32),
        stop=StopReason.EOS,
        kept=kept_of(mask),
        expert_ids=rng.integers(-1, 9, (len(tokens), *ROUTING[:2])).astype(np.int8),
    )
    return episode, mask


def group_of(*episodes: Episode) -> EpisodeGroup:
    return EpisodeGroup(
        prompt=PROMPT,
        episodes=episodes,
        scores=tuple(Score(reward=0.0) for _ in episodes),
        ticket=Ticket(group=0, version=0),
    )


def packed(
    *episodes: Episode,
    mask_vocab: int | None = VOCAB,
    routing: Routing | None = ROUTING,
    **kw: Any,
) -> Any:
    advantages = [[np.ones(len(e.token_ids), np.float32) for e in episodes]]
    columns = SamplerColumns(mask_vocab, routing)
    return pack_groups([group_of(*episodes)], advantages, 16, sampler_columns=columns, **kw)


def test_a_mask_without_ids_leaves_no_token_out():
    kept = KeptTokens(ids=np.array([1, 9], np.int32), starts=np.array([0, 0, 2, 2], np.int32))
    sparse = SparseBits(kept, np.arange(3)[None], 16)
    bits = np.unpackbits(np.asarray(sparse)[0], axis=-1, bitorder="little").astype(bool)
    assert bits[[0, 2]].all() and np.flatnonzero(bits[1]).tolist() == [1, 9]
    episode, _ = episode_of([True] * 3, 0)
    report = group_measures([group_of(replace(episode, kept=kept))], 1)
    assert report["rollout/kept_mean"] == 2.0, "of the tokens that were not sampled from all"


def test_a_packed_step_holds_ids_and_its_micro_batches_alone_are_made_bits():
    """As bits these 400 tokens of a vocabulary of 4 million would be 200 MB."""
    sampled, vocab = np.arange(400) > 0, 4_000_000
    ids = np.arange(399, dtype=np.int32) * 10_000
    episode = replace(
        episode_of([True] * 399, 0)[0],
        token_ids=np.concatenate([[0], ids]).astype(np.int32),
        kept=KeptTokens(ids=ids, starts=np.arange(400, dtype=np.int32)),
    )
    columns = SamplerColumns(mask_vocab=vocab)
    tracemalloc.start()
    batch = pack_groups([group_of(episode)], [[sampled.astype(np.float32)]], 400, None, (), columns)
    parts = micro_batches(batch, MicroSizes((1,)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2e6 and parts[0].kept.nbytes == 400 * vocab // 8
    few = replace(parts[0].kept, index=parts[0].kept.index[:, :3])
    bits = np.unpackbits(np.asarray(few)[0], axis=-1, bitorder="little")
    assert bits[0].all() and np.flatnonzero(bits[1]).tolist() == [0]
    assert np.flatnonzero(bits[2]).tolist() == [10_000]


turns = st.lists(st.lists(st.booleans(), max_size=15), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(flags_of=turns, rows=st.integers(1, 3))
def test_masks_and_experts_arrive_where_their_tokens_are(flags_of, rows):
    made = [episode_of(flags, i) for i, flags in enumerate(flags_of)]
    parts = micro_batches(packed(*(e for e, _ in made)), MicroSizes((rows,)))
    seen = 0
    for part in parts:
        assert part.kept.shape == (rows, 16, 4) and part.kept.dtype == np.uint8
        bits = np.unpackbits(np.asarray(part.kept), axis=-1, bitorder="little")[..., :VOCAB].astype(
            bool
        )
        assert bits[~part.mask].all(), "nothing is refused where nothing was sampled"
        assert part.expert_ids.dtype == np.int8
        assert (part.expert_ids[part.segment_ids == 0] == -1).all()
        for index, (episode, mask) in enumerate(made):
            row, column = np.nonzero(part.sequence_ids == index)
            if not len(row):
                continue
            seen += 1
            np.testing.assert_array_equal(bits[row, column][episode.drawn], mask)
            np.testing.assert_array_equal(part.expert_ids[row, column], episode.expert_ids)
    assert seen == len(made)


def test_what_is_sampled_but_not_trained_keeps_its_mask():
    episode, mask = episode_of([True, True, False, True], 0)
    batch = packed(episode, masks=[[np.array([0, 0, 1, 0, 1], bool)]])
    bits = np.unpackbits(np.asarray(batch.kept)[0, :5], axis=-1, bitorder="little")[:, :VOCAB]
    np.testing.assert_array_equal(bits[episode.drawn], mask)


def test_without_the_switches_nothing_is_packed():
    episode, _ = episode_of([True], 0)
    plain = Episode(
        **{n: getattr(episode, n) for n in ("token_ids", "drawn", "logprobs", "versions", "stop")}
    )
    batch = packed(plain, mask_vocab=None, routing=None)
    assert batch.kept is None and batch.expert_ids is None
    assert all(
        b.kept is None and b.expert_ids is None for b in micro_batches(batch, MicroSizes((2,)))
    )
    assert "rollout/kept_mean" not in group_measures([group_of(plain)], 1)
    with pytest.raises(DataError, match=r"1 sampled tokens has sampling masks for no.*set it"):
        packed(plain)


def test_the_mean_number_of_kept_tokens_is_reported():
    (first, a), (second, b) = episode_of([True, True], 0), episode_of([True], 1)
    values = group_measures([group_of(first, second)], 1)
    assert values["rollout/kept_mean"] == pytest.approx((a.sum() + b.sum()) / 3)


def test_a_set_of_impossible_ids_has_all_other_bits():
    kept = KeptTokens(
        ids=np.array([1, 4, 2], np.int32),
        starts=np.array([0, 2, 3], np.int32),
        which=np.array([0, 1, 0], np.int32),
        left_out=np.array([True, False]),
        vocab=VOCAB,
    )
    bits = np.asarray(SparseBits(kept, np.array([[0, 1, 2, NO_MASK]]), VOCAB))
    found = np.unpackbits(bits, axis=-1, bitorder="little")[0, :, :VOCAB].astype(bool)
    others = ~np.isin(np.arange(VOCAB), [1, 4])
    wanted = [others, np.arange(VOCAB) == 2, others, np.ones(VOCAB, bool)]
    assert found.tolist() == [row.tolist() for row in wanted]


def test_masks_that_do_not_fit_are_refused():
    tokens, sampled = np.array([3, 4, 5], np.int32), np.array([False, True, True])
    mask = np.ones((2, VOCAB), bool)
    with pytest.raises(DataError, match="2 sampled tokens has sampling masks for 1 tokens"):
        sequence_masks(kept_of(mask[:1]), tokens, sampled, VOCAB)
    with pytest.raises(DataError, match="ids from 0 to 28, but the vocabulary has 8"):
        sequence_masks(kept_of(mask), tokens, sampled, 8)
    twice = KeptTokens(ids=np.array([4, 4, 5], np.int32), starts=np.array([0, 2, 3], np.int32))
    with pytest.raises(DataError, match="out of order or twice"):
        sequence_masks(twice, tokens, sampled, VOCAB)
    mask[1, 5] = False
    with pytest.raises(DataError, match="token 5 at index 2 of an episode was sampled, but its"):
        sequence_masks(kept_of(mask), tokens, sampled, VOCAB)


def test_experts_that_do_not_fit_are_refused_and_missing_ones_are_chosen_freely():
    (first, _), (second, _) = episode_of([True, True], 0), episode_of([True], 1)
    short = replace(second, expert_ids=first.expert_ids)
    with pytest.raises(DataError, match=r"of 2 tokens has expert ids of shape \(3, 3, 2\)"):
        packed(first, short)
    pair = (np.arange(4, dtype=np.int32), np.array([False, True, True, True]))
    batch = packed(first, replace(second, expert_ids=None), pairs=[pair])
    np.testing.assert_array_equal(
        batch.expert_ids[batch.sequence_ids == 0], first.expert_ids.reshape(3, 3, 2)
    )
    assert (batch.expert_ids[batch.sequence_ids != 0] == -1).all()
