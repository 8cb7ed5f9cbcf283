"""Reading and writing of a vision tower in a Hugging Face directory with its text model."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxrl_async.errors import CheckpointError
from jaxrl_async.model.families.fields import MAX_LAYERS, ConfigFields, shown
from jaxrl_async.model.hf import read_config, read_tensors
from jaxrl_async.model.vision.tower import ENCODER, PROJECTOR, VisionSpec, VisionTower
from jaxrl_async.whole_files import replacing

log = logging.getLogger(__name__)

WITH_TOWER = "gemma3"
"""The model_type whose tower is read."""
PREPARATION = ("preprocessor_config.json", "processor_config.json")
"""Files with the preprocessing settings of images."""
TEXT_PREFIX = "language_model."
"""Prefix of the text model's tensors in a file with a tower."""
OF_TEXT = ("architectures", "text_config", "dtype", "torch_dtype", "transformers_version")
"""Fields of config.json that are not kept but written from the text model."""
MAX_FILE_BYTES = 2**20
"""Maximum size of a file of PREPARATION."""


def vision_spec(folder: Path) -> VisionSpec | None:
    """Return the sizes of a directory's tower. None without a tower, or for models other than
    Gemma 3. Raises CheckpointError."""
    fields = ConfigFields(read_config(folder), str(folder / "config.json"))
    if fields.get("model_type") != WITH_TOWER or not fields.has("vision_config"):
        return None
    vision = fields.part("vision_config")
    kind = vision.get("model_type", "siglip_vision_model")
    activation = vision.get("hidden_act", "gelu_pytorch_tanh")
    if kind != "siglip_vision_model" or activation != "gelu_pytorch_tanh":
        vision.refuse(
            f"vision_config has model_type {shown(kind)} and hidden_act {shown(activation)}; only "
            "siglip_vision_model with gelu_pytorch_tanh is supported."
        )
    spec = VisionSpec(
        width=vision.whole("hidden_size", 768),
        layers=vision.whole("num_hidden_layers", 12, most=MAX_LAYERS),
        heads=vision.whole("num_attention_heads", 12),
        mlp=vision.whole("intermediate_size", 3072),
        image_size=vision.whole("image_size", 224),
        patch=vision.whole("patch_size", 16),
        norm_eps=vision.number("layer_norm_eps", 1e-6),
        tokens=fields.whole("mm_tokens_per_image", 256),
        text_width=fields.part("text_config").whole("hidden_size", 2304),
    )
    if spec.width % spec.heads or round(spec.tokens**0.5) ** 2 != spec.tokens:
        fields.refuse(
            f"vision_config.hidden_size ({spec.width}) must be a multiple of num_attention_heads "
            f"({spec.heads}), and mm_tokens_per_image ({spec.tokens}) a square."
        )
    if spec.patches < round(spec.tokens**0.5):
        fields.refuse(
            f"mm_tokens_per_image ({spec.tokens}) exceeds the {spec.patches**2} patches of an "
            "image (vision_config.image_size, patch_size)."
        )
    return spec


def read_tower(folder: Path) -> VisionTower | None:
    """Read a directory's tower. None without a tower, for models other than Gemma 3, or if the
    files contain only the text part. Raises CheckpointError, also for a missing tensor or a wrong
    shape."""
    spec = vision_spec(folder)
    if spec is None:
        return None
    tensors = {_own_name(name): w for name, w in read_tensors(folder, _is_of_tower).items()}
    if not tensors:
        log.warning("%s: config.json describes a vision tower, but the files lack it", folder)
        return None
    wanted = _shapes(spec)
    wrong = [
        f"{name} {list(shape)}"
        for name, shape in wanted.items()
        if name not in tensors or tensors[name].shape != shape
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"{folder}: its vision tower lacks {', '.join(wrong[:3])}{more}, or their shapes "
            "differ. Copy the directory again."
        )
    files = {n: _text(folder / n) for n in PREPARATION if (folder / n).is_file()}
    config = {k: v for k, v in read_config(folder).items() if k not in OF_TEXT}
    return VisionTower(spec, tensors, config, files)


def config_with_tower(tower: VisionTower, text: Mapping[str, object]) -> dict[str, Any]:
    """Return the config.json of tower and text model, given the text model's."""
    tokens = {key: value for key, value in text.items() if key.endswith("_token_id")}
    return {
        **tower.config,
        **tokens,
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": dict(text),
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


def tensors_with_tower(
    tower: VisionTower, text: Iterator[tuple[str, NDArray[np.generic]]]
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield (name, array) of the text model's tensors, with names for a model with a tower, and of
    the tower's tensors, in their stored types."""
    for name, array in text:
        yield TEXT_PREFIX + name, array
    for name, array in tower.tensors.items():
        yield name, np.ascontiguousarray(array)


def _own_name(name: str) -> str:
    """Return a tensor's name with the prefix ENCODER or PROJECTOR, from its name in a file."""
    name = name.removeprefix("model.")
    if name.startswith("vision_tower.") and not name.startswith(ENCODER):
        return ENCODER + name.removeprefix("vision_tower.")
    return name


def _is_of_tower(name: str) -> bool:
    return name.removeprefix("model.").startswith(("vision_tower.", PROJECTOR))


def _shapes(spec: VisionSpec) -> dict[str, tuple[int, ...]]:
    """Return the expected shapes of the tensors, by name."""
    d, patches = spec.width, spec.patches**2
    shapes: dict[str, tuple[int, ...]] = {
        f"{ENCODER}embeddings.patch_embedding.weight": (d, 3, spec.patch, spec.patch),
        f"{ENCODER}embeddings.patch_embedding.bias": (d,),
        f"{ENCODER}embeddings.position_embedding.weight": (patches, d),
        f"{ENCODER}post_layernorm.weight": (d,),
        f"{ENCODER}post_layernorm.bias": (d,),
        f"{PROJECTOR}mm_soft_emb_norm.weight": (d,),
        f"{PROJECTOR}mm_input_projection_weight": (d, spec.text_width),
    }
    for i in range(spec.layers):
        layer = f"{ENCODER}encoder.layers.{i}."
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes[f"{layer}self_attn.{part}.weight"] = (d, d)
            shapes[f"{layer}self_attn.{part}.bias"] = (d,)
        for norm in ("layer_norm1", "layer_norm2"):
            shapes[f"{layer}{norm}.weight"] = shapes[f"{layer}{norm}.bias"] = (d,)
        shapes[f"{layer}mlp.fc1.weight"] = (spec.mlp, d)
        shapes[f"{layer}mlp.fc1.bias"] = (spec.mlp,)
        shapes[f"{layer}mlp.fc2.weight"] = (d, spec.mlp)
        shapes[f"{layer}mlp.fc2.bias"] = (d,)
    return shapes


def _text(file: Path) -> str:
    with file.open(encoding="utf-8") as stream:
        text = stream.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        raise CheckpointError(f"{file}: exceeds {MAX_FILE_BYTES:,} characters. Copy it again.")
    return text


def write_preparation(tower: VisionTower, folder: Path) -> None:
    """Write the files with the preprocessing settings of images."""
    with replacing(folder) as new:
        for name, text in tower.files.items():
            (new / name).write_text(text, encoding="utf-8")
