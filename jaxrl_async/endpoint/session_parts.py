"""Parts of a session: its limits and counts, the rewards and messages that callers have sent, its
times, and checks of a call."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from jaxrl_async.endpoint.sampling_request import fixed_shaping
from jaxrl_async.errors import RolloutError
from jaxrl_async.metrics.metric import names_a_metric, part_name
from jaxrl_async.ports.run import Clock
from jaxrl_async.rollout.call_log import Trace
from jaxrl_async.types import (
    CORRECT,
    FloatArray,
    IntArray,
    LogitShaping,
    Message,
    Request,
    SamplingParams,
    Score,
)
from jaxrl_async.user_arguments import as_json

MAX_PARTS = 64
"""Maximum number of named components of a session's reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of one session. Reaching the number of calls or tokens ends its episode as cut off
    (StopReason.LENGTH); reaching a time limit fails its member."""

    max_calls: int = 256
    max_tokens: int = 262_144  # in all contexts of the episode: newly read, and sampled
    idle_s: float = 600.0  # maximum time without a call, seconds; running calls do not count
    total_s: float = 3600.0
    # Whether the caller may choose temperature, top-k ..., and a seed. False, as in training: the
    # run's distribution applies, and other requested values are counted.
    own_sampling: bool = False
    max_reward: float = 100.0  # maximum absolute value of a reward or of one of its parts


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCounts:
    """Counts of calls, over some sessions."""

    calls: int = 0  # started
    cancelled_calls: int = 0  # whose tokens were not used
    overridden_calls: int = 0  # that requested another distribution, or a seed
    late_calls: int = 0  # after the session's end

    def plus(self, **more: int) -> "SessionCounts":
        """Return new totals with these counts added."""
        return replace(self, **{name: getattr(self, name) + n for name, n in more.items()})


@dataclass(slots=True, kw_only=True)
class GivenRewards:
    """The rewards that callers have sent for a session."""

    reward: float | None = None  # of the whole session
    parts: dict[str, float] = field(default_factory=dict)
    of_calls: dict[int, float] = field(default_factory=dict)  # by call number

    def score(self, tokens: FloatArray | None) -> Score | None:
        """Return the callers' score, with rewards of calls [length]; None: they sent none."""
        if self.reward is None and tokens is None:
            return None
        return Score(reward=self.reward or 0.0, parts=dict(self.parts), token_rewards=tokens)


class PlayerMessages:
    """The chat calls of each player, the latest player last: the messages of the first call, and of
    the latest with its answer."""

    def __init__(self) -> None:
        self._by_player: dict[str, tuple[tuple[Message, ...], tuple[Message, ...]]] = {}

    def add(self, messages: Sequence[Message], answer: Message, player: str) -> None:
        """Record a call and its answer."""
        first, _ = self._by_player.pop(player, (tuple(messages), ()))
        self._by_player[player] = (first, (*messages, answer))

    def of(self, player: str | None) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """Return Episode.opened and Episode.messages of a player; None: of the latest."""
        player = next(reversed(self._by_player), "") if player is None else player
        first, messages = self._by_player.get(player, ((), ()))
        begun = len(first)
        if messages[:begun] != first:  # its history was rewritten
            begun = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), 0)
        plain = as_json(messages)
        return plain[:begun], plain[begun:]


class SessionTimes:
    """When a session was opened, used, and sampled tokens."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._sampling_s = clock, 0.0
        self._opened_at = self._last_use = self._sampling_since = clock()

    def began_sampling(self) -> None:
        """Note that a call runs, and none did before."""
        self._sampling_since = self._clock()

    def used(self, *, stops_sampling: bool = False) -> None:
        """Note a use. stops_sampling: the last running call has ended."""
        self._last_use = self._clock()
        if stops_sampling:
            self._sampling_s += self._last_use - self._sampling_since

    def sampling_s(self, *, samples: bool) -> float:
        """Return the time during which at least one call ran, seconds. samples: one runs now."""
        return self._sampling_s + (self._clock() - self._sampling_since if samples else 0.0)

    def remaining(self, bounds: SessionLimits, *, samples: bool) -> tuple[float, str]:
        """Return the seconds until a time limit is reached, and its end reason."""
        now = self._clock()
        total = self._opened_at + bounds.total_s - now
        idle = math.inf if samples else self._last_use + bounds.idle_s - now
        if idle < total:
            return max(idle, 0.0), f"it received no call for {bounds.idle_s:g} s (abandoned)"
        return max(total, 0.0), f"it took more than {bounds.total_s:g} s"


class CallOptions(NamedTuple):
    """The options of a call; see PolicySession.sample."""

    max_new_tokens: int | None
    stop_token_ids: tuple[int, ...]
    sampling: SamplingParams | None
    seed: int | None
    shaping: LogitShaping | None


def check_call(label: str, tokens: IntArray, options: CallOptions) -> None:
    """Raise RolloutError for a call without a row of token ids, or of no new token."""
    if tokens.ndim != 1 or not len(tokens) or not np.issubdtype(tokens.dtype, np.integer):
        raise RolloutError(
            f"session {label}: a call needs one row of token ids, not an array of shape "
            f"{tokens.shape} and type {tokens.dtype}."
        )
    most = options.max_new_tokens
    if most is not None and most < 1:
        raise RolloutError(f"session {label}: max_new_tokens is {most}, not 1+.")


def limit_reached(trace: Trace, bounds: SessionLimits) -> str:
    """Return which limit of calls or tokens a session has reached; empty: none."""
    if trace.num_calls >= bounds.max_calls:
        return f"it has made {bounds.max_calls} calls (max_calls)"
    if trace.length >= bounds.max_tokens:
        return f"its contexts have {trace.length} tokens (max_tokens)"
    return ""


def no_room(length: int, most: int) -> str:
    """Return why a context of this length leaves no room for an answer; empty: it leaves some."""
    if length < most:
        return ""
    return f"{length} tokens leave no room for an answer in {most} (sampler.max_length)"


def with_options(
    request: Request, options: CallOptions, *, own: bool, constraints: bool, left: int
) -> tuple[Request, bool]:
    """Return a request with a call's options, and whether some of them were overridden.

    Args:
        request: by the run's settings.
        options: of the call.
        own: whether the caller chooses the distribution and random numbers.
        constraints: whether it may constrain its answer.
        left: maximum number of new tokens in the session.
    """
    stops = (*request.stop_token_ids, *options.stop_token_ids)
    fixed = fixed_shaping(options.shaping, constraints)
    other = options.seed is not None or options.sampling not in (None, request.sampling)
    request = replace(
        request,
        max_new_tokens=min(request.max_new_tokens, options.max_new_tokens or left, left),
        stop_token_ids=tuple(dict.fromkeys(stops)),
        shaping=options.shaping if own else fixed,
    )
    if own and options.sampling is not None:
        request = replace(request, sampling=options.sampling)
    if own and options.seed is not None:
        request = replace(request, key=(options.seed % 2**31, 0), branch=0)
    return request, not own and (other or fixed != options.shaping)


def checked_parts(parts: Mapping[str, float], most: float) -> dict[str, float]:
    """Check the parts of a reward. Raises RolloutError for an invalid name or number."""
    if len(parts) > MAX_PARTS:
        raise RolloutError(f"a reward has at most {MAX_PARTS} parts, not {len(parts)}.")
    named = {str(name): bounded(f"part {name!r:.60}", value, most) for name, value in parts.items()}
    for name in named:
        if name != part_name(name) or names_a_metric(name):
            raise RolloutError(
                f"a reward cannot have a part named {name!r:.60}: it is not a valid metric name, "
                "or the name of another metric. Rename it."
            )
    if not 0 <= named.get(CORRECT, 0.0) <= 1:
        raise RolloutError(f"the part {CORRECT!r} of a reward must be from 0 to 1.")
    return named


def bounded(name: str, value: float, most: float) -> float:
    """Return a number as a float. Raises RolloutError if it is not one, or exceeds `most`."""
    is_number = isinstance(value, int | float | np.integer | np.floating)
    if not is_number or not abs(value) <= most:  # also rejects NaN
        raise RolloutError(
            f"the {name} of a session must be a number from {-most:g} to {most:g}, not "
            f"{value!r:.60}. Correct its source, or raise endpoint.max_reward."
        )
    return float(value)


def call_number(label: str, call: str, trace: Trace) -> int:
    """Return the number of a call by its id. Raises RolloutError unless it has sampled tokens.

    label: of its session.
    """
    number = call.removeprefix(f"{label}/t")
    if not number.isdecimal() or not trace.has_output(int(number)):
        raise RolloutError(
            f"session {label}: {call[:60]!r} is not a call that has sampled tokens. Use the id of "
            "one of this session's completions."
        )
    return int(number)
