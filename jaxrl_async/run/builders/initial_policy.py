"""The tokenizer and the initial policy of a run: checked first, then loaded or made."""

import functools
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxrl_async.config.schema import Config, DataSection, ModelSection, RunSection
from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.data.tokenizer import (
    Tokenizer,
    chat_tokenizer,
    check_vocabulary,
    load_tokenizer,
)
from jaxrl_async.errors import ConfigError
from jaxrl_async.later import Later
from jaxrl_async.mesh import TRAINER_RULES, Slices, shardings
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.frozen_base import (
    BaseForm,
    base_bytes,
    base_shapes,
    base_table,
    check_groups,
    form_of,
    quantized_base,
)
from jaxrl_async.model.hf import check_params, load_spec
from jaxrl_async.model.lora import adapter_table, lora_of, trained_table
from jaxrl_async.model.moe import check_experts
from jaxrl_async.model.own_code import check_unchanged, load_code
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.quantize import is_quantized
from jaxrl_async.model.spec import ModelSpec, check_positions, num_in, num_weights, weight_table
from jaxrl_async.run.builders.device_memory import check_memory
from jaxrl_async.tasks.task import NO_TASK, Task
from jaxrl_async.trainer.optimizer import optimizer_bytes

if TYPE_CHECKING:
    from jaxrl_async.model import own_spec
    from jaxrl_async.run.builders import base_seal
else:
    own_spec = Later("jaxrl_async.model.own_spec")
    base_seal = Later("jaxrl_async.run.builders.base_seal")

log = logging.getLogger(__name__)

ADAPTER_KEY = 1
"""Folded into the run's seed for an adapter's initial weights."""


def make_tokenizer(data: DataSection, model: ModelSection, task: Task = NO_TASK) -> Tokenizer:
    """Load the configured tokenizer, else the model's; else make one from the task's words or for
    the built-in addition.

    Raises ConfigError.
    """
    folder = data.tokenizer or model.path
    if folder is not None:
        return load_tokenizer(folder)
    if task.words:
        return chat_tokenizer(task.words)
    if task.records is not None:
        raise ConfigError(
            "the task needs a tokenizer: set data.tokenizer or model.path to a Hugging Face "
            "directory, or give the task its own words."
        )
    if data.problems is None:
        raise ConfigError(
            f"data.jsonl.path={data.records_path} needs a tokenizer: set data.tokenizer or "
            "model.path to a Hugging Face directory."
        )
    return addition_tokenizer()


def check_model(config: Config, tokenizer: Tokenizer, slices: Slices) -> ModelSpec:
    """Return the policy's spec, from its directory or the configuration, after checks against the
    devices and the tokenizer; no weight is read. Raises CheckpointError, ConfigError, DataError."""
    dtype = jnp.dtype(config.model.param_dtype)
    spec = spec_of_run(config.model, tokenizer, config.longest_example)
    if config.model.path is not None:
        check_lengths(config, spec, config.model.path)
        check_params(config.model.path, spec)
    if spec.own is not None:
        own_spec.check_numbers(spec)
    moments = 0 if "optimizer" in config.trainer.offload else optimizer_bytes(config.trainer, dtype)
    lora, form = lora_of(spec, config.model.lora), form_of(config.model.lora)
    if form is not None and spec.own is not None:
        own_spec.check_own_base(spec, base_shapes(spec, form, dtype))
    trained = num_in(trained_table(spec, lora)) * (dtype.itemsize + moments)
    frozen = lora is not None and config.model.path is not None
    warmed = num_weights(spec) * (dtype.itemsize + moments)  # a warm start trains all weights
    check_memory(
        base_bytes(spec, form, dtype) + trained if frozen else warmed,
        slices.trainer,
        "the frozen base" if frozen else "the policy with its optimizer's state",
        "Choose a smaller model, or give mesh.trainer more devices.",
    )
    check_experts(spec, slices.trainer, "mesh.trainer")
    check_groups(spec, form, slices.trainer, "mesh.trainer")
    for mesh in slices.samplers:
        check_experts(spec, mesh, "mesh.sampler")
        check_groups(spec, form, mesh, "mesh.sampler")
    check_vocabulary(tokenizer, spec.vocab, config.model.path or "model.architecture")
    return spec


def spec_of_run(model: ModelSection, tokenizer: Tokenizer, longest: int) -> ModelSpec:
    """Return the policy's spec, from its directory or the configuration. Raises CheckpointError and
    ConfigError, also for a policy that has to sample and cannot.

    longest: Config.longest_example, tokens.
    """
    shape, own = model.architecture, model.decoder
    if model.path is not None:
        return decoder_of(model.path, own)
    vocab = shape.vocab or -(-tokenizer.vocab_size // 8) * 8  # tensor axes divide it
    made = own_spec.own_spec(own, shape, vocab) if own else None
    spec = made or ModelSpec.from_architecture(shape, vocab)
    return replace(spec, max_positions=max(spec.max_positions, longest))


def decoder_of(path: str, own: str | None) -> ModelSpec:
    """Return the decoder of a directory, whose layers may be of the user's own class. Raises
    CheckpointError and ConfigError, also if the class is not the directory's."""
    code = load_code(own) if own else None
    spec = load_spec(Path(path))
    if code is not None and spec.own != code:
        raise ConfigError(
            f"model.decoder={own} is not the class of the layers in model.path={path} "
            f"({spec.own.name if spec.own else spec.family}). Leave model.decoder out, or name "
            "the directory that a run of this decoder saved."
        )
    return spec


def make_policy(
    model: ModelSection,
    run: RunSection,
    spec: ModelSpec,
    tokenizer: Tokenizer,
    slices: Slices,
    base: Path,
) -> Policy:
    """Load the policy from model.path, or make one with random weights, on the trainer's slice.

    base: folder in which a resumed run has kept the weights that its adapter changes.
    """
    form = form_of(model.lora)
    resumes_adapter = model.lora is not None and run.resume
    if resumes_adapter:
        base_seal.check_seal(model, base)
    check_unchanged(spec.own, base.parent / "decoder", resumed=run.resume)
    if resumes_adapter and model.path is None:
        return load_policy(model, str(base), slices, tokenizer, form)
    if model.path is not None:
        return load_policy(model, model.path, slices, tokenizer, form)
    make = jax.jit(
        functools.partial(init_params, spec, dtype=jnp.dtype(model.param_dtype)),
        out_shardings=shardings(weight_table(spec), slices.trainer, TRAINER_RULES),
    )
    return Policy(spec, make(jax.random.key(run.seed)), tokenizer)


def with_adapter_of(
    model: ModelSection, run: RunSection, policy: Policy, slices: Slices, base: Path
) -> Policy:
    """Return the policy with a new adapter on a base in the format of model.lora; unchanged if
    model.lora is null.

    base: folder to which a base that is in no directory of the user's is written for a resume.
    """
    policy = with_base_of(model, policy, slices, base, resumed=run.resume)
    return with_new_adapter(model, run.seed, policy, slices)


def with_base_of(
    model: ModelSection, policy: Policy, slices: Slices, base: Path, *, resumed: bool
) -> Policy:
    """Return the policy with its weights in the format of model.lora, as the base of adapters, if
    any; base: see with_adapter_of."""
    form = form_of(model.lora)
    if model.lora is None:
        return policy
    if not resumed:
        if model.path is None and not is_quantized(policy.params):
            policy.save_pretrained(base)
        base_seal.keep_seal(model, base)
    return policy if form is None else _on_quantized_base(policy, form, slices)


def with_new_adapter(model: ModelSection, seed: int, policy: Policy, slices: Slices) -> Policy:
    """Return the policy with a new adapter of model.lora, if that is set. Its initial weights
    depend on the run's seed."""
    lora = lora_of(policy.spec, model.lora)
    if lora is None:
        return policy
    key = jax.random.fold_in(jax.random.key(seed), ADAPTER_KEY)
    where = shardings(adapter_table(policy.spec, lora), slices.trainer, TRAINER_RULES)
    return policy.adapted(lora, key, where)


def _on_quantized_base(policy: Policy, form: BaseForm, slices: Slices) -> Policy:
    """Return the policy with its weights in this format, and log their size."""
    if not is_quantized(policy.params):
        table = base_table(weight_table(policy.spec), form)
        where = shardings(table, slices.trainer, TRAINER_RULES)
        policy = policy.with_params(quantized_base(policy.spec, policy.params, form, where))
    dtype = policy.params["embed"].dtype
    log.info(
        "the frozen base is kept in %s by trainer and samplers: %.1f MiB instead of %.1f",
        form.kind,
        base_bytes(policy.spec, form, dtype) / 2**20,
        base_bytes(policy.spec, None, dtype) / 2**20,
    )
    return policy


def load_policy(
    model: ModelSection,
    path: str,
    slices: Slices,
    tokenizer: Tokenizer | None = None,
    form: BaseForm | None = None,
    adapter: str | None = None,
) -> Policy:
    """Load a policy's directory onto the trainer's slice, its matrices in this format, with an
    adapter from another directory. Raises CheckpointError."""
    return Policy.from_pretrained(
        path,
        mesh=slices.trainer,
        rules=TRAINER_RULES,
        dtype=jnp.dtype(model.param_dtype),
        tokenizer=tokenizer,
        adapter=adapter,
        form=form,
    )


def check_lengths(config: Config, spec: ModelSpec, where: str) -> None:
    """Raise ConfigError if the job makes longer sequences than the model at `where` supports:
    episodes up to sampler.max_length, examples up to a row."""
    check_positions(spec, config.sampler.max_length, "sampler.max_length", where)
    mixes = config.warm_start.steps or config.algorithm.mixes
    if config.run.job != "rl" or mixes:
        check_positions(spec, config.longest_example, "trainer.row_length", where)
