import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.errors import DataError
from jaxrl_async.trainer.learning_settings import MicroSizes
from jaxrl_async.trainer.pack import fits, micro_batches, pack, pack_groups, pack_pairs
from jaxrl_async.trainer.prefix_plan import first_fit_decreasing
from jaxrl_async.types import (
    NOT_DRAWN,
    Episode,
    EpisodeGroup,
    PackedBatch,
    Prompt,
    Score,
    StopReason,
    Ticket,
)

PROMPT = Prompt(prompt_id=0, position=0, token_ids=np.zeros(1, np.int32), text="", reference="")
OPTIONAL = ("kept", "expert_ids", "offsets", "image_begins", "embeddings", "task_ids")
"""See test_token_columns.py, test_contexts.py, parity/test_vision.py."""
FIELDS = tuple(name for name in PackedBatch.__dataclass_fields__ if name not in OPTIONAL)


def episode_of(flags: list[bool], seed: int) -> Episode:
    rng = np.random.default_rng(seed)
    mask = np.array([False, *flags])
    return Episode(
        token_ids=rng.integers(1, 1000, len(mask)).astype(np.int32),
        drawn=mask,
        logprobs=np.where(mask, -rng.random(len(mask)), 0).astype(np.float32),
        versions=np.where(mask, rng.integers(0, 9, len(mask)), NOT_DRAWN).astype(np.int32),
        stop=StopReason.EOS,
    )


def group_of(episodes: list[Episode], number: int = 0) -> EpisodeGroup:
    return EpisodeGroup(
        prompt=PROMPT,
        episodes=tuple(episodes),
        scores=tuple(Score(reward=0.0) for _ in episodes),
        ticket=Ticket(group=number, version=0),
    )


turns = st.lists(
    st.booleans(), min_size=0, max_size=15
)  # any multi-turn mask after one prompt token
groups = st.lists(st.lists(turns, min_size=1, max_size=4), min_size=1, max_size=5)


def sampled_groups(
    masks: list[list[list[bool]]],
) -> tuple[list[EpisodeGroup], list[list[np.ndarray]]]:
    made = [
        group_of([episode_of(m, 97 * g + i) for i, m in enumerate(members)], g)
        for g, members in enumerate(masks)
    ]
    advantages = [
        [
            np.where(e.drawn, 0.5 + i + 10 * g, 0).astype(np.float32)
            for i, e in enumerate(group.episodes)
        ]
        for g, group in enumerate(made)
    ]
    return made, advantages


def unpacked(batches: list[PackedBatch], index: int) -> dict[str, np.ndarray]:
    """Every field of one sequence, wherever it lies."""
    found = [(b, *np.nonzero(b.sequence_ids == index)) for b in batches]
    (only,) = [f for f in found if len(f[1])]
    batch, rows, columns = only
    assert len(set(rows)) == 1 and (np.diff(columns) == 1).all(), "a sequence is one run in one row"
    return {name: getattr(batch, name)[rows, columns] for name in FIELDS}


@pytest.mark.full
@settings(max_examples=80, deadline=None)
@given(masks=groups, rows=st.integers(1, 4))
def test_what_is_packed_equals_what_was_sampled_token_for_token(masks, rows):
    made, advantages = sampled_groups(masks)
    batch = pack_groups(made, advantages, 16)
    parts = micro_batches(batch, MicroSizes((rows,)))
    assert all(b.token_ids.shape == (rows, 16) for b in parts)
    episodes = [e for g in made for e in g.episodes]
    flat = [a for of_group in advantages for a in of_group]
    assert (
        sum(b.num_tokens for b in parts) == sum(e.num_drawn for e in episodes) == batch.num_tokens
    )
    for index, (episode, values) in enumerate(zip(episodes, flat, strict=True)):
        got = unpacked(parts, index)
        np.testing.assert_array_equal(got["token_ids"], episode.token_ids)
        np.testing.assert_array_equal(got["mask"], episode.drawn)
        np.testing.assert_array_equal(got["behavior_logprobs"], episode.logprobs)
        np.testing.assert_array_equal(got["versions"], episode.versions)
        np.testing.assert_array_equal(got["advantages"], values)
        np.testing.assert_array_equal(got["positions"], np.arange(len(values)))
        assert len(set(got["segment_ids"].tolist())) == 1
    numbers = [g for g, group in enumerate(made) for _ in group.episodes]
    for index, number in enumerate(numbers):
        assert set(unpacked(parts, index)["group_ids"].tolist()) == {number}


@pytest.mark.full
@settings(max_examples=80, deadline=None)
@given(masks=groups)
def test_padding_is_empty_and_segments_of_a_row_are_numbered_from_one(masks):
    batch = pack_groups(*sampled_groups(masks), 16)
    padding = batch.segment_ids == 0
    np.testing.assert_array_equal(padding, batch.sequence_ids == -1)
    np.testing.assert_array_equal(padding, batch.group_ids == -1)
    assert not batch.mask[padding].any() and (batch.versions[~batch.mask] == NOT_DRAWN).all()
    assert (batch.behavior_logprobs[~batch.mask] == 0).all() and (
        batch.advantages[~batch.mask] == 0
    ).all()
    for row in batch.segment_ids:
        used = row[row > 0]
        assert (
            sorted(set(used.tolist())) == list(range(1, used.max() + 1))
            and (np.diff(used) >= 0).all()
        )
    firsts = (batch.positions == 0) & ~padding
    assert not batch.mask[firsts].any()


@given(masks=groups)
@settings(max_examples=30, deadline=None)
def test_packing_is_deterministic_and_no_row_could_take_a_later_one(masks):
    made, advantages = sampled_groups(masks)
    first, second = pack_groups(made, advantages, 16), pack_groups(made, advantages, 16)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    used = (first.segment_ids > 0).sum(axis=1)
    assert all(a + b > 16 for i, a in enumerate(used) for b in used[i + 1 :])


def first_row_with_room(lengths: list[int], row_length: int) -> list[list[int]]:
    """First-fit-decreasing by its definition: every row is looked at."""
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        used = (sum(lengths[i] for i in row) for row in rows)
        row = next((r for r, n in enumerate(used) if n + lengths[index] <= row_length), len(rows))
        rows += [[]] if row == len(rows) else []
        rows[row].append(index)
    return rows


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(0, 20), max_size=70), more=st.integers(0, 9))
def test_each_goes_into_the_first_row_that_has_room_for_it(lengths, more):
    row_length = max(lengths, default=1) + more
    assert first_fit_decreasing(lengths, row_length) == first_row_with_room(lengths, row_length)


def test_types_are_those_of_the_carrier():
    batch = pack_groups(*sampled_groups([[[True, False, True]]]), 8)
    wanted = {
        "mask": np.bool_,
        "supervised": np.bool_,
        "behavior_logprobs": np.float32,
        "advantages": np.float32,
    }
    for name in FIELDS:
        assert getattr(batch, name).dtype == wanted.get(name, np.int32), name
    for part in micro_batches(batch, MicroSizes((3,))):
        for name in FIELDS:
            assert getattr(part, name).dtype == getattr(batch, name).dtype


def test_an_episode_longer_than_a_row_is_refused_and_does_not_fit():
    group = group_of([episode_of([True] * 8, 0)])
    advantages = [[np.zeros(9, np.float32)]]
    assert fits(group, 9) and not fits(group, 8)
    assert pack_groups([group], advantages, 9).num_tokens == 8
    with pytest.raises(DataError, match="9 tokens, more than a row of 8"):
        pack_groups([group], advantages, 8)


def test_a_mask_takes_tokens_out_of_what_is_trained():
    made, advantages = sampled_groups([[[True, True], [True, True]]])
    nothing, half = np.zeros(3, bool), np.array([False, True, False])
    batch = pack_groups(made, advantages, 8, masks=[[nothing, half]])
    assert batch.num_tokens == 1
    np.testing.assert_array_equal(unpacked([batch], 1)["mask"], half)
    assert (batch.advantages[~batch.mask] == 0).all()


def test_a_first_token_cannot_be_trained():
    with pytest.raises(DataError, match="first token"):
        pack_pairs([(np.arange(3, dtype=np.int32), np.ones(3, bool))], 8)


def test_pairs_are_packed_with_their_masks():
    tokens, mask = np.array([5, 6, 7], np.int32), np.array([False, False, True])
    batch = pack_pairs([(tokens, mask), (tokens[:2], mask[1:])], 8)
    assert batch.token_ids.tolist() == [[5, 6, 7, 5, 6, 0, 0, 0]]
    assert batch.mask.tolist() == [[False, False, True, False, True, False, False, False]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 2, 2, 0, 0, 0]]
    assert batch.group_ids.tolist() == [[0, 0, 0, 1, 1, -1, -1, -1]], "each a group of its own"


def test_nothing_to_pack_gives_one_empty_micro_batch():
    (only,) = micro_batches(pack([], 8), MicroSizes((2,)))
    assert only.token_ids.shape == (2, 8) and only.num_tokens == 0


def test_worked_answers_are_groups_of_their_own_behind_those_of_the_step():
    groups = [group_of([episode_of([True] * 3, 1)] * 2), group_of([episode_of([True] * 2, 2)])]
    pair = np.arange(4, dtype=np.int32), np.array([False, True, True, True])
    batch = pack_groups(groups, None, 8, pairs=[pair, pair])
    of = {
        int(s): int(g) for s, g in zip(batch.sequence_ids.flat, batch.group_ids.flat, strict=True)
    }
    assert {s: g for s, g in of.items() if s >= 0} == {0: 0, 1: 0, 2: 1, 3: 2, 4: 3}
