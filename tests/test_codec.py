"""Records as bytes: what comes back equals what went in, and nothing else comes out."""

import json
import tracemalloc
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from jaxrl_async import codec
from jaxrl_async.codec import Encoded, dumps, loads
from jaxrl_async.testing.fakes import make_group
from jaxrl_async.types import Drop, KeptTokens, StopReason, Ticket

ARRAYS = arrays.arrays(
    st.sampled_from([np.int32, np.float32, np.bool_, np.uint8, np.int64]),
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats()
    | st.text()
    | st.sampled_from([*StopReason, *Drop])
    | st.builds(Ticket, group=st.integers(0, 99), version=st.integers(0, 9))
    | st.builds(KeptTokens, ids=ARRAYS, starts=ARRAYS)
    | ARRAYS
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.just("!"), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(a, b) -> bool:
    if isinstance(a, np.ndarray):
        equal = np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        return a.dtype == b.dtype and a.shape == b.shape and equal
    if isinstance(a, KeptTokens):
        return same(a.ids, b.ids) and same(a.starts, b.starts)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    return type(a) is type(b) and (a == b or a != a)


@pytest.mark.full
@given(TREES)
def test_what_goes_in_comes_out(tree):
    assert same(tree, loads(dumps(tree)))


def test_a_group_comes_back_whole():
    group = make_group(Ticket(group=3, version=1), [1, 1, 2], [2])
    back = loads(dumps((group,)))[0]
    assert back.ticket == group.ticket and back.scores == group.scores
    assert back.oldest_version == 1 and back.newest_version == 2
    for mine, theirs in zip(group.episodes, back.episodes, strict=True):
        assert same(mine.token_ids, theirs.token_ids) and same(mine.versions, theirs.versions)
        assert mine.stop is theirs.stop


@dataclass(frozen=True)
class Stranger:
    x: int


def test_only_kinds_that_the_reader_names_come_out():
    data = dumps(Stranger(1))
    assert loads(data, [Stranger]) == Stranger(1)
    with pytest.raises(ValueError, match="Stranger"):
        loads(data)
    for thing in (object(), {1, 2}, {1: 2}, b"raw"):
        with pytest.raises(TypeError, match="cannot be saved"):
            dumps(thing)


@given(st.binary(max_size=60), st.integers(0, 80), st.integers(0, 255))
def test_other_bytes_are_refused_and_nothing_worse(raw, place, value):
    good = dumps({"a": np.arange(4), "b": Ticket(group=1, version=2)}).copy()
    good[place % len(good)] = value
    for data in (np.frombuffer(raw, np.uint8), good, good[: place % len(good)]):
        try:
            loads(data)
        except ValueError as error:
            assert not isinstance(error, json.JSONDecodeError) or str(error)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "int4"])
def test_numbers_that_numpy_has_no_name_for_come_back_as_they_were(name):
    array = np.arange(6).reshape(2, 3).astype(getattr(ml_dtypes, name))
    for part in (array, array.T, array[:, ::2], array[:0], array[0, 0, ...]):
        back = loads(dumps({"kv": part}))["kv"]
        assert back.dtype == part.dtype and back.shape == part.shape
        assert back.tobytes() == part.tobytes()


def written(text: str) -> np.ndarray:
    """Bytes as dumps lays them out, with this JSON and eight bytes of arrays."""
    head = np.array([len(text)], "<u8").tobytes()
    return np.frombuffer(head + text.encode() + bytes(8), np.uint8)


@pytest.mark.parametrize("dtype", ["O", "V8", "<M8[s]", "i4,i4", "float", "nonsense", "object_"])
def test_an_array_of_another_type_than_is_written_is_refused(dtype):
    with pytest.raises(ValueError, match="not a record"):
        loads(written(json.dumps({"!": "array", "dtype": dtype, "shape": [1]})))


def test_arrays_that_could_not_be_read_again_are_not_written():
    for array in (np.zeros(2, "i4,i4"), np.array([object()]), np.zeros(2, "M8[s]")):
        with pytest.raises(TypeError, match="cannot be saved"):
            dumps(array)


@pytest.mark.parametrize("opens", ["[", '{"a":'])
def test_bytes_that_are_nested_without_end_are_refused(opens):
    text = opens * 50_000 + "1" + {"[": "]"}.get(opens, "}") * 50_000
    with pytest.raises(ValueError, match="not a record"):
        loads(written(text))


@pytest.mark.full
@given(st.dictionaries(st.text() | st.just("!"), TREES, max_size=4))
def test_what_is_encoded_once_is_loaded_as_a_plain_mapping(mapping):
    tree = {"before": np.arange(3), "where": Encoded(mapping), "after": np.ones(2)}
    back = loads(dumps(tree))
    assert type(back["where"]) is dict
    expected = loads(dumps({**tree, "where": mapping}))
    assert dumps(back).tobytes() == dumps(expected).tobytes()


def test_a_mapping_in_many_messages_is_converted_once(monkeypatch):
    converted = []
    encode = codec._encoded
    monkeypatch.setattr(codec, "_encoded", lambda v, a: converted.append(v) or encode(v, a))
    shared = Encoded({"holders": [{"shards": [[n, [[0, 1]], n]]} for n in range(100)]})
    for number in range(50):
        dumps({"version": number, "where": shared})
    assert shared["holders"][7]["shards"] == [[7, [[0, 1]], 7]] and len(shared) == 1
    assert len(converted) < 2000, "one of these mappings takes 900"


def test_encoded_within_encoded_takes_no_room_of_its_own():
    tree = Encoded({"a": np.zeros(1 << 20, np.uint8)})
    for _ in range(20):
        tree = Encoded({"a": tree})
    data = dumps(tree)
    tracemalloc.start()
    loads(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * data.size, "a stranger's levels would multiply it"


@pytest.mark.full
@pytest.mark.parametrize(
    "of",
    [
        {"!": "array", "dtype": "<f8", "shape": [1, 2]},
        {"!": "array", "dtype": "|u1", "shape": []},
        {"!": "array", "dtype": "|u1", "shape": [4]},
        {"!": "tuple", "items": []},
        7,
    ],
)
def test_what_is_encoded_wrongly_is_refused(of):
    text = json.dumps({"!": "encoded", "of": of}).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(range(200, 232))
    with pytest.raises(ValueError, match=r"record|JSON|value"):
        loads(np.frombuffer(data, np.uint8))
