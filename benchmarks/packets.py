"""A network between two groups of processes of this machine, which can be made as bad as wanted.

    trainer's: tun0 10.77.0.1 <──packets── this process ──packets──> tun0 10.77.0.2: samplers'

What one side sends comes to this process packet by packet, which delays, loses, throttles or tears
it before the other side gets it; both sides have the kernel's own TCP. Needs Linux, root, and
/dev/net/tun; `missing()` says what is not there.
"""

import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

HOSTS = {"jaxrl-trainer": "10.77.0.1", "jaxrl-samplers": "10.77.0.2"}
"""The namespaces, and each one's address."""
TUN = "/dev/net/tun"
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of setns
SET_INTERFACE, RAW_IP = 0x400454CA, 0x1001  # TUNSETIFF; IFF_TUN | IFF_NO_PI
QUEUE_S = 0.5
"""Packets that would wait longer than this for a slow line are lost, as a router's queue does."""
MTU = 1500
TCP, RESET = 6, 0x14  # RST and ACK


@dataclass(slots=True)
class Line:
    """The line between the namespaces; set the fields at any time."""

    delay_s: float = 0.0  # each way
    loss: float = 0.0  # share of packets, each way
    bits_per_s: float = 0.0  # each way; 0: as fast as this process can
    up: bool = True
    torn_until: float = 0.0  # until this time (monotonic) data packets become resets
    torn: int = 0  # packets that did
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def tear(self) -> None:
        """Reset every connection on which data goes within half a second."""
        self.torn_until = time.monotonic() + 0.5


def missing() -> str:
    """Return why there can be no such network here; "": there can."""
    if not os.path.exists(TUN):
        return f"no {TUN}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with _namespace("jaxrl-probe"):
            _tun_in("jaxrl-probe").close()
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces are not allowed here: {error}"
    return ""


@contextlib.contextmanager
def network() -> Iterator[Line]:
    """Make both namespaces and the line between them."""
    with contextlib.ExitStack() as closing:
        line, over = Line(), threading.Event()
        ends = []
        for name, address in HOSTS.items():
            closing.enter_context(_namespace(name))
            ends.append(closing.enter_context(_tun_in(name)))
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "tun0")
            _ip("-n", name, "link", "set", "tun0", "mtu", str(MTU), "up")
            _ip("-n", name, "link", "set", "lo", "up")
        threads = [
            threading.Thread(target=_carry, args=(source, target, line, over), daemon=True)
            for source, target in (ends, ends[::-1])
        ]
        for thread in threads:
            thread.start()
        try:
            yield line
        finally:
            over.set()
            for thread in threads:
                thread.join()


def inside(name: str) -> list[str]:
    """Return the words in front of a command that is to run in a namespace."""
    return ["ip", "netns", "exec", name]


@dataclass(frozen=True, slots=True)
class _Tun:
    """A network interface whose packets this process reads and writes."""

    number: int  # of the file

    def close(self) -> None:
        os.close(self.number)

    def __enter__(self) -> "_Tun":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextlib.contextmanager
def _namespace(name: str) -> Iterator[None]:
    with contextlib.suppress(subprocess.SubprocessError):
        _ip("netns", "del", name)  # of a run that was killed
    _ip("netns", "add", name)
    try:
        yield
    finally:
        _ip("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _tun_in(name: str) -> _Tun:
    """Make tun0 in a namespace; this thread is there for a moment."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(there, NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
        try:
            number = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(number, SET_INTERFACE, struct.pack("16sH22x", b"tun0", RAW_IP))
        finally:
            libc.setns(own, NEW_NETWORK)
    finally:
        os.close(own)
        os.close(there)
    return _Tun(number)


def _carry(source: _Tun, target: _Tun, line: Line, over: threading.Event) -> None:
    """Carry packets one way until it is over."""
    waiting: deque[tuple[float, bytes]] = deque()
    free_at = 0.0  # when the line has sent what it was given
    while not over.is_set():
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            with contextlib.suppress(OSError):
                os.write(target.number, waiting.popleft()[1])
        wait_s = min(max(waiting[0][0] - now, 0.0), 0.1) if waiting else 0.1
        if not select.select([source.number], [], [], wait_s)[0]:
            continue
        try:
            packet = os.read(source.number, MTU + 64)
        except OSError:
            continue
        now = time.monotonic()
        if not line.up or line.rng.random() < line.loss:
            continue
        free_at = max(free_at, now)
        if free_at - now > QUEUE_S:
            continue
        free_at += 8 * len(packet) / line.bits_per_s if line.bits_per_s else 0.0
        if now < line.torn_until and (reset := as_reset(packet)) is not None:
            line.torn += 1
            packet = reset
        waiting.append((free_at + line.delay_s, packet))


def as_reset(packet: bytes) -> bytes | None:
    """Return the reset that takes a TCP packet's place; None if it is none, or carries no data."""
    start = 4 * (packet[0] & 0x0F)
    if packet[0] >> 4 != 4 or packet[9] != TCP:
        return None
    if len(packet) <= start + 4 * (packet[start + 12] >> 4):
        return None
    ip, tcp = bytearray(packet[:20]), bytearray(packet[start : start + 20])
    ip[0], ip[10:12] = 0x45, b"\0\0"
    struct.pack_into("!H", ip, 2, 40)
    struct.pack_into("!H", ip, 10, _checksum(ip))
    tcp[12:14] = bytes((5 << 4, RESET))
    tcp[16:20] = b"\0\0\0\0"
    pseudo = bytes(ip[12:20]) + struct.pack("!BBH", 0, TCP, 20)
    struct.pack_into("!H", tcp, 16, _checksum(pseudo + tcp))
    return bytes(ip + tcp)


def _checksum(data: bytes | bytearray) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total & 0xFFFF) + (total >> 16)
    return ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
