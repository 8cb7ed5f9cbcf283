"""Turns of the policy and its environment, put together as episodes: pure functions. Needs no JAX.

prompt + sampled + reply + sampled + ...   one context; a new opening begins another one
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxrl_async.types import (
    NOT_DRAWN,
    Completion,
    Episode,
    EpisodeLimits,
    ExpertIds,
    FloatArray,
    IntArray,
    KeptTokens,
    Message,
    Score,
    StopReason,
)

NOTHING: IntArray = np.zeros(0, np.int32)
CUT_OFF: Message = {"role": "assistant"}
"""Message of an unfinished turn, to which the environment did not reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of the policy and the environment's reply."""

    completion: Completion
    reply: IntArray  # [reply] int32
    opening: IntArray | None = None  # as Reply.opening: starts a new context after this turn
    reward: float = 0.0  # as Reply.reward
    parts: Mapping[str, float] = field(default_factory=dict)
    opened: tuple[Message, ...] = ()  # as in Reply
    messages: tuple[Message, ...] = ()


def assemble_contexts(
    prompt_ids: IntArray, turns: Sequence[Turn], stop: StopReason, verdict: Score | None = None
) -> Episode:
    """Return all turns as one episode with its score; contexts are concatenated.

    Args:
        prompt_ids: [prompt] int32, the tokens that the first turn continues.
        turns: in order.
        stop: stop reason of the last turn.
        verdict: score of the whole episode, in addition to its turns.
    """
    episodes, begin = [], 0
    for end, turn in enumerate(turns, 1):
        if turn.opening is not None or end == len(turns):
            episodes.append(assemble_episode(prompt_ids, turns[begin:end], stop))
            begin = end
            prompt_ids = prompt_ids if turn.opening is None else turn.opening
    episode = episodes[0] if len(episodes) == 1 else joined_contexts(episodes)
    opened, messages = messages_in(turns)
    score = _score(episode, turns, verdict)
    return replace(episode, score=score, opened=opened, messages=messages)


def messages_in(turns: Sequence[Turn]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Return Episode.opened and Episode.messages of these turns. An unfinished turn has a message
    without content. Both are empty if the environment uses only tokens."""
    if not any(turn.messages for turn in turns):
        return (), ()
    by_turn = [turn.messages or (CUT_OFF,) for turn in turns]
    return turns[0].opened, tuple(message for messages in by_turn for message in messages)


def unplayed_episode(
    opening: IntArray, limits: EpisodeLimits, verdict: Score | None = None
) -> Episode:
    """Return the episode of an opening, [opening] int32, that leaves no room for an answer: its
    first max_length tokens, none of them sampled, cut off (StopReason.LENGTH).

    verdict: score of the episode, if any.
    """
    tokens = np.asarray(opening[: limits.max_length], np.int32)
    episode = assemble_episode(tokens, (), StopReason.LENGTH)
    return replace(episode, score=verdict)


def _score(episode: Episode, turns: Sequence[Turn], verdict: Score | None) -> Score | None:
    """Return the environment's score; None: it gives none.

    The last turn's reward and the verdict apply to the episode. An earlier turn's reward is
    credited to the last token that was sampled in it.
    """
    if verdict is None and not any(turn.reward or turn.parts for turn in turns):
        return None
    parts = Counter[str]()
    for given in (*turns, *(() if verdict is None else (verdict,))):
        for name, value in given.parts.items():
            parts[name] += value
    ends = np.cumsum([len(turn.completion.token_ids) for turn in turns]) - 1
    earlier: FloatArray = np.zeros(len(episode.token_ids), np.float32)
    reward = turns[-1].reward + (0.0 if verdict is None else verdict.reward)
    indices, named = np.flatnonzero(episode.drawn), 0.0
    for turn, end in zip(turns[:-1], ends, strict=False):
        if len(turn.completion.token_ids):
            earlier[indices[end]] += turn.reward
            named += turn.reward if turn.parts else 0.0
        else:
            reward += turn.reward
    return Score(
        reward=float(reward),
        parts=dict(parts),
        token_rewards=earlier if earlier.any() else None,
        named_of_tokens=float(named),
    )


def joined_contexts(episodes: Sequence[Episode]) -> Episode:
    """Join episodes of one context each into one episode with the last one's stop.

    Sampling masks and expert ids are kept only if all contexts with sampled tokens have them.
    """
    sampled = [e for e in episodes if e.num_drawn]
    masks = [e.kept for e in sampled if e.kept is not None]
    routes = [e.expert_ids for e in episodes if e.expert_ids is not None]
    whole = replace(
        episodes[-1],
        token_ids=np.concatenate([e.token_ids for e in episodes]),
        drawn=np.concatenate([e.drawn for e in episodes]),
        logprobs=np.concatenate([e.logprobs for e in episodes]),
        versions=np.concatenate([e.versions for e in episodes]),
        num_turns=sum(e.num_turns for e in episodes),
        kept=None,
        expert_ids=np.concatenate(routes) if len(routes) == len(episodes) else None,
        starts=tuple(int(s) for s in np.cumsum([0, *(len(e.token_ids) for e in episodes[:-1])])),
    )
    return replace(whole, kept=_joined_kept(masks)) if len(masks) == len(sampled) else whole


def current_context(prompt_ids: IntArray, turns: Sequence[Turn]) -> IntArray:
    """Return the tokens that the policy's next turn continues, [length] int32."""
    parts = [prompt_ids]
    for turn in turns:
        if turn.opening is None:
            parts += [turn.completion.token_ids, turn.reply]
        else:
            parts = [turn.opening]
    return np.concatenate(parts).astype(np.int32)


def next_branch(prompt_ids: IntArray, turns: Sequence[Turn]) -> int:
    """Return the next turn's Request.branch; 0 if there is only one context."""
    if all(turn.opening is None for turn in turns):
        return 0
    seen = [current_context(prompt_ids, turns[:end]) for end in range(len(turns) + 1)]
    sampled = [turn.completion.token_ids for turn in turns]
    return branch_after(list(zip(seen, sampled, strict=False)), seen[-1])


def assemble_episode(prompt_ids: IntArray, turns: Sequence[Turn], stop: StopReason) -> Episode:
    """Concatenate the prompt and each turn's sampled tokens and reply into one flat sequence."""
    tokens, drawn = [prompt_ids], [np.zeros(len(prompt_ids), bool)]
    logprobs = [np.zeros(len(prompt_ids), np.float32)]
    versions = [np.full(len(prompt_ids), NOT_DRAWN, np.int32)]
    for turn in turns:
        new, reply = turn.completion, len(turn.reply)
        tokens += [new.token_ids, turn.reply]
        drawn += [np.ones(len(new.token_ids), bool), np.zeros(reply, bool)]
        logprobs += [new.logprobs, np.zeros(reply, np.float32)]
        versions += [new.versions, np.full(reply, NOT_DRAWN, np.int32)]
    return Episode(
        token_ids=np.concatenate(tokens).astype(np.int32),
        drawn=np.concatenate(drawn),
        logprobs=np.concatenate(logprobs).astype(np.float32),
        versions=np.concatenate(versions).astype(np.int32),
        stop=stop,
        num_turns=len(turns),
        kept=_joined_masks([t.completion for t in turns if len(t.completion.token_ids)]),
        expert_ids=_joined_experts(
            [t.completion for t in turns if len(t.completion.token_ids)],
            sum(len(part) for part in tokens),
        ),
    )


def _joined_masks(completions: Sequence[Completion]) -> KeptTokens | None:
    """Join the sampling masks of all sampled tokens; None if no completion has any. Completions
    without masks were sampled from the whole vocabulary (check_kept)."""
    if all(c.kept is None for c in completions):
        return None
    masks = [KeptTokens.whole(len(c.token_ids)) if c.kept is None else c.kept for c in completions]
    return _joined_kept(masks)


def _joined_kept(masks: Sequence[KeptTokens]) -> KeptTokens | None:
    """Concatenate sampling masks; None if there are no masks."""
    return KeptTokens.joined(masks) if masks else None


def _joined_experts(completions: Sequence[Completion], length: int) -> ExpertIds | None:
    """Join the experts of all tokens, [length, layers, k]; None if a completion has none.

    Each turn reports the experts of the whole sequence so far. For tokens of earlier turns, the
    first report is kept, because it is from the passes that sampled them.
    """
    by_turn = [c.expert_ids for c in completions if c.expert_ids is not None]
    if not by_turn or len(by_turn) < len(completions):
        return None
    joined = np.full((length, *by_turn[0].shape[1:]), -1, by_turn[0].dtype)
    known = 0
    for experts in by_turn:
        joined[known : len(experts)] = experts[known:]
        known = max(known, len(experts))
    return joined


# ---- random numbers of later contexts


def context_branch(root: IntArray, earlier: int) -> int:
    """Return a number of at least 1 for a context after the first, to be added to Request.branch,
    so the same position in two contexts uses different random numbers.

    Args:
        root: [root] int32, the tokens that its first request continues.
        earlier: number of the member's earlier requests with the same tokens.
    """
    data = np.asarray(root, np.int32).tobytes() + b"/%d" % earlier
    return 1 + int.from_bytes(hashlib.blake2b(data, digest_size=4).digest()) % 2**30


def branch_after(calls: Sequence[tuple[IntArray, IntArray]], prompt: IntArray) -> int:
    """Return the branch of a request that follows others sequentially, as rollout.call_log.Trace
    computes it.

    Args:
        calls: [prompt] and [sampled] int32 of the earlier requests, in order.
        prompt: [prompt] int32 of this request.
    """
    contexts: list[tuple[IntArray, int]] = []  # tokens and branch of each context
    for number, (now, sampled) in enumerate([*calls, (prompt, prompt[:0])]):
        earlier = sum(np.array_equal(now, before) for before, _ in calls[:number])
        known = [n for n, (c, _) in enumerate(contexts) if np.array_equal(c, now[: len(c)])]
        longest = max(known, key=lambda n: len(contexts[n][0]), default=None)
        new = context_branch(now, earlier) if number else 0
        branch = new if longest is None else contexts.pop(longest)[1]
        contexts.append((np.concatenate([now, sampled]), branch))
    return branch + earlier
