"""Load a run's policy from its folder, whether the run has ended, is running or was killed."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_async.config.load import load
from jaxrl_async.config.schema import Config
from jaxrl_async.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl_async.errors import CheckpointError, ConfigError
from jaxrl_async.model.frozen_base import form_of
from jaxrl_async.model.hf import load_generation, read_adapter_config
from jaxrl_async.model.lora import lora_of
from jaxrl_async.model.peft import load_peft
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.vision.files import read_tower
from jaxrl_async.run import model_card
from jaxrl_async.run.builders.initial_policy import make_tokenizer, spec_of_run
from jaxrl_async.run.builders.playing import tasks_of, tokenizer_source
from jaxrl_async.run.checkpoint.storage import place_of
from jaxrl_async.run.checkpoint.store import read_lora, read_trained
from jaxrl_async.run.folder import Paths


class Written(NamedTuple):
    """What was written."""

    policy: Policy
    base: str | None  # of an adapter that was written alone


def policy_at_end(paths: Paths, dtype: str | None, decoder: str | None) -> Policy:
    """Load the policy that a run has written at its end, with an adapter's changes added. Raises
    CheckpointError.

    dtype: of the weights; None: as they were written.
    """
    folder = paths.policy
    if not folder.is_dir():
        config = load(paths.config)
        steps = place_of(config.checkpoint, config.run.name, paths).steps()
        instead = (
            f"use a checkpoint: --step, one of {', '.join(map(str, steps))}"
            if steps
            else "no checkpoint exists either"
        )
        if paths.reward_model.is_dir():
            instead = f"it trained a reward model, which is in {paths.reward_model}"
        raise CheckpointError(f"{folder} does not exist: the run wrote no policy; {instead}.")
    return Policy.from_pretrained(folder, dtype=dtype or dtype_of(folder), decoder=decoder)


def policy_at_step(
    paths: Paths,
    step: int,
    dtype: str | None,
    *,
    adapter_only: bool = False,
    tokenizer: Tokenizer | None = None,
    within_run: bool = False,
) -> Policy:
    """Load the policy of a checkpoint: all weights, or an adapter on its base. Raises
    CheckpointError and the errors of loading the run's configuration and task.

    Args:
        paths: the run's.
        step: of the checkpoint.
        dtype: of the weights; None: model.param_dtype.
        adapter_only: leave an adapter's base out (params is None); all weights have none.
        tokenizer: the run's; None: it is read, or made again.
        within_run: the run continues in this process: read to the host's memory instead of a
            device, and do not compare checksums, which the writer of the checkpoint did.
    """
    config = load(paths.config)
    place = place_of(config.checkpoint, config.run.name, paths)
    steps = place.steps()
    if config.run.job == "reward_model":
        raise CheckpointError(f"{paths.root} trains a reward model: its checkpoints have no policy")
    if step not in steps:
        raise CheckpointError(
            f"{place.directory}: no checkpoint of step {step}; existing steps: "
            f"{', '.join(map(str, steps)) or 'none'}."
        )
    tokenizer = tokenizer or _tokenizer_of(config, paths)
    spec = spec_of_run(config.model, tokenizer, config.longest_example)
    kind = dtype or config.model.param_dtype
    trained = read_trained(place, step, kind, on_host=within_run, verify=not within_run)
    # A refused start may have written another config.yaml.
    section = read_lora(place, step, config.model.lora)
    lora = lora_of(spec, section)
    if lora is None:
        path = config.model.path
        if path is None:
            return Policy(spec, trained, tokenizer, {})
        own = load_generation(Path(path))
        return Policy(spec, trained, tokenizer, own, tower=read_tower(Path(path)))
    if adapter_only:
        return Policy(spec, None, tokenizer, lora=lora, adapter=trained)
    base = Policy.from_pretrained(
        config.model.path or paths.base,
        dtype=kind,
        tokenizer=tokenizer,
        form=form_of(section),
        decoder=config.model.decoder,
    )
    return dataclasses.replace(base, lora=lora, adapter=trained)


def write_step(
    paths: Paths,
    step: int,
    out: Path,
    dtype: str | None = None,
    *,
    adapter_only: bool = False,
    tokenizer: Tokenizer | None = None,
    within_run: bool = False,
) -> Written:
    """Write the policy of a checkpoint as a Hugging Face directory with its card, or its adapter
    alone in PEFT's format. Raises the errors of policy_at_step, and ConfigError if there is no
    adapter; arguments as its.

    out: the directory; the card is its README.md.
    """
    policy = policy_at_step(
        paths, step, dtype, adapter_only=adapter_only, tokenizer=tokenizer, within_run=within_run
    )
    base = None
    if adapter_only:
        if policy.lora is None:
            raise ConfigError(f"--adapter-only: {paths.root} trains all weights.")
        base = load(paths.config).model.path or str(paths.base)
        policy.save_adapter(out, base)
    else:
        policy.save_pretrained(out)
    card = model_card.model_card(paths, step=step, adapter=adapter_only)
    (out / "README.md").write_text(card, encoding="utf-8")
    return Written(policy, base)


def adapter_at_end(paths: Paths, dtype: str | None) -> tuple[Policy, str | None]:
    """Load a run's final adapter, on the merged policy's spec and without its weights; also return
    the name of its base. Raises CheckpointError."""
    if not paths.adapter.is_dir():
        raise CheckpointError(
            f"{paths.adapter} does not exist: the run trains all weights (model.lora=null), or did "
            "not end. Leave out --adapter-only, or give --step."
        )
    policy = Policy.from_pretrained(paths.policy, dtype=dtype or "float32")
    lora, adapter = load_peft(paths.adapter, policy.spec, dtype=dtype or "float32")
    base = read_adapter_config(paths.adapter).get("base_model_name_or_path")
    return dataclasses.replace(policy, lora=lora, adapter=adapter), base


def dtype_of(folder: Path) -> str:
    """Return the data type of a Hugging Face directory's weights; float32 if it names none."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "float32"  # loading the directory reports the error
    named = config.get("dtype") or config.get("torch_dtype")
    return named if named in ("float32", "bfloat16") else "float32"


def _tokenizer_of(config: Config, paths: Paths) -> Tokenizer:
    for folder in (paths.policy, paths.base):
        if (folder / "tokenizer.json").is_file():
            return load_tokenizer(folder)
    data, task = tokenizer_source(config, tasks_of(config))
    return make_tokenizer(data, config.model, task)
