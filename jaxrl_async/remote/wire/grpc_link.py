"""What both sides of a gRPC connection share. Frames travel as they are: one call, streamed both
ways, without protocol buffers."""

import os
from collections.abc import Iterator

from jaxrl_async.errors import printable
from jaxrl_async.remote.wire.frames import FRAME_LIMIT
from jaxrl_async.remote.wire.session import WireSession

# gRPC takes part in fork() unless told not to, and prints a line whenever it cannot; no forked
# child of this package uses it. It reads this when it is imported, so all import it from here
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
import grpc as grpc

SERVICE = "jaxrl_async.Wire"
METHOD = "Session"
PATH = f"/{SERVICE}/{METHOD}"

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", FRAME_LIMIT),  # refused before room is made for it
    ("grpc.max_send_message_length", FRAME_LIMIT),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: a few bytes could swell to many
    ("grpc.enable_http_proxy", 0),  # a proxy in the environment is meant for the web
    ("grpc.use_local_subchannel_pool", 1),  # each try resolves the name and connects anew
)


def pump_frames(incoming: Iterator[bytes], session: WireSession) -> None:
    """Give a session what comes until the stream ends; then tell it."""
    reason = f"{session.peer} has closed the connection"
    try:
        for frame in incoming:
            session.take(frame)
    except grpc.RpcError as error:
        reason = f"the connection with {session.peer} broke: {describe_error(error)}"
        error.__traceback__ = None  # a cycle with its frames, which only a collection would end
    session.stream_ended(reason)


def describe_error(error: grpc.RpcError) -> str:
    """Return gRPC's words for what went wrong."""
    if isinstance(error, grpc.Call):
        return printable(f"{error.details() or error.code()}")
    return str(error) or "the other side is gone"
