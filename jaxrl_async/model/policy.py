"""The policy: a decoder, its weights and its tokenizer."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl_async.data.addresses import local_folder
from jaxrl_async.later import Later
from jaxrl_async.mesh import (
    TRAINER_RULES,
    Rules,
    request_cpu_devices,
    shardings,
    skip_absent_accelerators,
)
from jaxrl_async.model.decoder import init_table
from jaxrl_async.model.frozen_base import BaseForm, merged_by_layer, read_base, restored_params
from jaxrl_async.model.hf import (
    OtherContents,
    load_generation,
    load_params,
    load_spec,
    save_generation,
    save_params,
    stored_types,
)
from jaxrl_async.model.lora import Lora, adapter_table, joined, merged_on
from jaxrl_async.model.own_code import load_code
from jaxrl_async.model.quantize import is_quantized
from jaxrl_async.model.spec import ModelSpec, Params, num_weights, weight_table

if TYPE_CHECKING:
    from jaxrl_async.model import peft
    from jaxrl_async.model.vision import files
    from jaxrl_async.model.vision.tower import VisionTower
else:
    peft = Later("jaxrl_async.model.peft")
    files = Later("jaxrl_async.model.vision.files")


class FolderTokenizer:
    """The tokenizer of a Hugging Face directory, as data.tokenizer.Tokenizer; loaded on first use.
    Raises DataError then."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _loaded(self) -> Any:
        from jaxrl_async.data.tokenizer import load_tokenizer  # transformers: imports in seconds

        return load_tokenizer(self._folder)

    def __getattr__(self, name: str) -> Any:
        """Return the loaded tokenizer's attribute."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loaded, name)


@dataclass(frozen=True, slots=True)
class Policy:
    """A decoder with weights: `params`, a dict of arrays in the tree of weight_table. With an
    adapter, `params` is its base, possibly quantised, and `adapter` is in the tree of
    lora.adapter_table."""

    spec: ModelSpec
    params: Any
    tokenizer: Any = None  # a Tokenizer; None: no tokenizer is saved
    generation: Mapping[str, Any] = field(default_factory=dict)  # generation_config.json
    lora: Lora | None = None
    adapter: Any = None
    tower: "VisionTower | None" = None  # of a model with images; saved unchanged
    stored: Mapping[str, str] = field(default_factory=dict)
    """Stored type, by name, of tensors that were read as float32 from a narrower type. A tensor is
    saved in its stored type if that changes no value."""

    @staticmethod
    def from_pretrained(
        folder: str | Path,
        *,
        mesh: Mesh | None = None,
        rules: Rules = TRAINER_RULES,
        dtype: DTypeLike | None = None,
        tokenizer: object = None,
        adapter: str | Path | None = None,
        form: BaseForm | None = None,
        decoder: str | None = None,
    ) -> "Policy":
        """Load a Hugging Face directory, each device reading its own part. Raises CheckpointError,
        and ConfigError for a hub name that is neither cached nor downloadable.

        Args:
            folder: the directory, owner/name on the Hugging Face hub, or FILE.gguf.
            mesh: mesh of the weights; None: the default device.
            rules: sharding of each logical axis on the mesh.
            dtype: of the weights; None: float32, saved in the files' types if that loses nothing.
            tokenizer: None: the directory's, loaded on first use.
            adapter: directory of a LoRA adapter for this model, by PEFT or save_adapter.
            form: form of the base's matrices, under an adapter; None: not quantised.
            decoder: FILE.py:CLASS, the layer class of a user's own layers; its code is executed.
        """
        skip_absent_accelerators()
        if not jax.distributed.is_initialized():
            request_cpu_devices()
        if decoder is not None:
            load_code(decoder, "Policy.from_pretrained: decoder")
        folder = local_folder(str(folder), "folder")
        spec, generation = load_spec(folder), load_generation(folder)
        stored = stored_types(folder, weight_table(spec)) if dtype is None else {}
        dtype = jnp.float32 if dtype is None else dtype
        if tokenizer is None and (folder / "tokenizer.json").is_file():
            tokenizer = FolderTokenizer(folder)

        def shardings_of(table: object) -> Any:
            return None if mesh is None else shardings(table, mesh, rules)

        if form is None:
            params = load_params(folder, spec, shardings_of(weight_table(spec)), dtype)
        else:
            params = read_base(folder, spec, form, mesh, dtype)
        lora, extra = None, None
        if adapter is not None:
            lora, extra = peft.load_peft(adapter, spec, shardings_of, dtype)
        tower = files.read_tower(folder)
        return Policy(spec, params, tokenizer, generation, lora, extra, tower, stored)

    def __repr__(self) -> str:
        """Describe the policy in one line, without its weights."""
        adapter = "" if self.lora is None else f", adapter of rank {self.lora.rank}"
        weights = f"{num_weights(self.spec):,} weights"
        return f"Policy({self.spec.family}, {self.spec.layers} layers, {weights}{adapter})"

    @property
    def trained(self) -> Any:
        """The trained parameters: the adapter if there is one, else all weights."""
        return self.params if self.lora is None else self.adapter

    @property
    def whole(self) -> Any:
        """The parameters for a forward pass: all weights, and an adapter if there is one."""
        return self.params if self.lora is None else joined(self.lora, self.params, self.adapter)

    def with_params(self, params: Params) -> "Policy":
        """Return the policy with other weights (with an adapter: another base)."""
        return dataclasses.replace(self, params=params)

    def with_trained(self, trained: Any) -> "Policy":
        """Return the policy with other trained parameters, see `trained`."""
        name = "params" if self.lora is None else "adapter"
        return dataclasses.replace(self, **{name: trained})

    def adapted(self, lora: Lora, key: Array, where: object = None) -> "Policy":
        """Return the policy with a new adapter, which initially changes nothing.

        Args:
            lora: the adapted matrices.
            key: random key of the adapter.
            where: its shardings (in the tree of lora.adapter_table); None: the default device.
        """
        dtype = self.params["embed"].dtype
        make = jax.jit(
            lambda key: init_table(adapter_table(self.spec, lora), key, dtype), out_shardings=where
        )
        return dataclasses.replace(self, lora=lora, adapter=make(key))

    def merged(self) -> "Policy":
        """Return the policy with its adapter added to the weights."""
        if self.lora is None:
            return self
        base = restored_params(self.spec, self.params)
        shardings = jax.tree.map(lambda w: getattr(w, "sharding", None), base)
        params = merged_on(self.spec, self.lora, shardings)(base, self.adapter)
        return dataclasses.replace(self, params=params, lora=None, adapter=None)

    def save_adapter(self, folder: str | Path, base: str | None = None) -> None:
        """Write only the adapter, in PEFT's format; `base` is the base model's directory or
        name, to be written with it."""
        assert self.lora is not None, "the policy has an adapter"
        peft.save_peft(folder, self.spec, self.lora, self.adapter, base)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a Hugging Face directory that transformers loads: the weights (a quantised base
        dequantised, an adapter merged), the configuration files, the tokenizer and the vision
        tower. Existing weights are replaced. Raises CheckpointError for a folder that contains
        an adapter."""
        if is_quantized(self.params):
            params = merged_by_layer(self.spec, self.lora, self.params, self.adapter or {})
        else:
            params = self.merged().params
        spec, folder = with_special_tokens(self.spec, self.tokenizer), Path(folder)
        tower, others = self.tower, None
        if tower is not None:
            others = OtherContents(
                partial(files.config_with_tower, tower), partial(files.tensors_with_tower, tower)
            )
        save_params(folder, spec, params, others, self.stored)
        if jax.process_index() != 0:
            return
        save_generation(folder, spec, self.generation)
        if tower is not None:
            files.write_preparation(tower, folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)


def with_special_tokens(spec: ModelSpec, tokenizer: Any) -> ModelSpec:
    """Return the spec with the tokenizer's end tokens, bos and pad; tokens that the tokenizer does
    not define are kept."""
    if tokenizer is None:
        return spec
    special = tokenizer.special_ids
    return dataclasses.replace(
        spec,
        eos_ids=tokenizer.eos_ids or spec.eos_ids,
        bos_id=special.get("bos", spec.bos_id),
        pad_id=special.get("pad", spec.pad_id),
    )
