"""Weights that are read and never trained, of reference and teacher, and checks that their tokens
are the policy's."""

import logging
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxrl_async.config.schema import Config, ModelSection
from jaxrl_async.data.tokenizer import Tokenizer, check_same_tokens
from jaxrl_async.errors import ConfigError
from jaxrl_async.mesh import TRAINER_RULES, Slices, shardings
from jaxrl_async.model.hf import check_params, load_spec
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec, Params, Weight, weight_table
from jaxrl_async.run.builders.initial_policy import check_lengths, load_policy
from jaxrl_async.trainer.frozen_models import copied

log = logging.getLogger(__name__)


def check_frozen(config: Config) -> None:
    """Check every directory of frozen weights before anything is trained. Raises CheckpointError,
    ConfigError."""
    refers = config.run.job == "rl" and config.refers
    of_policies = [
        *config.teacher_folders.values(),
        config.reference_settings.path if refers else None,
        config.preference.reference,
    ]
    for path in [*of_policies, config.critic_settings.path]:
        if path is None:
            continue
        spec = load_spec(Path(path))
        if path in of_policies:  # a critic's weights have another head
            check_params(path, spec)
        check_lengths(config, spec, path)


def check_advisers(config: Config, spec: ModelSpec, tokenizer: Tokenizer) -> None:
    """Raise ConfigError if teacher or critic have other tokens than the policy."""
    others = {f"teachers.{n}.path" for n, t in config.named_teachers.items() if t.tokenizer}
    paths: dict[str, str | None] = {"critic.path": config.critic_settings.path}
    paths |= {k: path for k, path in config.teacher_folders.items() if k not in others}
    for setting, path in paths.items():
        if path is not None:
            vocab = load_spec(Path(path)).vocab
            check_shared_tokens(spec, tokenizer, path, vocab, setting)


def check_shared_tokens(
    spec: ModelSpec, tokenizer: Tokenizer, path: str, vocab: int, setting: str
) -> None:
    """Raise ConfigError if ids mean other tokens to the model in `path` than to the policy.

    Vocabularies of one family may be padded to different sizes; then only tokenizers show it.

    Args:
        spec: of the policy.
        tokenizer: of the policy.
        path: the other model's directory.
        vocab: size of its vocabulary.
        setting: the setting that names it.
    """
    sizes = (
        f"{setting}={path} has a vocabulary of {vocab} tokens and the policy one of {spec.vocab}"
    )
    if (Path(path) / "tokenizer.json").is_file():
        common = min(vocab, spec.vocab)
        check_same_tokens(tokenizer, path, common, f"{setting}={path}")
        if vocab != spec.vocab:
            log.info("%s; the first %d, which both have, are compared", sizes, common)
    elif vocab != spec.vocab:
        raise ConfigError(
            f"{sizes}, and without a tokenizer.json it is unknown whether their ids mean the same "
            "tokens. Put the model's tokenizer there, or choose a model of the same family."
        )
    else:
        log.info(
            "%s=%s has no tokenizer.json: its tokens are assumed to be the policy's", setting, path
        )


def reference_params(
    model: ModelSection, key: str, path: str | None, policy: Policy, slices: Slices
) -> Params:
    """Load frozen weights of the policy's kind from `path`; None: copy the policy's trained
    weights, which are only the adapter if it has one.

    key: the setting that names the directory. Raises CheckpointError, ConfigError.
    """
    if path is None:
        return copied(policy.trained)
    other = load_policy(model, path, slices)
    if not other.spec.is_like(policy.spec):
        raise ConfigError(
            f"{key}={path} is another kind of model than the policy: {other.spec} and "
            f"{policy.spec}. A reference is an older policy, with the same config.json; null uses "
            "the policy at the start. A model of another shape can be a teacher (teacher.path)."
        )
    return other.params


def cut_vocabulary(spec: ModelSpec, params: Params, fewer: ModelSpec, mesh: Mesh) -> Params:
    """Remove a model's last tokens: the others share all probability.

    fewer: the model's spec, with the smaller vocabulary.
    """
    if spec == fewer:
        return params
    table = weight_table(fewer)

    def cut(weight: Weight, values: jax.Array) -> jax.Array:
        return values[tuple(slice(n) for n in weight.shape)]

    def cut_all(tree: Params) -> Params:
        return jax.tree.map(cut, table, tree, is_leaf=lambda w: isinstance(w, Weight))

    return jax.jit(cut_all, out_shardings=shardings(table, mesh, TRAINER_RULES))(params)
