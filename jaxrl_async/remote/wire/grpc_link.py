"""Shared parts of both sides of a gRPC connection. Frames are sent unchanged over one bidirectional
streaming call, without protocol buffers."""

import os
from collections.abc import Iterator

from jaxrl_async.errors import printable
from jaxrl_async.remote.wire.frames import FRAME_LIMIT
from jaxrl_async.remote.wire.session import WireSession

# gRPC installs fork() handlers by default and prints a line whenever they fail. No forked child of
# this package uses gRPC. It reads the variable on import, so all modules import it from here
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
import grpc as grpc

SERVICE = "jaxrl_async.Wire"
METHOD = "Session"
PATH = f"/{SERVICE}/{METHOD}"

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", FRAME_LIMIT),  # refused before memory is allocated
    ("grpc.max_send_message_length", FRAME_LIMIT),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a few bytes could decompress to many
    ("grpc.enable_http_proxy", 0),  # the environment's proxy is for the web
    ("grpc.use_local_subchannel_pool", 1),  # each attempt resolves and connects again
)


def pump_frames(incoming: Iterator[bytes], session: WireSession) -> None:
    """Pass incoming frames to a session until the stream ends; then report the end to it."""
    reason = f"{session.peer} has closed the connection"
    try:
        for frame in incoming:
            session.take(frame)
    except grpc.RpcError as error:
        reason = f"the connection with {session.peer} broke: {describe_error(error)}"
        error.__traceback__ = None  # a cycle with its frames, which only a collection would end
    session.lost(reason)


def describe_error(error: grpc.RpcError) -> str:
    """Return gRPC's description of an error."""
    if isinstance(error, grpc.Call):
        return printable(f"{error.details() or error.code()}")
    return str(error) or "the other side is gone"
