"""Compare carriers of the messages between a trainer and a sampler, in two processes on loopback.

    python benchmarks/wire.py [--quick] [--repeats 5] [--rounds 300]

A round is a Start of 64 requests of 200 tokens and the Answers with 64 completions of 300 tokens,
log-probs and versions; four rounds are under way at once. `session` is what a run uses: gRPC with
the codec, the checks of what comes, silence detection and bounds. The other rows carry the same
bytes with nothing around: `bytes` ready-made, `codec` encoded and decoded by both sides.
"""

import argparse
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import zmq
from common import Row, columns, options, parser, report, spread

from jaxrl_async import codec
from jaxrl_async.remote.wire.client import dial
from jaxrl_async.remote.wire.grpc_link import OPTIONS, grpc
from jaxrl_async.remote.wire.listener import Hub
from jaxrl_async.remote.wire.messages import MESSAGES, Answers, Hello, Start, Welcome
from jaxrl_async.remote.wire.session import WireLimits, WireSession
from jaxrl_async.types import Completion, Request, StopReason

REQUESTS, PROMPT, ANSWER, AT_ONCE = 64, 200, 300, 4
WAIT_S = 60.0
LIMITS = WireLimits()

Send = Callable[[bytes], None]
Take = Callable[[], bytes]


def make_start() -> Start:
    """Make a batch of requests."""
    rng = np.random.default_rng(0)
    return Start(
        requests=tuple(
            Request(
                request_id=f"g{number // 8}/m{number % 8}/t0",
                token_ids=rng.integers(0, 32_000, PROMPT, dtype=np.int32),
                max_new_tokens=512,
                stop_token_ids=(2,),
                key=(number // 8, number % 8),
            )
            for number in range(REQUESTS)
        )
    )


def make_answers() -> Answers:
    """Make the completions of a batch."""
    rng = np.random.default_rng(1)
    return Answers(
        completions=tuple(
            Completion(
                request_id=f"g{number // 8}/m{number % 8}/t0",
                token_ids=rng.integers(0, 32_000, ANSWER, dtype=np.int32),
                logprobs=-rng.random(ANSWER, dtype=np.float32),
                versions=np.full(ANSWER, 7, np.int32),
                stop=StopReason.EOS,
                latency_s=1.25,
            )
            for number in range(REQUESTS)
        )
    )


# ---- the carriers: each side sends bytes and takes bytes; a server's address ends with its port


def zmq_server() -> tuple[str, Send, Take]:
    """Listen with a ZeroMQ pair."""
    socket, link = _zmq_pair()
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    return f"127.0.0.1:{port}", *link


def zmq_client(address: str) -> tuple[Send, Take]:
    """Connect a ZeroMQ pair."""
    socket, link = _zmq_pair()
    socket.connect(f"tcp://{address}")
    return link


def _zmq_pair() -> tuple[Any, tuple[Send, Take]]:
    socket: Any = zmq.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
    socket.setsockopt(zmq.LINGER, 0)
    return socket, (lambda data: socket.send(data, copy=False), lambda: socket.recv())


def grpc_server() -> tuple[str, Send, Take]:
    """Listen with one gRPC call, streamed both ways."""
    outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    incoming: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def serve(frames: Iterator[bytes], context: object) -> Iterator[bytes]:
        threading.Thread(target=_drain, args=(frames, incoming, outgoing), daemon=True).start()
        yield from iter(outgoing.get, b"")

    server = grpc.server(ThreadPoolExecutor(2), options=OPTIONS)
    handlers = {"Carry": grpc.stream_stream_rpc_method_handler(serve)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Bench", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _KEPT.append(server)
    return f"127.0.0.1:{port}", outgoing.put, lambda: incoming.get(timeout=WAIT_S)


def grpc_client(address: str) -> tuple[Send, Take]:
    """Make the call."""
    outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    channel = grpc.insecure_channel(address, options=OPTIONS)
    call = channel.stream_stream("/Bench/Carry")(iter(outgoing.get, b""))
    _KEPT.append(channel)
    return outgoing.put, lambda: next(call)


_KEPT: list[object] = []
"""What must live as long as the process."""


def _drain(
    frames: Iterator[bytes],
    into: "queue.SimpleQueue[bytes]",
    outgoing: "queue.SimpleQueue[bytes]",
) -> None:
    """Take what comes; when the other process has ended, end what goes, too."""
    try:
        for frame in frames:
            into.put(frame)
    except grpc.RpcError:
        pass
    outgoing.put(b"")


SERVERS = {"zmq": zmq_server, "grpc": grpc_server}
CLIENTS = {"zmq": zmq_client, "grpc": grpc_client}

# ---- the sampler's process


def answer(carrier: str, content: str, address: str, rounds: int) -> None:
    """Be the sampler: answer so many Starts; print the CPU seconds that it took."""
    if carrier == "session":
        cpu_s = _answer_session(address, rounds)
    else:
        send, take = CLIENTS[carrier](address)
        answers, ready = make_answers(), codec.dumps(make_answers()).tobytes()
        send(b"joined")
        take()
        before_s = time.process_time()
        for _ in range(rounds):
            data = take()
            if content == "codec":
                codec.loads(memoryview(data), MESSAGES)
            send(codec.dumps(answers).tobytes() if content == "codec" else ready)
        take()  # the trainer has everything
        cpu_s = time.process_time() - before_s
    print(cpu_s, flush=True)
    os._exit(0)  # gRPC's threads wait for more


def _answer_session(address: str, rounds: int) -> float:
    answers, done, left = make_answers(), threading.Event(), [rounds]
    session, _ = dial(
        address, Hello(name="s"), secret=b"", tls=None, limits=LIMITS, timeout_s=WAIT_S
    )
    before_s = time.process_time()

    def on_start(message: Start) -> None:
        session.send(answers)
        left[0] -= 1
        if not left[0]:
            done.set()

    session.on(Start, on_start)
    done.wait(WAIT_S)
    cpu_s = time.process_time() - before_s
    session.end("done")
    return cpu_s


# ---- the trainer's


def carry(carrier: str, content: str, rounds: int) -> tuple[float, float]:
    """Do so many rounds with a sampler in a process of its own; return wall and CPU seconds of
    both processes."""
    if carrier == "session":
        return _carry_session(rounds)
    address, send, take = SERVERS[carrier]()
    start, ready = make_start(), codec.dumps(make_start()).tobytes()
    child = _sampler(carrier, content, address, rounds)
    take()
    send(b"go")
    began_s, before_s = time.perf_counter(), time.process_time()
    for number in range(rounds + AT_ONCE):
        if number >= AT_ONCE:
            data = take()
            if content == "codec":
                codec.loads(memoryview(data), MESSAGES)
        if number < rounds:
            send(codec.dumps(start).tobytes() if content == "codec" else ready)
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - before_s
    send(b"done")
    return wall_s, cpu_s + _cpu_of(child)


def _carry_session(rounds: int) -> tuple[float, float]:
    joined: queue.SimpleQueue[WireSession] = queue.SimpleQueue()
    answered: queue.SimpleQueue[Answers] = queue.SimpleQueue()

    def on_join(session: WireSession, hello: Hello) -> Welcome:
        session.on(Answers, answered.put)
        joined.put(session)
        return Welcome(config={}, spec={}, mesh={}, seed=0, run="")

    hub = Hub("127.0.0.1:0", secret=b"", tls=None, limits=LIMITS, on_join=on_join)
    child = _sampler("session", "codec", str(hub.address), rounds)
    session = joined.get(timeout=WAIT_S)
    start = make_start()
    began_s, before_s = time.perf_counter(), time.process_time()
    for number in range(rounds + AT_ONCE):
        if number >= AT_ONCE:
            answered.get(timeout=WAIT_S)
        if number < rounds:
            session.send(start)
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - before_s
    cpu_s += _cpu_of(child)
    hub.close()
    return wall_s, cpu_s


def _sampler(carrier: str, content: str, address: str, rounds: int) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, "--answer", carrier, content, address]
    return subprocess.Popen([*command, "--rounds", str(rounds)], stdout=subprocess.PIPE, text=True)


def _cpu_of(child: "subprocess.Popen[str]") -> float:
    printed, _ = child.communicate(timeout=WAIT_S)
    return float(printed)


def codec_alone(rounds: int) -> tuple[float, float]:
    """Encode and decode what one round carries, in this process."""
    start, answers = make_start(), make_answers()
    began_s, before_s = time.perf_counter(), time.process_time()
    for _ in range(rounds):
        codec.loads(codec.dumps(start), MESSAGES)
        codec.loads(codec.dumps(answers), MESSAGES)
    return time.perf_counter() - began_s, time.process_time() - before_s


def measure_all(args: argparse.Namespace) -> list[Row]:
    """Measure the rows in turns, so that a change of the machine meets all of them."""
    kinds = [("codec", "alone"), ("session", "codec")]
    kinds += [(carrier, content) for carrier in SERVERS for content in ("bytes", "codec")]
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(args.repeats):
        for kind, measured in taken.items():
            alone = kind[0] == "codec"
            measured.append(codec_alone(args.rounds) if alone else carry(*kind, args.rounds))
    completions = args.rounds * REQUESTS
    rows: list[Row] = []
    for (carrier, content), measured in taken.items():
        wall = spread([wall_s for wall_s, _ in measured])
        cpu = spread([cpu_s * 1000 / completions for _, cpu_s in measured])
        rows.append(
            {
                "carrier": carrier,
                "content": content,
                "messages_per_s": 2 * args.rounds / wall.median,
                "completions_per_s": completions / wall.median,
                **columns(cpu, "cpu_s_per_1000"),
            }
        )
    return rows


def main() -> None:
    """Measure and report, or be the sampler of a measurement."""
    made = parser(__doc__ or "")
    made.add_argument("--rounds", type=int, default=300, help="Starts and Answers of a run")
    made.add_argument("--answer", nargs=3, help=argparse.SUPPRESS)
    args = options(made)
    if args.answer:
        carrier, content, address = args.answer
        answer(carrier, content, address, args.rounds)
        return
    if args.quick:
        args.rounds = 20
    report("wire", measure_all(args), args)


if __name__ == "__main__":
    main()
