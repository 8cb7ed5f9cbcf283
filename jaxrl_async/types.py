"""The carriers: frozen host-side records, NumPy only. Read this file first.

    Prompt -> Request -> Completion -> Episode -> EpisodeGroup -> PackedBatch
                 ^                                                     |
                 +---- VersionedParams <---- WeightUpdate <---- train step

A *version* is the number of updates that made a set of weights: version 0 is the start of the
run, and each update publishes the next version. A token's version is that of the weights that
computed the logits from which it was drawn.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
ExpertIds = NDArray[np.signedinteger[Any]]
Message = Mapping[str, Any]
"""A chat message as OpenAI's chat completions write it: `role` and `content`, and where they apply
`tool_calls`, `tool_call_id`, `name` and `reasoning_content`."""

NOT_DRAWN = -1
"""Version of a token that the policy did not draw (prompt, tool reply, padding)."""
MAX_STOP_TOKENS = 8
"""Maximum stop tokens of one request."""


class StopReason(StrEnum):
    """Why a completion ended."""

    EOS = "eos"  # drew one of the request's stop tokens (kept as the last token)
    LENGTH = "length"  # reached max_new_tokens or the sampler's max_length
    CANCELLED = "cancelled"  # the caller cancelled it


class Drop(StrEnum):
    """Why a group was not trained on. Every way out of the pipeline is a member and is counted."""

    STALE = "stale"  # older than max_staleness allows
    FROM_THE_FUTURE = (
        "from_the_future"  # drawn by weights newer than the trainer's (after a restart)
    )
    FAILED = "failed"  # the environment or a scorer failed
    TOO_LONG = "too_long"  # an episode does not fit a training row
    NO_SIGNAL = "no_signal"  # all rewards equal (algorithm.dynamic_sampling): nothing to learn


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task from the data stream."""

    prompt_id: int  # index of the record in the dataset
    position: int  # in the shuffled, repeated stream: unique within a run
    token_ids: IntArray  # [prompt] int32
    text: str  # token_ids decoded, for people and for rewards
    reference: str  # what scorers need (the right answer)
    columns: Mapping[str, Any] = field(default_factory=dict)  # the whole record, by column
    messages: tuple[Message, ...] = ()  # what token_ids were rendered from; empty: plain text


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Permission to start one group, given by the staleness gate."""

    group: int  # admission number: 0, 1, 2, ...; strict draws take groups in this order
    version: int  # policy version live in every sampler at admission


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Distribution that tokens are drawn from: temperature first, then top-k, top-p, min-p."""

    temperature: float = 1.0  # 0 is greedy; log-probs are then those of the untempered distribution
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p leave tokens out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate."""

    request_id: str  # "g5/m2/t0": group 5, member 2, turn 0
    token_ids: IntArray  # [prompt] int32
    max_new_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: tuple[int, ...] = ()
    # (group or prompt, member): with seed and position, all that randomness depends on. None: the
    # sampler chooses a fresh key, so that requests of one prompt draw different tokens
    key: tuple[int, int] | None = None
    branch: int = 0  # which continuation of a fork: changes random numbers after the fork
    # while it waits: the lowest goes first, compared from the left (as vLLM's priority, a level
    # and a place within it); equal ones in the order of asking. Changes no token
    priority: tuple[int, int] = (0, 0)
    forced_length: int | None = (
        None  # benchmarks: ignore stop tokens and end after this many tokens
    )
    extras: bool = False  # the completion has full_logprobs and kept
    # which of the sampler's adapters it is drawn with; its tokens' versions are that adapter's
    adapter: str = ""  # empty: none of them
    for_training: bool = True  # False: of an evaluation or a guest; its tokens are counted apart


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTokens:
    """The sampling mask of each drawn token: the token ids with a probability above 0. A token
    without any was drawn from the whole vocabulary."""

    ids: IntArray  # [sum of kept tokens] int32, ascending for each drawn token
    starts: IntArray  # [drawn + 1] int32: those of token t are ids[starts[t] : starts[t + 1]]

    def of(self, token: int) -> IntArray:
        """Return the ids from which drawn token number `token` was chosen."""
        return self.ids[self.starts[token] : self.starts[token + 1]]

    def first(self, count: int) -> "KeptTokens":
        """Return the masks of the first `count` drawn tokens."""
        return KeptTokens(ids=self.ids[: self.starts[count]], starts=self.starts[: count + 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """The tokens that a sampler drew for one request, with what it recorded of each.

    A further value of each token is one more field here: `columns` and `first` carry all of them.
    """

    token_ids: IntArray  # [drawn] int32, the stop token included
    logprobs: FloatArray  # [drawn] float32, of the distribution drawn from; NaN: not reported
    versions: IntArray  # [drawn] int32, policy version of the logits; never falls
    full_logprobs: FloatArray | None = None  # [drawn] of the whole distribution at temperature 1
    kept: KeptTokens | None = None  # which tokens could be drawn, with top-k, top-p or min-p
    # [prompt + drawn - 1, layers, experts per token] int8 or int16 (model.moe.id_dtype): experts of
    # each token in the pass that drew the next token or, within the prompt, that computed its KV.
    # The last token has none: it made no logits. [0, ...]: nothing was drawn. None: a sampler
    # without keep_routing
    expert_ids: ExpertIds | None = None

    @property
    def has_extras(self) -> bool:
        """Whether it has the values that Request.extras asks for."""
        return self.full_logprobs is not None and self.kept is not None

    @property
    def columns(self) -> dict[str, Any]:
        """These fields by name, for another record of the same tokens."""
        return {name: getattr(self, name) for name in TOKEN_COLUMNS}

    def first(self, count: int, prompt: int) -> Self:
        """Return the record of the first `count` tokens alone, which follow `prompt` others."""
        full, kept, experts = self.full_logprobs, self.kept, self.expert_ids
        return replace(
            self,
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[:count],
            versions=self.versions[:count],
            full_logprobs=None if full is None else full[:count],
            kept=None if kept is None else kept.first(count),
            expert_ids=None if experts is None else experts[: max(prompt + count - 1, 0)],
        )


TOKEN_COLUMNS = tuple(column.name for column in fields(TokenRecord))
"""Names of the fields of TokenRecord."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(TokenRecord):
    """The tokens that the sampler drew for one request.

    Drawn: A A B; the weights changed from version 7 to 9 before B's logits were computed:
        token_ids = [A A B]   logprobs = [a a b]   versions = [7 7 9]
    """

    request_id: str
    stop: StopReason
    queued_s: float = 0.0  # submit to prefill, seconds
    first_token_s: float = 0.0  # submit to the first token on the host, seconds
    latency_s: float = 0.0  # submit to finish, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial(TokenRecord):
    """A running request as data: all that a sampler needs to continue it with the same tokens."""

    request: Request
    seed: int  # of the sampler that drew the tokens
    kv: FloatArray | None = None
    """[layers, 2, tokens, kv_heads, head_dim], of prompt and drawn tokens; with latent attention
    [layers, 1, tokens, 1, width]."""
    kv_version: int | None = None  # the version that computed all of kv
    kv_page_tokens: int = 0
    """Tokens in a page of the cache that kv is from, if it has zeros for those pages that windows
    hide from later tokens; 0: it has all."""


LARGEST_REWARD = 1e30
"""Largest reward or part of one, either sign: with float32 the squares of larger ones are infinite,
and their advantages were 0."""
CORRECT = "correct"
"""The part of a reward that says how right an answer is, 0 to 1: its mean is the accuracy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A scorer's judgement of one episode."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)  # named components, before weighting
    token_rewards: FloatArray | None = (
        None  # [length] float32 added to reward, e.g. at the end of each reasoning step
    )
    named_of_tokens: float = 0.0  # how much of token_rewards' sum is in the parts as well

    process_rewards: FloatArray | None = (
        None  # [length] float32 added to these: reward.process, whose age has a limit of its own
    )
    left_out: bool = False  # a function did not apply (None): parts that are missing do not count
    logged: Mapping[str, float] = field(default_factory=dict)  # log_metric's: not in the reward

    @property
    def by_token(self) -> FloatArray | None:
        """What the tokens earned in all, [length] float32; None: nothing."""
        given = [r for r in (self.token_rewards, self.process_rewards) if r is not None]
        return sum(given[1:], given[0]) if given else None

    @property
    def total(self) -> float:
        """The reward with what its tokens earned: the return of the episode."""
        earned = self.by_token
        return float(self.reward + (0.0 if earned is None else earned.sum(dtype=np.float64)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One answer as the policy saw it, token for token: nothing is tokenised again after this.

    Prompt P (3 tokens), answer A (2), tool reply T (2), answer B (1):
        token_ids = [P P P A A T T B]     drawn    = [0 0 0 1 1 0 0 1]
        logprobs  = [0 0 0 a a 0 0 b]     versions = [- - - 7 7 - - 9]     # '-' is NOT_DRAWN

    Where history was rewritten (compaction, dropped thinking, a sub-agent), the policy saw several
    contexts. They lie one behind the other, each a sequence of its own with positions from 0:
        token_ids = [P P A A | S T B]     starts   = (0, 4)
    Every drawn token is marked as drawn in one context only; where another one repeats it, it is
    context there.
    """

    token_ids: IntArray  # [length] int32
    drawn: BoolArray  # [length] True: the policy drew the token
    logprobs: FloatArray  # [length] float32, of the distribution drawn from; 0 where not drawn
    versions: IntArray  # [length] int32; NOT_DRAWN where not drawn
    stop: StopReason
    num_turns: int = 1
    kept: KeptTokens | None = None  # of all turns' drawn tokens, in order; None: not requested
    # [length, layers, k]: the experts of each token, as in Completion; -1 where unknown: the last
    # drawn token and what follows it. None: not requested
    expert_ids: ExpertIds | None = None
    starts: tuple[int, ...] = (0,)  # where each context begins, ascending
    score: Score | None = None  # what its environment gave; None: the scorers alone judge it
    # what was said, for scorers alone: they are dropped once the group is scored. opened: what an
    # environment wrote before the policy's first turn; (): the prompt's messages
    opened: tuple[Message, ...] = ()
    messages: tuple[Message, ...] = ()  # from the policy's first turn on; one without content: it
    # was cut off, and its text is that of the last turn's tokens. (): only the tokens are known
    seat: str = ""  # of a game, which the policy filled; empty: no game
    peers: str = ""  # compared with those of its group that have the same word: a seat, a fork

    @property
    def num_drawn(self) -> int:
        """Number of tokens that the policy drew."""
        return int(np.count_nonzero(self.drawn))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeGroup:
    """All episodes of one prompt: the unit that is admitted, buffered, and trained on."""

    prompt: Prompt
    episodes: tuple[Episode, ...]
    scores: tuple[Score, ...]  # same order as episodes
    ticket: Ticket

    @property
    def oldest_version(self) -> int:
        """Smallest version of any drawn token; the ticket's if nothing was drawn."""
        return self.version_range[0]

    @property
    def newest_version(self) -> int:
        """Largest version of any drawn token; the ticket's if nothing was drawn."""
        return self.version_range[1]

    @property
    def version_range(self) -> tuple[int, int]:
        """oldest_version and newest_version."""
        if not self.episodes:
            return self.ticket.version, self.ticket.version
        drawn = np.concatenate([e.drawn for e in self.episodes])
        versions = np.concatenate([e.versions for e in self.episodes])[drawn]
        if not len(versions):
            return self.ticket.version, self.ticket.version
        return int(versions.min()), int(versions.max())


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelledGroup:
    """What is left of a group that had become too old while it was being drawn."""

    ticket: Ticket
    prompt_id: int
    oldest: int  # version of its oldest drawn token
    lengths: tuple[int, ...]  # drawn tokens of each member so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The groups that the buffer gives for one step, in training order, and those it dropped."""

    groups: tuple[EpisodeGroup, ...]
    dropped: tuple[tuple[EpisodeGroup, Drop], ...]
    waited_s: float  # time the trainer waited, seconds
    cancelled: tuple[CancelledGroup, ...] = ()  # since the last draw, unfinished


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Token sequences packed into rows of fixed length; segment 0 is padding.

    A segment is one context of an episode (Episode.starts): it lies whole in one row. What is
    computed by sequence_ids is computed of episodes, what is computed by segment_ids, of contexts.

    Position t holds token t. `mask[t]` says that token t was drawn and is learnt; its log-prob
    comes from the logits at t - 1. The mask is never set on a segment's first token.

    Where contexts share prefixes (trainer.share_prefixes), a segment may begin at a position s > 0:
    its context has the first s tokens of the context that lies before it in the row.
    """

    token_ids: IntArray  # [rows, length] int32
    positions: IntArray  # [rows, length] int32, place of the token in its context
    segment_ids: IntArray  # [rows, length] int32, from 1 in each row; 0 is padding
    mask: BoolArray  # [rows, length]
    behavior_logprobs: FloatArray  # [rows, length] float32, 0 outside the mask
    versions: IntArray  # [rows, length] int32, NOT_DRAWN outside the mask
    advantages: FloatArray  # [rows, length] float32, 0 outside the mask
    sequence_ids: IntArray  # [rows, length] int32, index of the episode in the step; -1 is padding
    group_ids: IntArray  # [rows, length] int32, index of the group in the step; -1 is padding
    supervised: BoolArray  # [rows, length] tokens of worked answers, learnt by likelihood
    # [rows, length] int32, place of the token in its episode, whose contexts may lie in different
    # rows. None: every episode is one context, and `positions` says it
    offsets: IntArray | None = None
    # [rows, length, ceil(vocab / 8)]: bit v % 8 of byte v / 8 says that token v could be drawn
    # here; all bits are set outside drawn tokens. None: any token (algorithm.keep_sampling_mask)
    kept: Any = None  # uint8; packed, a trainer.sparse_bits.SparseBits, which np.asarray makes so
    # [rows, length, layers, k] int8 or int16: the experts of the token at t; -1 where unknown.
    # None: algorithm.keep_routing is off
    expert_ids: ExpertIds | None = None
    # [rows, length] int32, where in its sequence the image of this token begins; -1: of no image.
    # None: the model reads no images
    image_begins: IntArray | None = None
    embeddings: FloatArray | None = None  # [rows, length, width] of images' tokens; 0 elsewhere

    @property
    def num_tokens(self) -> int:
        """Number of learnt tokens."""
        return int(self.mask.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionedParams:
    """Weights on a sampler's devices, complete and checked, with their version."""

    version: int
    params: Any  # pytree of device arrays; host code never looks inside
    probe_logprobs: Any = (
        None  # [probe] device array, the trainer's log-probs on the probe; None: no probe
    )
    compared: bool = False  # whether every array has the checksum of what was sent


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPriority:
    """The priority of an episode's requests (types.Request.priority), by turn and group."""

    first: int = 0  # level of an episode's first turn
    later: int = 0  # level of the turns after it
    older_first: bool = False  # within a level, groups in the order of their prompts

    def of(self, prompt: Prompt, turn: int) -> tuple[int, int]:
        """Return the priority of a turn's request; turns count from 0."""
        level = self.later if turn else self.first
        return level, prompt.position if self.older_first else 0


BY_ARRIVAL = TurnPriority()
"""All requests in the order in which they came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """Sampling settings and limits of answers."""

    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    max_new_tokens: int  # of one turn
    max_length: int  # of the whole sequence, including prompt and replies
    keep_mask: bool = False  # completions must contain each sampled token's sampling mask
    keep_routing: bool = False  # completions must contain each token's experts
    priority: TurnPriority = BY_ARRIVAL  # of the requests
    for_training: bool = True  # False: of an evaluation
