"""Pieces cover what each process needs, once; any mesh's arrays come out on any other."""

import math
import threading

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_rig import host_tree, on_trainer, same_bits, target_of

from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.errors import WeightsError
from jaxrl_async.remote.weights.host_sums import host_sum
from jaxrl_async.remote.weights.locations import (
    HeldShard,
    Holder,
    merged_offers,
    offer_json,
    read_locations,
)
from jaxrl_async.remote.weights.pieces import plan_pieces
from jaxrl_async.remote.weights.transport_choice import make_fetching, make_offering
from jaxrl_async.weights.host_reshard import cut, inside, intersection, volume
from jaxrl_async.weights.manifest import Manifest


def grid(shape, counts):
    """Equal parts of an array along every axis."""
    boxes = [()]
    for size, count in zip(shape, counts, strict=True):
        step = size // count
        boxes = [(*b, (n * step, (n + 1) * step)) for b in boxes for n in range(count)]
    return boxes


@st.composite
def layouts(draw):
    """(shape, the trainer's parts along each axis, the sampler's)."""
    axes = draw(st.lists(st.sampled_from([1, 2, 4, 6, 12]), max_size=4))
    parts = [draw(st.tuples(*[st.sampled_from([1, 2]) for _ in axes])) for _ in range(2)]
    fits = [[math.gcd(size, n) for size, n in zip(axes, p, strict=True)] for p in parts]
    return tuple(axes), fits[0], fits[1]


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(
    st.lists(layouts(), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 200),
    st.data(),
)
def test_pieces_cover_every_target_once_and_come_from_a_holder_that_has_them(
    arrays, num_holders, piece_bytes, data
):
    manifest = Manifest(entries=tuple((str(n), a[0], "float32") for n, a in enumerate(arrays)))
    shards = [[] for _ in range(num_holders)]
    for number, (shape, source, _) in enumerate(arrays):
        for box in grid(shape, source):
            owners = data.draw(st.sets(st.integers(0, num_holders - 1), min_size=1))
            for owner in owners:
                shards[owner].append(HeldShard(array=number, box=box, checksum=0))
    holders = [Holder(shards=tuple(s)) for s in shards]
    targets = [
        (number, box)
        for number, (shape, _, target) in enumerate(arrays)
        for box in grid(shape, target)
    ]
    counts = [np.zeros(shape, int) for shape, _, _ in arrays]
    for piece in plan_pieces(manifest, holders, targets, piece_bytes):
        whole = tuple((0, n) for n in arrays[piece.array][0])
        counts[piece.array][inside(piece.box, whole)] += 1
        assert piece.num_bytes == 4 * volume(piece.box) <= max(piece_bytes, 4)
        held = [s.box for s in holders[piece.holder].shards if s.array == piece.array]
        assert any(intersection(piece.box, box) == piece.box for box in held)
        assert any(n == piece.array and intersection(piece.box, b) == piece.box for n, b in targets)
    assert all((count == 1).all() for count in counts)


def test_a_shard_that_several_processes_hold_is_sent_by_the_one_with_less_to_send():
    manifest = Manifest(entries=(("a", (4,), "float32"), ("b", (4,), "float32")))
    both = tuple(HeldShard(array=n, box=((0, 4),), checksum=0) for n in range(2))
    pieces = plan_pieces(
        manifest, [Holder(shards=both), Holder(shards=both)], [(0, ((0, 4),)), (1, ((0, 4),))]
    )
    assert [piece.holder for piece in pieces] == [0, 1]


def test_cutting_keeps_the_order_of_the_array():
    numbers = np.arange(2 * 3 * 5).reshape(2, 3, 5)
    whole = ((0, 2), (0, 3), (0, 5))
    parts = [numbers[inside(box, whole)].reshape(-1) for box in cut(whole, 7)]
    assert np.array_equal(np.concatenate(parts), np.arange(30))
    assert max(map(len, parts)) <= 7


@pytest.fixture(scope="module")
def offered():
    tree = host_tree()
    offering = make_offering(RemoteSection(transfer="tcp"), run="pieces")
    yield tree, offering
    offering.close()


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((2, 2), (1, 4)),
        ((2, 2), (1, 1)),
        ((4, 1), (1, 2)),
        ((1, 4), (2, 2)),  # repeated along fsdp
        ((1, 1), (4, 1)),  # replicated
    ],
)
def test_any_mesh_to_any_other_bit_for_bit(offered, source, target):
    tree, offering = offered
    where = offering.offer(0, on_trainer(tree, *source))
    wanted = target_of(tree, *target)
    fetching = make_fetching(RemoteSection(transfer="tcp"), wanted)
    got = fetching.fetch(0, where, [offering.address], threading.Event())
    assert same_bits(got.params, tree)
    shardings = jax.tree.map(lambda x: x.sharding, got.params)
    assert shardings == jax.tree.map(lambda x: x.sharding, wanted)
    # whatever the number of devices that hold an array, it is fetched once
    assert got.num_bytes == sum(x.nbytes for x in jax.tree.leaves(tree))
    assert got.source == offering.address
    fetching.close()
    offering.withdraw(0)


def split_offer(where, num_holders):
    """The offer of one process as that of several, each with a part of the shards."""
    one = read_locations(where)
    shards = one.holders[0].shards
    return [
        offer_json(
            one.version,
            one.manifest,
            [Holder(shards=shards[n::num_holders], address=one.holders[0].address)],
        )
        for n in range(num_holders)
    ]


def test_a_trainer_over_several_processes_offers_its_parts_together(offered):
    tree, offering = offered
    parts = split_offer(offering.offer(3, on_trainer(tree)), 3)
    fetching = make_fetching(RemoteSection(transfer="tcp"), target_of(tree, 1, 4))
    with pytest.raises(WeightsError, match="Every process of the trainer must offer its part"):
        fetching.fetch(3, parts[0], [offering.address], threading.Event())
    got = fetching.fetch(3, merged_offers(parts), [offering.address], threading.Event())
    assert same_bits(got.params, tree)
    parts[1]["holders"][0]["shards"][0][2] += 1
    whole = merged_offers([*parts[:1], *parts[2:], parts[1]])
    with pytest.raises(WeightsError, match="differ from the trainer's after 2 repeats"):
        fetching.fetch(3, whole, [offering.address], threading.Event())
    fetching.close()
    offering.withdraw(3)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.pop("arrays"),
        lambda w: w["arrays"][0].append(1),
        lambda w: w["arrays"][0].__setitem__(2, "no type"),
        lambda w: w["holders"][0]["shards"][0].__setitem__(1, [[0, 10**9]]),
        lambda w: w["holders"][0]["shards"][0].__setitem__(0, 99),
        lambda w: w["holders"][0]["shards"].pop(),
        lambda w: w["holders"].__setitem__(0, 7),
        lambda w: w.__setitem__("version", "x"),
    ],
)
def test_an_offer_that_makes_no_sense_is_refused_before_any_byte_moves(change):
    manifest = Manifest(entries=(("a", (4, 2), "bfloat16"),))
    shards = tuple(HeldShard(array=0, box=((n, n + 2), (0, 2)), checksum=1) for n in (0, 2))
    where = offer_json(1, manifest, [Holder(shards=shards, address="127.0.0.1:1")])
    assert read_locations(where).sums == (2,)
    change(where)
    with pytest.raises(WeightsError):
        read_locations(where)


def test_copies_of_one_shard_that_differ_between_processes_are_refused():
    manifest = Manifest(entries=(("a", (4,), "float32"),))
    offers = [
        offer_json(1, manifest, [Holder(shards=(HeldShard(array=0, box=((0, 4),), checksum=n),))])
        for n in (1, 2)
    ]
    with pytest.raises(WeightsError, match="copies of a"):
        merged_offers(offers)


def test_another_model_is_refused_by_the_first_array_that_differs(offered):
    tree, offering = offered
    where = offering.offer(4, on_trainer(tree))
    other = target_of({**tree, "head": tree["head"][:32]})
    fetching = make_fetching(RemoteSection(transfer="tcp"), other)
    with pytest.raises(WeightsError, match="'head'"):
        fetching.fetch(4, where, [offering.address], threading.Event())
    fetching.close()
    offering.withdraw(4)


def reference_sum(x):
    """The definition, word by word."""
    width = x.shape[-1] if x.shape else 1
    rows = x.reshape(-1, width).view(np.uint8).reshape(-1, width * x.itemsize)
    words = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 8))).view("<u8").reshape(-1)
    return sum(int(w) * (2 * n + 1) for n, w in enumerate(words)) % 2**64


@pytest.mark.full
@settings(max_examples=50, deadline=None)
@given(layouts(), st.sampled_from(["u1", "u2", "u4"]), st.sampled_from([1, 64, 300]), st.integers())
def test_checksums_of_parts_add_up_to_the_whole_however_it_is_cut(layout, dtype, wider, seed):
    shape, one, other = layout
    shape = (*shape[:-1], shape[-1] * wider) if shape else shape
    rng = np.random.default_rng(abs(seed))
    x = rng.integers(0, 200, shape).astype(dtype)
    whole = tuple((0, n) for n in shape)
    for counts in (one, other):
        parts = [host_sum(x[inside(b, whole)], b, shape) for b in grid(shape, counts)]
        assert sum(parts) % 2**64 == reference_sum(x)
    flipped = x.copy()
    flipped.reshape(-1)[rng.integers(x.size)] ^= 1 << rng.integers(8)
    assert host_sum(flipped, whole, shape) != reference_sum(x)
    if x.size * x.itemsize > 16 and x.size % 2 == 0:
        moved = np.roll(x.reshape(2, -1), 1, axis=0).reshape(shape)
        if not np.array_equal(moved, x):
            assert host_sum(moved, whole, shape) != reference_sum(x)
