"""Headers of safetensors files: what is taken is true, what is not is a CheckpointError."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from jaxrl_async.errors import CheckpointError
from jaxrl_async.model import tensorfile
from jaxrl_async.model.tensorfile import Stored, parse_header, read_header

ARRAYS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros((0, 4), np.int8)}
WHOLE = save(ARRAYS, metadata={"format": "pt"})
(LENGTH,) = struct.unpack("<Q", WHOLE[:8])
HEADER, DATA = json.loads(WHOLE[8 : 8 + LENGTH]), WHOLE[8 + LENGTH :]


def file_of(described, data=DATA):
    text = described if isinstance(described, bytes) else json.dumps(described).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("files") / "x.safetensors"


def refusal(path, raw):
    path.write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    return str(caught.value)


def test_a_whole_file_is_described(path):
    path.write_bytes(WHOLE)
    assert read_header(path) == {
        "a": Stored(dtype="F32", shape=(2, 3), begin=0, end=24),
        "b": Stored(dtype="I8", shape=(0, 4), begin=HEADER["b"]["data_offsets"][0], end=24)
        if HEADER["b"]["data_offsets"][0]
        else Stored(dtype="I8", shape=(0, 4), begin=0, end=0),
    }


def entry(**changes):
    return {**HEADER, "a": {**HEADER["a"], **changes}}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "ends within its header"),
        (WHOLE[:7], "ends within its header"),
        (struct.pack("<Q", 2**63) + WHOLE[8:], "ends within its header"),
        (WHOLE[:-1], "its tensors need 24 bytes, but it has 23"),
        (WHOLE + b"\0", "its tensors need 24 bytes, but it has 25"),
        (file_of(b"[]"), "not a JSON object"),
        (file_of(b'{"a": 1, "a": 2}'), "duplicate name"),
        (file_of(b'{"\xff": 1}'), "not JSON"),
        (file_of({**HEADER, "a": 5}), "the entry of 'a' is not an object"),
        (file_of(entry(dtype="F31")), "the type 'F31'"),
        (file_of(entry(dtype=["F32"])), "the type"),
        (file_of(entry(shape=[2, True])), "no valid shape"),
        (file_of(entry(shape=[2, 3.0])), "no valid shape"),
        (file_of(entry(shape=[-2, -3])), "no valid shape"),
        (file_of(entry(shape=[2**62] * 32)), "does not fit its 24 bytes"),
        (file_of(entry(shape=[2, 4])), "does not fit its 24 bytes"),
        (file_of(entry(data_offsets=[24, 0])), "does not fit its -24 bytes"),
        (file_of(entry(data_offsets=[-24, 0])), "no valid shape and data_offsets"),
        (file_of(entry(data_offsets=[0, 24, 48])), "no valid shape and data_offsets"),
        (file_of({**HEADER, "c": HEADER["a"]}), "overlaps the previous one"),
        (file_of(entry(data_offsets=[8, 32]), DATA + bytes(8)), "leaves a gap before"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_is_no_whole_file_is_refused_in_words(path, raw, message):
    assert message in refusal(path, raw)


def test_a_header_that_is_too_long_is_not_read(path, monkeypatch):
    monkeypatch.setattr(tensorfile, "MAX_HEADER_BYTES", LENGTH - 1)
    assert f"a header of {LENGTH} bytes" in refusal(path, WHOLE)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
    | st.sampled_from(["F32", "I8", "BF16", "F4", 0, 24, 2**63, [0, 24], [2, 3]]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)  # fmt: skip


@st.composite
def mutated_headers(draw):
    """The header with values put in at a few offsets."""
    described = json.loads(json.dumps(HEADER))
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(["a", "b", "c", "__metadata__"]))
        key = draw(st.sampled_from(["dtype", "shape", "data_offsets", "more", None]))
        if key is None or not isinstance(described.get(name), dict):
            described[name] = draw(VALUES | st.just(HEADER["a"]))
        else:
            described[name][key] = draw(VALUES)
    return file_of(described, draw(st.sampled_from([DATA, DATA[:-1], DATA * 2, b""])))


@st.composite
def mutated_bytes(draw):
    """The file with bytes changed, and cut."""
    raw = bytearray(WHOLE)
    for _ in range(draw(st.integers(1, 4))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw[: draw(st.integers(0, len(raw)) | st.just(len(raw)))])


@given(st.binary(max_size=80) | mutated_headers() | mutated_bytes())
def test_fuzz_any_bytes_are_described_truly_or_refused(path, raw):
    path.write_bytes(raw)
    try:
        tensors = read_header(path)
    except CheckpointError as error:
        assert str(path) in str(error) and len(str(error)) < 1000 + len(str(path))
        return
    try:
        with safe_open(path, framework="numpy") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError:  # e.g. metadata that is no text: model/hf.py tells that
        return
    assert shapes == {name: tensor.shape for name, tensor in tensors.items()}
    assert sum(t.end - t.begin for t in tensors.values()) <= len(raw)


@given(st.binary(max_size=200), st.integers(0, 2**64))
def test_fuzz_any_header_is_parsed_or_refused(header, data_bytes):
    try:
        parse_header(header, data_bytes, Path("x"))
    except CheckpointError as error:
        assert str(error).startswith("x: not a complete safetensors file: ")
