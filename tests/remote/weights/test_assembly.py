"""Pieces that arrive in any order can be read as soon as they are there, and not before."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.remote.weights import assembly as assembly_module
from jaxrl_async.remote.weights import box_grid
from jaxrl_async.remote.weights.assembly import Assembly, OnDemand, Part
from jaxrl_async.remote.weights.pieces import WeightPiece
from jaxrl_async.weights.host_reshard import common, cut, volume
from jaxrl_async.weights.manifest import Manifest


def random_box(draw, shape):
    ends = [sorted(draw.sample(range(size + 1), 2)) for size in shape]
    return tuple((a, b) for a, b in ends)


def parts_of(draw, shape, dtype):
    """All of an array, or some disjoint shards of it."""
    counts = [draw.choice([n for n in (1, 2, 3) if size % n == 0]) for size in shape]
    boxes = [()]
    for size, count in zip(shape, counts, strict=True):
        step = size // count
        boxes = [(*b, (n * step, (n + 1) * step)) for b in boxes for n in range(count)]
    held = draw.sample(boxes, draw.randint(1, len(boxes)))
    sizes = [[b - a for a, b in box] for box in held]
    return [
        Part(array=0, box=box, data=np.zeros(size, dtype))
        for box, size in zip(held, sizes, strict=True)
    ]


def read(assembly, box):
    return assembly.read(0, box, 0.0, lambda: None)


@pytest.mark.full
@pytest.mark.parametrize("cell_bytes", [1, 40, 4 << 20])
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_what_can_be_read_is_what_has_arrived_element_by_element(cell_bytes, seed):
    """The reference: one flag for each element."""
    draw = random.Random(seed)
    shape = tuple(draw.choice([1, 2, 4, 6, 12]) for _ in range(draw.randint(1, 3)))
    manifest = Manifest(entries=(("w", shape, "int32"),))
    before, box_grid.PIECE_BYTES = box_grid.PIECE_BYTES, cell_bytes
    try:
        parts = parts_of(draw, shape, "u4")
        assembly = Assembly(manifest, parts)
    finally:
        box_grid.PIECE_BYTES = before
    most = draw.randint(1, 30)
    pieces = [box for part in parts for box in cut(part.box, most)]
    draw.shuffle(pieces)
    values = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
    flags = np.zeros(shape, bool)
    for number, box in enumerate(pieces * 2):
        if number == len(pieces) // 2 and draw.random() < 0.3:
            assembly.forget([0])
            flags[...] = False
        at = tuple(slice(a, b) for a, b in box)
        piece = WeightPiece(array=0, box=box, num_bytes=4 * volume(box), holder=0)
        assembly.view(piece)[...] = values[at]
        assembly.arrived(piece, 1)
        flags[at] = True
        for asked in (random_box(draw, shape), draw.choice(pieces), parts[0].box):
            if not volume(asked):
                continue
            there = tuple(slice(a, b) for a, b in asked)
            found = read(assembly, asked)
            assert (found is not None) == bool(flags[there].all())
            if found is not None:
                np.testing.assert_array_equal(found, values[there])


def test_a_scalar_can_be_read_once_it_is_there():
    assembly = Assembly(
        Manifest(entries=(("w", (), "float32"),)),
        [Part(array=0, box=(), data=np.zeros((), np.uint32))],
    )
    assert read(assembly, ()) is None
    assembly.arrived(WeightPiece(array=0, box=(), num_bytes=4, holder=0), 0)
    assert read(assembly, ()) == 0


@pytest.mark.full
@pytest.mark.parametrize("offset", [0, 1])
def test_passing_a_piece_on_looks_at_few_others(monkeypatch, offset):
    """Of 5,000 pieces (an array of 20 GB), exactly those pieces or others that lie across them."""
    count, rows = 5000, 2
    manifest = Manifest(entries=(("w", (count * rows, 1 << 19), "float32"),))
    data = np.broadcast_to(np.zeros((), np.uint32), (count * rows, 1 << 19))
    assembly = Assembly(manifest, [Part(array=0, box=((0, count * rows), (0, 1 << 19)), data=data)])
    looked = []
    monkeypatch.setattr(box_grid, "common", lambda a, b: looked.append(a) or common(a, b))
    boxes = [((n * rows, (n + 1) * rows), (0, 1 << 19)) for n in range(count)]
    for box in boxes[:-1]:
        assembly.arrived(WeightPiece(array=0, box=box, num_bytes=4 << 20, holder=0), 0)
    for (start, stop), columns in boxes[: count // 2 : 100]:
        assert read(assembly, ((start + offset, stop + offset), columns)) is not None
    assert len(looked) <= 25 * 4
    assert read(assembly, boxes[-1]) is None


def test_a_host_copy_that_failed_is_tried_again_after_a_while(monkeypatch, caplog):
    whole = Assembly.complete(Manifest(entries=()), [])
    outcomes, now = [MemoryError("no room"), whole], [100.0]

    def make():
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(assembly_module, "time", clock)
    held = OnDemand(make)
    assert held.get(lambda: None) is None
    assert held.get(lambda: None) is None and len(outcomes) == 1, "each piece asks: one copy"
    now[0] += 1.0
    assert held.get(lambda: None) is whole
    assert held.get(lambda: None) is whole, "it is made once"
    assert caplog.text.count("cannot be copied to the host: no room") == 1
