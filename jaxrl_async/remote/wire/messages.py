"""The messages between a trainer and the samplers that have joined it: records of plain values and
of types.py, encoded by codec.py.

    sampler                                  trainer
      │ Hello ───────────────────────────────> │   after both have proved that they know the secret
      │ <─────────────────────────── Welcome │
      │ Prepared ────────────────────────────> │   its engine is built
      │ <───────────────────────────── Offer │   the first weights, and every version that follows
      │ Staged, Live ────────────────────────> │   from the first Live on it is dealt requests
      │ <─────────────────────────── Start, Cancel, Ask
      │ Answers, RemoteReply, Beat ──────────> │
      │ Leaving (its running requests) ──────> │   or it is silent: its requests begin again
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrl_async.codec import Bytes
from jaxrl_async.types import Completion, FloatArray, IntArray, Partial, Request

PROTOCOL = 4
"""Number of this set of messages; both sides must have the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A sampler asks to join."""

    name: str  # unique among the living; for people, logs and the ledger
    protocol: int = PROTOCOL
    package: str = ""  # version of jaxrl_async
    host: str = ""  # says whether shared memory will do: the machine's boot id
    process: int = 0  # process id there
    data_address: str = ""  # HOST:PORT at which it passes weights on; "": it does not
    mesh: Mapping[str, int] = field(default_factory=dict)  # its axes, as mesh.sampler names them
    platform: str = ""  # of its devices
    instance: str = ""  # a random word: who says it again lost its connection, and joins anew


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The sampler may join: all that it needs to build its engine."""

    config: Mapping[str, Any]  # the whole configuration, as JSON
    spec: Mapping[str, Any]  # fields of the policy's ModelSpec
    mesh: Mapping[str, int]  # axes of its slice
    seed: int
    layout_hash: str  # of the weights that it will be offered (weights.manifest)
    run: str  # name of the run
    probe_ids: IntArray | None = None  # [probe] tokens on which new weights are checked; None: any


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The sampler has built its engine, and waits for weights."""

    data_address: str = ""  # HOST:PORT at which it passes weights on; "": it does not


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Requests for the sampler, which queues them all at once, in this order."""

    requests: tuple[Request | Partial, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Nobody waits for these requests any more."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFailure:
    """A request that failed, alone, or was cancelled."""

    request_id: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Requests that are done, as many as one decode block ended."""

    completions: tuple[Completion, ...] = ()
    failures: tuple[RemoteFailure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A question to the sampler about its running requests, answered by a RemoteReply of the same
    number."""

    number: int
    request_id: str | None = None  # save this one; None: all, without KV (progress)
    stop: bool = False  # see ports.Replica.save
    with_kv: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteReply:
    """The answer to an Ask."""

    number: int
    partials: tuple[Partial, ...] = ()
    error: str = ""  # why there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The sampler lives: its statistics, at least four times in remote.silence_s."""

    stats: Mapping[str, float]  # fields of SamplerStats
    places: int  # requests that it holds at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """The sampler's engine ended with an error; the process ends, too."""

    error: str
    blamed: tuple[str, ...] = ()  # requests that were on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """The trainer asks the sampler to go, and to hand back what is running."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The sampler goes: whatever it has not answered is here, or has drawn no token."""

    reason: str
    partials: tuple[Partial, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A step of the trainer that the sampler traces begins, or it ends (run.profile)."""

    step: int
    on: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """The trace that a sampler has taken during a step."""

    step: int
    files: Mapping[str, Bytes]  # by metrics.profiles.SUFFIXES
    error: str = ""  # why there are no files


# ---- weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Weights of a version can be fetched; it replaces any older offer."""

    version: int
    where: Mapping[str, Any]  # what the transport needs to fetch them (remote.weights)
    sources: tuple[str, ...] = ()  # data addresses to fetch from, the best first
    probe_logprobs: FloatArray | None = None  # [probe - 1], see types.VersionedParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The sampler has every byte of a version, with the right checksums, beside the live one."""

    version: int
    num_bytes: int  # that it fetched
    seconds: float  # from the offer until now
    source: str  # where most of it came from
    base_bytes: int = 0  # that it fetched beside these: what an adapter changes, the first time
    fallbacks: int = 0  # times that it went over to TCP: the way that was asked for had failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Torn:
    """A version could not be fetched, or its checksums differ; it waits for an offer."""

    version: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Every new token of the sampler comes from this version."""

    version: int


# ---- between the processes of one sampler: the first leads, the others follow


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A follower's engine is built."""

    process: int  # its number in the sampler's JAX world
    alike: str  # hash of all that must be the same in every process


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Every process has the weights of this version: begin with them."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JointRound:
    """What the leader takes in before its next decode block; its followers take in the same."""

    requests: tuple[Request | Partial, ...] = ()  # in the order of the queue
    first_number: int = 0  # of the requests: they are numbered as they come
    cancelled: tuple[int, ...] = ()  # numbers of requests, in this order
    version: int | None = None  # of new weights; None: none
    probe_logprobs: FloatArray | None = None  # of that version, see types.VersionedParams
    state_hash: int = 0  # of the leader's batch before it takes this in


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """Another process could not get weights of this version: let go of them."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismissed:
    """The sampler is closed: its followers are done."""


MESSAGES: tuple[type, ...] = (
    Hello,
    Welcome,
    Prepared,
    Start,
    Cancel,
    RemoteFailure,
    Answers,
    Ask,
    RemoteReply,
    Beat,
    Died,
    Leave,
    Leaving,
    Profile,
    Profiled,
    Offer,
    Staged,
    Torn,
    Live,
    Ready,
    Begin,
    JointRound,
    GivenUp,
    Dismissed,
)
"""What may come over a session; anything else ends it."""
