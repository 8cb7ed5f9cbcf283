"""A sampler's end in a process of its own, driven by lines on its stdin.

python wire_peer.py WHERE MODE SILENCE_S
"""

import sys
import threading

import numpy as np

from jaxrl_async.remote.wire.client import dial
from jaxrl_async.remote.wire.messages import Answers, Hello, Live, Start
from jaxrl_async.remote.wire.secret import read_secret
from jaxrl_async.remote.wire.session import WireLimits
from jaxrl_async.types import Completion, StopReason


def completion(tokens: int) -> Completion:
    """Make a completion of this many tokens."""
    return Completion(
        request_id="g1/m0/t0",
        token_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.linspace(-1, 0, tokens, dtype=np.float32),
        versions=np.full(tokens, 7, np.int32),
        stop=StopReason.EOS,
    )


def main() -> None:
    """Join, say so, and do what the mode says until the session or stdin ends."""
    where, mode, silence_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
    session, welcome = dial(
        where,
        Hello(name=mode),
        secret=read_secret(),
        tls=None,
        limits=WireLimits(silence_s=silence_s, queue_bytes=1 << 20),
        timeout_s=20,
    )
    session.on_end(lambda reason: print(f"ended {reason}", flush=True))
    hold = threading.Event()
    if mode == "echo":
        session.on(
            Start, lambda m: session.send(Answers(completions=(completion(len(m.requests)),)))
        )
    elif mode == "slow":
        session.on(Start, lambda m: hold.wait() and None)
    elif mode == "torrent":
        threading.Thread(target=pour, args=(session,), daemon=True).start()
    print(f"joined {welcome.run}", flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            session.send(Live(version=99))
            session.end("it was told to")


def pour(session: object) -> None:
    """Send large messages without an end."""
    while True:
        session.send(Answers(completions=(completion(3_000_000),)))  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
