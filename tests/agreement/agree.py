"""What the agreement tests share: arrays, the peer's process, our side, and the comparison.

arrays + cases ──.npz──> worker, in the peer's environment ──.npz──> loss and gradient, theirs
     └──────────> objective.policy_loss and the like, here ────> loss and gradient, ours
"""

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.algorithms import objective
from jaxrl_async.algorithms.advantages import advantage, step_data
from jaxrl_async.algorithms.aggregate import aggregate
from jaxrl_async.algorithms.losses import TokenInputs
from jaxrl_async.config import schema
from jaxrl_async.types import Episode, EpisodeGroup, PackedBatch, Prompt, Score, StopReason, Ticket

HERE = Path(__file__).parent
GROUPS, GROUP, LENGTH, VOCAB, PAIRS = 3, 4, 14, 11, 6
SEQUENCES = GROUPS * GROUP
SEEDS = (7, 8)
TOLERANCE = 1e-5
"""Largest difference over the largest value, of losses and of gradients; all are float32."""

Arrays = dict[str, np.ndarray]
Result = Mapping[str, np.ndarray]

ROWS: list[tuple[str, str, str, float, float]] = []
"""What was measured: function, peer, peer's version, difference of loss and of gradient."""


# ---- the peer's side


def ask(peer: str, cases: Mapping[str, Any], folder: Path) -> dict[int, dict[str, Result]]:
    """Run worker_<peer>.py in the peer's environment; results by seed and case.

    cases: name -> (function of the worker, its settings). Skips where $JAXRL_PEERS names no folder
    of environments; fails where it does and the peer's is not in it.
    """
    home = os.environ.get("JAXRL_PEERS")
    if not home:
        pytest.skip("JAXRL_PEERS is not set: no environments of peers (docs/agreement.md)")
    python = Path(home) / peer / "bin" / "python"
    assert python.exists(), f"no environment {peer!r} in {home}, $JAXRL_PEERS (docs/agreement.md)"
    files = [(folder / f"in_{seed}.npz", folder / f"out_{seed}.npz") for seed in SEEDS]
    for seed, (given, _) in zip(SEEDS, files, strict=True):
        np.savez(given, cases=json.dumps(cases), **arrays(seed))
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
    done = subprocess.run(
        [python, HERE / f"worker_{peer}.py", *(path for pair in files for path in pair)],
        capture_output=True,
        text=True,
        env={**environment, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {seed: _answers(out, cases) for seed, (_, out) in zip(SEEDS, files, strict=True)}


def _answers(path: Path, cases: Mapping[str, Any]) -> dict[str, Result]:
    with np.load(path) as out:
        version = out["version"]
        return {
            name: {"version": version}
            | {k.rsplit("/", 1)[1]: out[k] for k in out.files if k.rsplit("/", 1)[0] == name}
            for name in cases
        }


# ---- the arrays that both see


def arrays(seed: int) -> Arrays:
    """Ragged sequences with tokens that are not drawn among them, and everything said of them."""
    rng = np.random.default_rng(seed)
    shape, logits = (SEQUENCES, LENGTH), (SEQUENCES, LENGTH, VOCAB)
    lengths = rng.integers(2, LENGTH, SEQUENCES)
    lengths[[0, 5]] = LENGTH, 1
    mask = (np.arange(LENGTH) < lengths[:, None]) & (rng.random(shape) < 0.8)
    mask[np.arange(SEQUENCES), lengths - 1] = True
    tokens = rng.integers(1, VOCAB, shape)
    learner, teacher = rng.normal(0, 1.5, (2, *logits))
    policy = _of(tokens, learner)
    pair_lengths = rng.integers(2, LENGTH, 2 * PAIRS)
    pair_mask = (np.arange(LENGTH + 1) <= pair_lengths[:, None]) & (np.arange(LENGTH + 1) > 0)
    pair_policy = -rng.exponential(1.0, (2 * PAIRS, LENGTH))
    pair_logits = rng.normal(0, 1.5, (2 * PAIRS, LENGTH, VOCAB))
    pair_tokens = rng.integers(1, VOCAB, (2 * PAIRS, LENGTH))
    floats = {
        "policy": policy,
        "proximal": policy + rng.normal(0, 0.3, shape),
        "behavior": policy + rng.normal(0, 0.4, shape),
        "reference": policy + rng.normal(0, 0.5, shape),
        "entropy": rng.uniform(0, 2, shape),
        "advantages": rng.normal(0.8, 1, SEQUENCES),
        "token_advantages": rng.normal(0.8, 1, shape),
        "rewards": rng.normal(0, 1, (SEQUENCES, 2)),
        "large_rewards": rng.normal(0, 1e4, (SEQUENCES, 2)),
        "token_rewards": rng.normal(0, 1, shape),
        "values": rng.normal(0, 1, shape),
        "old_values": rng.normal(0, 1, shape),
        "returns": rng.normal(0, 1, shape),
        "logits": learner,
        "teacher_logits": teacher,
        "teacher": _of(tokens, teacher),
        "pair_policy": pair_policy,
        "pair_reference": pair_policy + rng.normal(0, 0.6, pair_policy.shape),
        "pair_logits": pair_logits,
        "pair_logits_reference": _of(pair_tokens, pair_logits)
        + rng.normal(0, 0.3, pair_policy.shape),
        "stranger_policy": rng.normal(-20, 3, 2 * PAIRS),
        "stranger_reference": rng.normal(-25, 3, 2 * PAIRS),
        "means": -rng.exponential(1.0, 2 * PAIRS) - 0.05,
        "pair_rewards": rng.normal(0, 1, 2 * PAIRS),
        "margin": rng.uniform(0, 1, PAIRS),
    }
    return {k: v.astype(np.float32) for k, v in floats.items()} | {
        "mask": mask,
        "lengths": lengths,
        "tokens": tokens,
        "group_size": np.array(GROUP),
        "pair_mask": pair_mask,
        "pair_drawn": pair_mask[:, 1:],
        "pair_single": np.arange(LENGTH) == pair_lengths[:, None] - 1,
        "pair_tokens": pair_tokens,
        "good": rng.random(2 * PAIRS) < 0.6,
    }


def without_tokens(a: Arrays, sequence: int) -> Arrays:
    """The same with nothing to learn in one of the sequences."""
    mask = a["mask"].copy()
    mask[sequence] = False
    return {**a, "mask": mask}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def _of(tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Log-probs of the tokens; [..., vocab] -> [...]."""
    return np.take_along_axis(log_softmax(logits), tokens[..., None], -1)[..., 0]


# ---- our side


def policy_loss(a: Arrays, *, behavior: str = "proximal", **algorithm: Any) -> dict[str, Any]:
    """objective.policy_loss of the configuration: loss, gradient by the policy's log-probs.

    Two sequences share a row, as packing would have it. behavior: which array drew the tokens; the
    weights at the start of the step are always `proximal`.
    """
    return value_and_gradient(policy_function(a, behavior, algorithm), a["policy"])


def value_and_gradient(function: Callable[..., jax.Array], at: np.ndarray) -> dict[str, Any]:
    """What `agree` wants to see of a function of one array."""
    loss, gradient = jax.value_and_grad(function)(jnp.asarray(at))
    return {"loss": loss, "gradient": gradient}


def policy_function(
    a: Arrays, behavior: str, algorithm: Mapping[str, Any]
) -> Callable[..., jax.Array]:
    """(policy log-probs, entropy; [sequences, length]) -> loss."""
    settings = schema.AlgorithmSection(**{"correction": "none", **algorithm})
    recipe, batch = objective.make_recipe(settings), packed(a)
    weights = jnp.asarray(aggregate.resolve(settings.aggregate)(batch))
    per_token = a["advantages"] if a["advantages"].ndim == 2 else a["advantages"][:, None]

    def loss(logprobs: jax.Array, entropy: jax.Array | None = None) -> jax.Array:
        x = TokenInputs(
            policy_logprobs=_rows(logprobs),
            behavior_logprobs=_rows(a[behavior]),
            advantages=_rows(np.broadcast_to(per_token, a["mask"].shape)),
            mask=_rows(a["mask"]),
            versions=jnp.zeros(batch.mask.shape, jnp.int32),
            entropy=_rows(a["entropy"] if entropy is None else entropy),
            reference_logprobs=_rows(a["reference"]),
            proximal_logprobs=_rows(a["proximal"]),
            segment_ids=jnp.asarray(batch.segment_ids),
        )
        return objective.policy_loss(recipe, x, weights, jnp.int32(0))[0]

    return loss


def packed(a: Arrays) -> PackedBatch:
    """Two sequences in a row, padding behind each."""
    sequences, length = a["mask"].shape
    there = np.arange(length) < a["lengths"][:, None]
    numbers = np.arange(sequences)[:, None]
    filled = {
        name: np.zeros((sequences // 2, 2 * length), dtype)
        for name, dtype in (
            ("token_ids", np.int32),
            ("positions", np.int32),
            ("behavior_logprobs", np.float32),
            ("versions", np.int32),
            ("advantages", np.float32),
            ("supervised", np.bool_),
        )
    }
    return PackedBatch(
        mask=np.asarray(_rows(a["mask"])),
        segment_ids=np.asarray(_rows(np.where(there, 1 + numbers % 2, 0))),
        sequence_ids=np.asarray(_rows(np.where(there, numbers, -1))),
        group_ids=np.asarray(_rows(np.where(there, numbers // GROUP, -1))),
        **filled,
    )


def _rows(values: Any) -> jax.Array:
    """[sequences, length] -> [sequences / 2, 2 length]."""
    return jnp.asarray(values).reshape(values.shape[0] // 2, -1)


def our_advantages(a: Arrays, choice: Any, *, rewards: np.ndarray, **parts: Any) -> Any:
    """An estimator's answer for groups of the arrays' sequences.

    rewards: [sequences]; parts: `named` [sequences, parts], `token_rewards` and `values`
    [sequences, length].
    """
    named, values = parts.get("named"), parts.get("values")
    told = parts.get("token_rewards")
    episodes = [_episode(m[:n]) for m, n in zip(a["mask"], a["lengths"], strict=True)]
    scores = [
        Score(
            reward=float(r),
            parts={} if named is None else {str(k): float(v) for k, v in enumerate(named[i])},
            token_rewards=None if told is None else told[i, : a["lengths"][i]],
        )
        for i, r in enumerate(rewards)
    ]
    size = len(scores) // GROUPS
    prompt = Prompt(prompt_id=0, position=0, token_ids=np.zeros(1, np.int32), text="", reference="")
    groups = [
        EpisodeGroup(
            prompt=prompt,
            episodes=tuple(episodes[g * size : (g + 1) * size]),
            scores=tuple(scores[g * size : (g + 1) * size]),
            ticket=Ticket(group=g, version=0),
        )
        for g in range(GROUPS)
    ]
    if values is not None:
        cut = [v[:n] for v, n in zip(values, a["lengths"], strict=True)]
        values = [cut[g * size : (g + 1) * size] for g in range(GROUPS)]
    return advantage.resolve(choice)(step_data(groups, values))


def _episode(mask: np.ndarray) -> Episode:
    return Episode(
        token_ids=np.ones(len(mask), np.int32),
        drawn=mask,
        logprobs=np.zeros(len(mask), np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        stop=StopReason.EOS,
    )


def padded(per_token: Any) -> np.ndarray:
    """Per group, per episode [length] -> [sequences, LENGTH]."""
    flat = [np.pad(v, (0, LENGTH - len(v))) for of_group in per_token for v in of_group]
    return np.stack(flat)


def per_sequence(per_token: Any) -> np.ndarray:
    """The one value of each episode's drawn tokens; the last token is always drawn."""
    return np.array([v[-1] for of_group in per_token for v in of_group])


# ---- the comparison


def difference(ours: Any, theirs: Any) -> float:
    """max |ours - theirs| / max |theirs|."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape, f"{ours.shape} is not {theirs.shape}"
    assert np.abs(theirs).max() > 1e-3, "nothing to compare: all is about 0"
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def agree(
    name: str, peer: str, ours: Mapping[str, Any], theirs: Result, *, factor: float = 1.0
) -> None:
    """Loss and gradient, where there are any, are the peer's times a known factor."""
    found = {
        key: difference(ours[key], factor * theirs[key])
        for key in ("loss", "gradient")
        if key in ours
    }
    nothing = float("nan")
    ROWS.append(
        (name, peer, str(theirs["version"]), found.get("loss", nothing),
         found.get("gradient", nothing))
    )  # fmt: skip
    assert found and all(d < TOLERANCE for d in found.values()), f"{name}, {peer}: {found}"


def table() -> list[str]:
    """Rows of a table: the functions of each peer, and the largest difference of any."""
    lines = []
    for peer, version in sorted({row[1:3] for row in ROWS}):
        of_peer = [row for row in ROWS if row[1:3] == (peer, version)]
        given = {row[0] for row in of_peer if not row[0].startswith("converted")}  # the same again
        names = ", ".join(f"`{name}`" for name in sorted(given))
        cells = [
            "" if np.isnan(c).all() else f"{np.nanmax(c):.0e}".replace("0e+00", "0")
            for c in np.array([row[3:] for row in of_peer]).T
        ]
        lines.append("| " + " | ".join([names, peer, version, *cells]) + " |")
    return lines
