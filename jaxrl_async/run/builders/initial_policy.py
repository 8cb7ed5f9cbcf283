"""The tokenizer and the policy that a run begins with, checked before and then loaded or made."""

import functools
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxrl_async.config.schema import Config, DataSection, ModelSection
from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from jaxrl_async.errors import ConfigError
from jaxrl_async.mesh import TRAINER_RULES, Slices, shardings
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.hf import check_params, load_spec
from jaxrl_async.model.moe import check_experts
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec, check_positions, num_weights, weight_table
from jaxrl_async.run.builders.devices import check_fits
from jaxrl_async.trainer.optimizer import optimizer_bytes


def make_tokenizer(data: DataSection, model: ModelSection) -> Tokenizer:
    """Load the configured tokenizer, else the model's; the built-in task has one of its own.

    Raises ConfigError.
    """
    folder = data.tokenizer or model.path
    if folder is not None:
        return load_tokenizer(folder)
    if data.source != "addition":
        raise ConfigError(
            f"data.source={data.source} needs a tokenizer: set data.tokenizer or model.path to a "
            "Hugging Face directory."
        )
    return addition_tokenizer()


def check_model(config: Config, tokenizer: Tokenizer, slices: Slices) -> ModelSpec:
    """Return the policy's spec, from its directory or the configuration, once it fits the devices
    and the tokenizer; no weight is read. Raises CheckpointError, ConfigError, DataError."""
    dtype = jnp.dtype(config.model.param_dtype)
    if config.model.path is not None:
        spec = load_spec(Path(config.model.path))
        check_lengths(config, spec, config.model.path)
        check_params(config.model.path, spec)
    else:
        spec = ModelSpec.from_architecture(
            config.model.architecture,
            config.model.architecture.vocab or _rounded(tokenizer.vocab_size),
        )
        spec = replace(spec, max_positions=max(spec.max_positions, config.row_length))
    beside = 0 if "optimizer" in config.trainer.offload else optimizer_bytes(config.trainer, dtype)
    check_fits(
        num_weights(spec) * (dtype.itemsize + beside),
        slices.trainer,
        "the policy with what its optimizer keeps",
        "Choose a smaller model, or give mesh.trainer more devices.",
    )
    check_experts(spec, slices.trainer, "mesh.trainer")
    for mesh in slices.samplers:
        check_experts(spec, mesh, "mesh.sampler")
    check_vocabulary(tokenizer, spec.vocab, config.model.path or "model.architecture")
    return spec


def _rounded(vocab_size: int, multiple: int = 8) -> int:
    """Round a vocabulary up to a size that tensor axes divide."""
    return -(-vocab_size // multiple) * multiple


def make_policy(config: Config, spec: ModelSpec, tokenizer: Tokenizer, slices: Slices) -> Policy:
    """Load the policy from model.path, or make one with random weights, on the trainer's slice."""
    if config.model.path is not None:
        return load_policy(config.model, config.model.path, slices, tokenizer)
    make = jax.jit(
        functools.partial(init_params, spec, dtype=jnp.dtype(config.model.param_dtype)),
        out_shardings=shardings(weight_table(spec), slices.trainer, TRAINER_RULES),
    )
    return Policy(spec, make(jax.random.key(config.run.seed)), tokenizer)


def load_policy(
    model: ModelSection, path: str, slices: Slices, tokenizer: Tokenizer | None = None
) -> Policy:
    """Load a policy's directory onto the trainer's slice. Raises CheckpointError."""
    return Policy.from_pretrained(
        path,
        mesh=slices.trainer,
        rules=TRAINER_RULES,
        dtype=jnp.dtype(model.param_dtype),
        tokenizer=tokenizer,
    )


def check_lengths(config: Config, spec: ModelSpec, where: str) -> None:
    """Raise ConfigError if the job makes longer sequences than the model at `where` was made for:
    episodes up to sampler.max_length, examples up to a row."""
    check_positions(spec, config.sampler.max_length, "sampler.max_length", where)
    mixes = config.warm_start.steps or config.algorithm.supervised_coefficient
    if config.run.job != "rl" or mixes:
        check_positions(spec, config.row_length, "trainer.row_length", where)
