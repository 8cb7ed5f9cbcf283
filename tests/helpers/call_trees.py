"""Make random trees of calls, as agents make them: turns, retries, rewritten history, sub-agents,
several answers at once, callers that vanish."""

from dataclasses import dataclass

import numpy as np

from jaxrl_async.rollout.call_log import Trace
from jaxrl_async.types import Completion, KeptTokens, StopReason


@dataclass(frozen=True)
class DrawnCall:
    """A call that ended: what the policy saw, and what it drew."""

    prompt: np.ndarray
    completion: Completion


def completion_of(
    name: str, prompt_tokens: int, drawn: np.ndarray, first: int, *, columns: bool = True
) -> Completion:
    """Make a completion whose log-probs are -first, -(first + 1), ...: no other token has them."""
    n = len(drawn)
    numbers = np.arange(first, first + n)
    return Completion(
        request_id=name,
        token_ids=drawn.astype(np.int32),
        logprobs=-numbers.astype(np.float32),
        versions=(numbers // 5).astype(np.int32),
        stop=StopReason.EOS,
        kept=KeptTokens(ids=drawn.astype(np.int32), starts=np.arange(n + 1, dtype=np.int32))
        if columns
        else None,
        expert_ids=np.tile(
            np.arange(prompt_tokens + n - 1, dtype=np.int8)[:, None, None], (1, 2, 1)
        )
        if columns and n
        else None,
    )


def random_trace(
    seed: int, *, calls: int = 8, vocab: int = 3, most: int = 4, one_at_a_time: bool = False
) -> tuple[Trace, dict[int, DrawnCall]]:
    """Return a trace of random calls, and those of them that drew."""
    rng = np.random.default_rng(seed)
    trace, ended, running = Trace(), dict[int, DrawnCall](), list[tuple[int, np.ndarray]]()
    known = [rng.integers(0, vocab, rng.integers(1, most))]  # sequences that an agent may go on
    number = 1

    def end(at: int, *, cancelled: bool) -> None:
        nonlocal number
        call, prompt = running.pop(at)
        drawn = rng.integers(0, vocab, 0 if cancelled else rng.integers(1, most))
        if cancelled and rng.random() < 0.5:
            trace.cancel(call)
            return
        completion = completion_of(f"g0/m0/t{call}", len(prompt), drawn, number)
        trace.end(call, completion)
        number += len(drawn)
        if len(drawn):
            ended[call] = DrawnCall(prompt, completion)
            known.append(np.concatenate([prompt, drawn]))

    while len(ended) < calls:
        history = known[rng.integers(len(known))]
        kind = rng.random()
        if kind < 0.6:  # the next turn, after a reply that may be empty
            prompt = np.concatenate([history, rng.integers(0, vocab, rng.integers(0, most))])
        elif kind < 0.8:  # history rewritten: its beginning, and something else
            cut = rng.integers(0, len(history))
            prompt = np.concatenate([history[:cut], rng.integers(0, vocab, most)])
        else:  # again
            prompt = history
        for _ in range(1 if one_at_a_time else rng.integers(1, 3)):
            running.append((trace.begin(prompt.astype(np.int32)).number, prompt.astype(np.int32)))
        while running and (one_at_a_time or len(running) > 3 or rng.random() < 0.7):
            end(int(rng.integers(len(running))), cancelled=bool(rng.random() < 0.15))
    while running and rng.random() < 0.8:  # the others are still being drawn
        end(0, cancelled=False)
    return trace, ended
