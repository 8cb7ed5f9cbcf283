"""A decoder with a scalar head over its final hidden states instead of logits.

    value     a critic's value of every state; with a bias; initialised to 0; like transformers'
              ...ForTokenClassification with one label
    reward    a reward model's score of a whole sequence; without a bias, which comparisons cannot
              determine; random initialisation; like transformers' ...ForSequenceClassification

Parameters are the decoder's without lm_head, and {"value_head": {"kernel": [D], "bias": [1]}}.
"""

import json
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxrl_async.model.decoder import (
    ON_ONE_DEVICE,
    DecoderSettings,
    TokenRows,
    TokenStates,
    token_states,
)
from jaxrl_async.model.families.family_registry import FAMILIES
from jaxrl_async.model.hf import load_params, load_spec, load_weights, save_weights
from jaxrl_async.model.hf_config import hf_config_of
from jaxrl_async.model.layers import initial
from jaxrl_async.model.logprobs import at_targets
from jaxrl_async.model.spec import ModelSpec, Params, Weight, weight_table

Head = Literal["value", "reward"]
HEAD = "value_head"

log = logging.getLogger(__name__)

_CLASSES = {"value": "TokenClassification", "reward": "SequenceClassification"}
"""Suffixes of transformers' class names, after `For`."""


def head_table(spec: ModelSpec, head: Head) -> dict[str, Any]:
    """Return all weights of a decoder with this head, in the tree of the parameters."""
    backbone = {name: w for name, w in weight_table(spec).items() if name != "lm_head"}
    return {**backbone, HEAD: _scalar_head(spec, head)}


def _scalar_head(spec: ModelSpec, head: Head) -> dict[str, Weight]:
    """Return the head's weights. A reward head's init is normal with variance 1 / (D + 1), Stiennon
    et al. 2020 (arXiv:2009.01325), app. B.1."""
    d = spec.width
    kernel = Weight(
        shape=(d,), axes=("embed",), init="zeros" if head == "value" else "normal",
        decays=True, fan_in=d + 1, hf="score.weight", hf_shape=(1, d),
    )  # fmt: skip
    bias = Weight(
        shape=(1,), axes=("one",), init="zeros", decays=False, hf="score.bias", hf_shape=(1,)
    )
    return {"kernel": kernel, "bias": bias} if head == "value" else {"kernel": kernel}


def with_head(spec: ModelSpec, params: Params, head: Head, key: Array) -> Params:
    """Replace a policy's lm_head by a new head; the other arrays are shared."""
    dtype = params["final_norm"].dtype
    fresh = {
        name: initial(weight, jax.random.fold_in(key, zlib.crc32(name.encode())), dtype)
        for name, weight in _scalar_head(spec, head).items()
    }
    return {**{n: w for n, w in params.items() if n != "lm_head"}, HEAD: fresh}


def token_scores(
    spec: ModelSpec, params: Params, tokens: TokenRows, settings: DecoderSettings = ON_ONE_DEVICE
) -> Array:
    """Return the head's output at each token, computed from the tokens up to it: [B, T] float32;
    arbitrary in padding."""
    return _scored(token_states(spec, params, tokens, settings), params, tokens, settings)


def _scored(
    states: TokenStates, params: Params, tokens: TokenRows, settings: DecoderSettings
) -> Array:
    layout, hidden = settings.layout, states.hidden
    head = {name: w.astype(jnp.float32) for name, w in params[HEAD].items()}
    scores = hidden.astype(jnp.float32) @ layout.gathered(head["kernel"], ("embed",))
    scores = scores + head["bias"] if "bias" in head else scores
    return layout.rows(scores, tokens.token_ids.shape[0])


def token_values(
    spec: ModelSpec, params: Params, tokens: TokenRows, settings: DecoderSettings = ON_ONE_DEVICE
) -> tuple[Array, Array]:
    """Return the value of the state before each token, and, at each segment's last token, of the
    state after it; [B, T] float32 each.

    The state before token t contains the tokens up to t - 1. The positions in the first array are
    as for log-probs: 0 at the start of a segment and in padding. The second array is 0 at all but
    the last tokens.
    """
    scores = token_scores(spec, params, tokens, settings)
    after = jnp.where(last_tokens(tokens.segment_ids), scores, 0.0)
    return at_targets(scores.reshape(-1), tokens.segment_ids), after


def sequence_scores(
    spec: ModelSpec, params: Params, tokens: TokenRows, settings: DecoderSettings = ON_ONE_DEVICE
) -> Array:
    """Return the score of each whole segment at its last token, 0 elsewhere; [B, T] float32."""
    return final_scores(token_states(spec, params, tokens, settings), params, tokens, settings)


def final_scores(
    states: TokenStates, params: Params, tokens: TokenRows, settings: DecoderSettings
) -> Array:
    """Return `sequence_scores` from a decoder's states."""
    scores = _scored(states, params, tokens, settings)
    return jnp.where(last_tokens(tokens.segment_ids), scores, 0.0)


def last_tokens(segment_ids: Array) -> Array:
    """Return [B, T] bool: the last token of each segment."""
    after = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)))
    return (segment_ids > 0) & (segment_ids != after)


# ---- files


def _class_name(spec: ModelSpec, head: Head) -> str:
    """Return transformers' class name for a family's models with this head. If transformers has no
    such class, the name has the same form; only load_head reads it."""
    if spec.own is not None:
        return f"{spec.own.name}For{_CLASSES[head]}"
    family = FAMILIES[spec.family]
    return f"{family.head_classes or family.classes}For{_CLASSES[head]}"


def warn_of_readers(spec: ModelSpec, head: Head) -> None:
    """Log a warning if transformers cannot read a saved model of this family with this head."""
    if spec.own is None and _CLASSES[head] in FAMILIES[spec.family].heads:
        return
    log.warning(
        "transformers has no %s: only this package can read the saved %s model",
        _class_name(spec, head),
        head,
    )


def save_head(folder: str | Path, spec: ModelSpec, params: Params) -> None:
    """Write a Hugging Face directory for transformers' Auto class of the head (if it has one for
    the family), with one label."""
    head: Head = "value" if "bias" in params[HEAD] else "reward"
    warn_of_readers(spec, head)
    config = {
        **hf_config_of(spec),
        "architectures": [_class_name(spec, head)],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "classifier_dropout": 0.0,
    }
    save_weights(folder, config, head_table(spec, head), params, spec.own)


def load_head(
    folder: str | Path, head: Head, shardings: object = None, dtype: DTypeLike = jnp.float32
) -> tuple[ModelSpec, Params]:
    """Load a model of save_head, or of transformers with one label. Raises CheckpointError."""
    spec = load_spec(Path(folder))
    return spec, load_weights(folder, head_table(spec, head), shardings, dtype)


def load_critic(
    folder: str | Path, shardings_of: Callable[[Any], object], dtype: DTypeLike = jnp.float32
) -> tuple[ModelSpec, Params]:
    """Load a critic from a directory of a critic, of a reward model (its head, with bias 0) or of a
    policy (with a new head).

    shardings_of: returns the shardings of a table of weights. Raises CheckpointError.
    """
    spec = load_spec(Path(folder))
    described = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    kind = str(described.get("architectures"))
    if _CLASSES["value"] in kind:
        return spec, load_head(folder, "value", shardings_of(head_table(spec, "value")), dtype)[1]
    if _CLASSES["reward"] in kind:
        where = shardings_of(head_table(spec, "reward"))
        params = load_head(folder, "reward", where, dtype)[1]
        kernel = params[HEAD]["kernel"]
        return spec, {**params, HEAD: {"kernel": kernel, "bias": jnp.zeros((1,), kernel.dtype)}}
    params = load_params(folder, spec, shardings_of(weight_table(spec)), dtype)
    return spec, with_head(spec, params, "value", jax.random.key(0))
