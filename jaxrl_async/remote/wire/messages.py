"""The messages between a trainer and its joined samplers: records of plain values and of classes
from types.py, encoded by codec.py.

    sampler                                  trainer
      │ Hello ───────────────────────────────> │   after both have proved the secret
      │ <─────────────────────────── Welcome │
      │ Prepared ────────────────────────────> │   its engine is built
      │ <───────────────────────────── Offer │   the first weights, and every version that follows
      │ Staged, Live ────────────────────────> │   from the first Live on it gets requests
      │ <─────────────────────────── Start, Cancel, Ask
      │ Answers, RemoteReply, Beat ──────────> │
      │ Leaving (its running requests) ──────> │   or it is silent: its requests restart
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrl_async.codec import Bytes
from jaxrl_async.types import Completion, FloatArray, IntArray, Partial, Request

PROTOCOL = 5
"""Version number of this set of messages; both sides must have the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A sampler asks to join."""

    name: str  # unique among connected samplers; for users, logs and the ledger
    host: str = ""  # boot id of the machine
    process: int = 0  # process id there
    mesh: Mapping[str, int] = field(default_factory=dict)  # its axes, as mesh.sampler names them
    instance: str = ""  # a random token: the same sampler rejoins with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The sampler may join; has all that it needs to build its engine."""

    config: Mapping[str, Any]  # the whole configuration, as JSON
    spec: Mapping[str, Any]  # fields of the policy's ModelSpec
    mesh: Mapping[str, int]  # axes of its slice
    seed: int
    run: str  # name of the run
    probe_ids: IntArray | None = None  # [probe] tokens to check new weights on; None: any
    tokenizer: Bytes | None = None  # remote.run.sent_tokenizer, for constraints; None: refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The sampler has built its engine and waits for weights."""

    data_address: str = ""  # HOST:PORT at which it relays weights; "": it does not


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Requests for the sampler, which queues them together, in this order."""

    requests: tuple[Request | Partial, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """These requests are cancelled: their results are no longer needed."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFailure:
    """A single request that failed or was cancelled."""

    request_id: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The requests that ended with one decode block."""

    completions: tuple[Completion, ...] = ()
    failures: tuple[RemoteFailure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A query about the sampler's running requests, answered by a RemoteReply with the same
    number."""

    number: int
    request_id: str | None = None  # save this one; None: all, without KV (progress)
    stop: bool = False  # see ports.Replica.save


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteReply:
    """The answer to an Ask."""

    number: int
    partials: tuple[Partial, ...] = ()
    error: str = ""  # why there are no partials


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The sampler is alive; its statistics, sent at least four times in remote.silence_s."""

    stats: Mapping[str, float]  # fields of SamplerStats
    places: int  # requests that it holds at the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """The sampler's engine failed with an error; the process also ends."""

    error: str
    blamed: tuple[str, ...] = ()  # requests that were on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """The trainer asks the sampler to leave and to return its running requests."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The sampler leaves. Each unanswered request is here, or has no sampled token yet."""

    reason: str
    partials: tuple[Partial, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Start or stop the sampler's trace of a trainer step (run.profile)."""

    step: int
    on: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """The trace that a sampler recorded during a step."""

    step: int
    files: Mapping[str, Bytes]  # by metrics.trace_file.SUFFIXES
    error: str = ""  # why there are no files


# ---- weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The weights of a version can be fetched; replaces any older offer."""

    version: int
    where: Mapping[str, Any]  # what the transport needs to fetch them (remote.weights)
    sources: tuple[str, ...] = ()  # data addresses to fetch from, best first
    probe_logprobs: FloatArray | None = None  # [probe - 1], see types.VersionedParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The sampler holds every byte of a version, with matching checksums, alongside the live
    version."""

    version: int
    num_bytes: int  # fetched
    seconds: float  # from the offer until now
    source: str  # of most of the bytes
    base_bytes: int = 0  # fetched in addition, once: an adapter's base
    fallbacks: int = 0  # falls back to TCP after the requested transport failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Torn:
    """A version could not be fetched, or its checksums differ; the sampler waits for an offer."""

    version: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The sampler generates every new token with this version."""

    version: int


# ---- between the processes of one sampler: the first leads, the others follow


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A follower's engine is built."""

    process: int  # its number in the sampler's JAX world
    alike: str  # hash of everything that must be equal in all processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Every process has the weights of this version; start with them."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JointRound:
    """Inputs that the leader applies before its next decode block; its followers apply the same."""

    requests: tuple[Request | Partial, ...] = ()  # in queue order
    first_number: int = 0  # of the requests, numbered in order of arrival
    cancelled: tuple[int, ...] = ()  # numbers of requests, in this order
    version: int | None = None  # of new weights; None: none
    probe_logprobs: FloatArray | None = None  # of that version, see types.VersionedParams
    state_hash: int = 0  # of the leader's batch before it applies these


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUpRequest:
    """Another process could not get the weights of this version: release them."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismissed:
    """The sampler is closed; its followers end."""


MESSAGES: tuple[type, ...] = tuple(
    kind
    for kind in vars().copy().values()
    if isinstance(kind, type) and kind.__module__ == __name__
)
"""The messages that a session accepts, all classes of this file; any other ends it."""
