"""A request as it waits, is prefilled and runs, and its sampled tokens. Pure host code.

    LiveRequest ──admit──> Prefilling ──last token prefilled──> Running ──end──> TokenRecord
         ^                     │            (recompute)  <────────┤
         └──── preempted, restarted, or its leader left ──────────┘

The queue holds LiveRequests; a Prefilling or a Running has one as `live`, with its slot.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from jaxrl_async.sampler.batch.prompt_scores import PromptScores
from jaxrl_async.sampler.grammar import Matching
from jaxrl_async.types import IntArray, Partial, Request, TokenRecord

NO_TOKENS = TokenRecord(
    token_ids=np.zeros(0, np.int32),
    logprobs=np.zeros(0, np.float32),
    versions=np.zeros(0, np.int32),
)


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRequest:
    """A request from its arrival to its last token."""

    request: Request
    max_new: int
    owner: Any = None  # the caller that waits for it; opaque to the batch
    partial: Partial | None = None  # the saved tokens that it continues from
    number: int = -1  # in the order of arrival, in a sampler of several processes

    @property
    def only_scores(self) -> bool:
        """Whether it wants log-probs of its prompt, and no token."""
        return self.max_new == 0

    @property
    def has_tokens(self) -> bool:
        """Whether it has saved tokens."""
        return self.partial is not None and len(self.partial.token_ids) > 0

    @property
    def known_tokens(self) -> IntArray:
        """The prompt and the saved tokens, which have to be prefilled."""
        if self.partial is None or not len(self.partial.token_ids):
            return np.ascontiguousarray(self.request.token_ids, np.int32)
        return np.concatenate([self.request.token_ids, self.partial.token_ids]).astype(np.int32)

    @property
    def saved_output(self) -> TokenRecord:
        """The saved tokens."""
        return NO_TOKENS if self.partial is None else self.partial

    def as_partial(self, output: TokenRecord, seed: int) -> Partial:
        """Return the request as data, with its sampled tokens and without KV."""
        return Partial(request=self.request, seed=seed, **output.columns)


@dataclass(slots=True, kw_only=True, eq=False)
class Prefilling:
    """A request with a slot and pages, some of whose tokens are not computed yet."""

    live: LiveRequest
    slot_index: int
    order: int  # number of its admission
    token_ids: IntArray  # to prefill
    table: IntArray  # its pages, see kv_cache.py
    prefilled: int = 0  # of token_ids
    kv_version: int | None  # the version that computed all its KV; None: several did
    adapter_slot: int = 0  # 0: no adapter
    # same tokens and requested log-probs: share its prefill
    followers: list["Prefilling"] = field(default_factory=list)
    scores: PromptScores | None = None  # of its prompt; None: not requested, or there already

    @property
    def request(self) -> Request:
        """The request of `live`."""
        return self.live.request

    @property
    def owner(self) -> Any:
        """The owner of `live`."""
        return self.live.owner

    def running(self, matching: Matching | None) -> "Running":
        """Return the same request once its tokens are computed."""
        return Running(
            live=self.live,
            slot_index=self.slot_index,
            order=self.order,
            num_prefilled=len(self.token_ids),
            kv_version=self.kv_version,
            matching=matching,
            scores=self.scores,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Running:
    """A request whose prompt is computed: it decodes, or waits in a reserve slot. Its pages and
    sampled tokens are in Slots."""

    live: LiveRequest
    slot_index: int
    order: int  # number of its admission
    num_prefilled: int  # tokens, when it came to its slot
    kv_version: int | None  # the version that computed all its KV; None: several did
    matching: Matching | None = None  # the state of its constraint; None: it has none
    scores: PromptScores | None = None  # of its prompt; None: see Prefilling

    @property
    def request(self) -> Request:
        """The request of `live`."""
        return self.live.request

    @property
    def owner(self) -> Any:
        """The owner of `live`."""
        return self.live.owner


Admitted = Prefilling | Running
"""A live request with a slot."""
Stage = LiveRequest | Prefilling | Running
"""A live request: waiting, prefilling or running."""


def live_of(stage: Stage) -> LiveRequest:
    """Return the request of any stage."""
    return stage if isinstance(stage, LiveRequest) else stage.live


def running_of(stages: Iterable[Admitted]) -> list[Running]:
    """Return the requests that can decode, in the given order."""
    return [p for p in stages if isinstance(p, Running)]


def unfollow(follower: Prefilling, stages: Iterable[Admitted]) -> None:
    """Remove a request from the followers of others."""
    for other in stages:
        if isinstance(other, Prefilling) and follower in other.followers:
            other.followers.remove(follower)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStats:
    """Totals since the start. Replaced as a whole: readers never see half a change."""

    blocks: int = 0
    slot_steps: int = 0  # slots times decode steps
    row_steps: int = 0  # rows that were computed times decode steps
    used_slot_steps: int = 0  # of slot_steps, steps that sampled a token
    aside_tokens: int = 0  # of these, not for training
    waiting_slot_steps: int = 0  # slot_steps of blocks at whose end requests still waited
    waiting_used_slot_steps: int = 0
    prefill_tokens: int = 0  # computed, padding not counted
    scored_tokens: int = 0  # of prompts, whose log-probs were computed
    recomputed_tokens: int = 0  # of prefill_tokens, computed again after a swap or a preemption
    preempted: int = 0
    restarted: int = 0
    discarded_tokens: int = 0  # sampled, then discarded by a restart
    cancelled_tokens: int = 0  # sampled by requests that were cancelled later

    def plus(self, **more: int) -> Self:
        """Return new totals with these counts added."""
        return replace(self, **{name: getattr(self, name) + n for name, n in more.items()})
