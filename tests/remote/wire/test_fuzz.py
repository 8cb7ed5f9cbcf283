"""Bytes that no peer should send: any of them ends the session or is refused, and nothing hangs."""

import queue
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_peer import completion

from jaxrl_async import codec
from jaxrl_async.remote.wire import handshake
from jaxrl_async.remote.wire.frames import (
    BEAT_FRAME,
    FRAME_BYTES,
    Bye,
    FrameInbox,
    Outbox,
    bye_frame,
)
from jaxrl_async.remote.wire.messages import MESSAGES, Answers, Hello, Live
from jaxrl_async.remote.wire.session import WireLimits, WireSession
from jaxrl_async.remote.wire.validation import check_fits

WAIT_S = 20.0
MESSAGE = codec.dumps(Answers(completions=(completion(5), completion(3)))).tobytes()
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert"]), st.integers(0, 10**6), st.integers(0, 255)
    ),
    min_size=1,
    max_size=4,
)


def edited(data: bytes, edits: list[tuple[str, int, int]]) -> bytes:
    """Change bytes, as a fault on the way or an attacker might."""
    changed = bytearray(data)
    for kind, where, value in edits:
        at = where % (len(changed) + 1)
        if kind == "flip" and at < len(changed):
            changed[at] ^= value or 1
        elif kind == "cut":
            del changed[at:]
        else:
            changed[at:at] = bytes([value])
    return bytes(changed)


def framed(*messages: bytes) -> list[bytes]:
    outbox = Outbox()
    for message in messages:
        outbox.put(memoryview(message))
    frames = []
    while outbox:
        frames.append(outbox.next_frame())
    return frames


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(0, 3))
def test_frames_carry_any_messages(small: list[bytes], larges: int) -> None:
    large = bytes(FRAME_BYTES + 7)
    messages = [*small, *[large] * larges, *small]
    inbox, got = FrameInbox(FRAME_BYTES * 2), []
    for frame in framed(*messages):
        got += [bytes(item) for item in inbox.take(frame) if not isinstance(item, Bye)]
        got += [b"" for _ in inbox.take(BEAT_FRAME)]
    assert got == messages


@pytest.mark.full
@given(EDITS)
def test_an_edited_message_is_refused_or_fits(edits: list[tuple[str, int, int]]) -> None:
    try:
        message = codec.loads(memoryview(edited(MESSAGE, edits)), MESSAGES)
        if isinstance(message, MESSAGES):
            check_fits(message)
    except ValueError:
        return  # anything else would end the thread that reads


JSON_TREES = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["!", "fields", "items", "dtype", "shape", "value", "kind"]),
            inner
            | st.sampled_from(
                ["array", "tuple", "mapping", "Live", "StopReason", "<i4", "<U9", "O"]
            ),
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(JSON_TREES)
def test_any_json_is_refused_or_fits(tree: object) -> None:
    text = codec.json.dumps(tree).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(16)
    try:
        message = codec.loads(memoryview(data), MESSAGES)
        if isinstance(message, MESSAGES):
            check_fits(message)
    except ValueError:
        return


@settings(max_examples=40)
@given(EDITS, st.integers(0, 3))
def test_an_edited_frame_ends_the_session_or_is_harmless(
    edits: list[tuple[str, int, int]], which: int
) -> None:
    frames = [
        *framed(MESSAGE, MESSAGE),
        BEAT_FRAME,
        bye_frame("done"),
        *framed(bytes(2 * FRAME_BYTES)),
    ]
    session = WireSession("peer", WireLimits(silence_s=30))
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    for kind in MESSAGES:
        session.on(kind, lambda message: None)
    session.on_end(ended.put)
    session.start()
    session.take(edited(frames[which], edits))
    session.lost("hung up")
    ended.get(timeout=WAIT_S)


@given(st.lists(st.binary(max_size=100), min_size=1, max_size=4), EDITS, st.booleans())
def test_a_handshake_admits_no_random_bytes(
    frames: list[bytes], edits: list[tuple[str, int, int]], greets: bool
) -> None:
    trainer = handshake.admit_sampler(b"secret")
    next(trainer)
    sampler = handshake.ask_to_join(b"secret", Hello(name="s"))
    first = edited(next(sampler), edits) if greets else frames[0]
    try:
        for frame in (first, *frames):
            trainer.send(frame)
    except (ValueError, handshake.JoinRefused):
        return
    except StopIteration:
        raise AssertionError("an unauthenticated peer was admitted") from None


def test_sizes_that_an_unauthenticated_peer_claims_cost_no_memory() -> None:
    """Sizes are believed only as far as bytes have come."""
    huge = (2**62).to_bytes(8, "little")
    claims = [
        bytes([2]) + huge + b"x",  # a large message
        bytes([1]) + (2**32 - 1).to_bytes(4, "little") + b"x",
    ]
    shape = b'{"!": "array", "dtype": "<i4", "shape": [%d, %d]}'
    arrays = [
        shape % (2**40, 1),
        shape % (2**40, 2**40),
        shape % (2**62, 2**62),
        shape % (10**30, 1),
    ]
    tracemalloc.start()
    for frame in claims:
        inbox = FrameInbox(256 << 20)
        try:
            list(inbox.take(frame))
            raise AssertionError("believed")
        except ValueError:
            pass
    for text in arrays:
        try:
            codec.loads(memoryview(len(text).to_bytes(8, "little") + text), MESSAGES)
            raise AssertionError("believed")
        except ValueError:
            pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_message_above_the_bound_is_refused_at_its_first_piece() -> None:
    inbox = FrameInbox(2 * FRAME_BYTES)
    first, *_ = framed(bytes(3 * FRAME_BYTES))
    try:
        list(inbox.take(first))
        raise AssertionError("taken")
    except ValueError as error:
        assert "remote.max_message_mib" in str(error)


def test_numbers_that_no_array_has() -> None:
    assert codec.loads(codec.dumps(Live(version=3)), MESSAGES) == Live(version=3)
    np.testing.assert_array_equal(codec.loads(codec.dumps(np.zeros((0, 3)))), np.zeros((0, 3)))
