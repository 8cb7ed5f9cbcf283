"""What defines a decoder: its sizes, its family's variations, and each weight declared once.

Shape suffixes in this package: B batch, T query tokens, S cache positions, D model width, H query
heads, N key/value heads, K head width, F MLP width, V vocabulary, L layers.
"""

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jaxrl_async.config import schema
from jaxrl_async.errors import CheckpointError, ConfigError

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe"]
Init = Literal["normal", "ones", "zeros"]

MAX_SIZE = 2**31 - 1
"""Largest size or token id in a config.json."""
MAX_LAYERS = 10_000
MAX_NUMBER = 1e30
"""Upper bound of the other numbers in a config.json."""
EXPERT_AXES = {
    "gate": ("expert", "embed", "mlp"),
    "up": ("expert", "embed", "mlp"),
    "down": ("expert", "mlp", "embed"),
}
"""Logical axes of a layer's experts."""
SCALE = "_scale"
"""Ending of the names of the scales of 8-bit weights, see quantize.py."""
COPY_AGAIN = "Copy the file again, or correct it."

Params = Any
"""Arrays, or their shapes, in the tree of a table of weights: nested dicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's scaling of the low frequencies (Llama 3.1 model card; transformers' `llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything that defines a decoder's function, except its weights."""

    family: Family
    vocab: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    tied: bool
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    attention_bias: bool = False  # on q, k, v (qwen2), and on o too for llama
    output_bias: bool = False  # on o
    qk_norm: bool = False
    experts: int = 0  # in each layer, each mlp wide; 0: dense
    experts_per_token: int = 0
    max_positions: int = 32_768
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None

    @staticmethod
    def from_architecture(architecture: schema.ArchitectureSection, vocab_size: int) -> "ModelSpec":
        """Return the decoder that a configuration describes."""
        a = architecture
        return ModelSpec(
            family=a.family,
            vocab=vocab_size,
            layers=a.layers,
            width=a.width,
            heads=a.heads,
            kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            mlp=a.mlp,
            tied=a.tied,
            rope_theta=a.rope_theta,
            attention_bias=a.family == "qwen2",
            qk_norm=a.family in ("qwen3", "qwen3_moe"),
            experts=a.experts,
            experts_per_token=a.experts_per_token if a.experts else 0,
        )

    @staticmethod
    def from_hf_config(config: Mapping[str, Any], where: str) -> "ModelSpec":
        """Return the decoder that a Hugging Face config.json describes. Raises CheckpointError,
        which names the field that is not supported."""
        family: Any = config.get("model_type")
        if family not in get_args(Family):
            raise CheckpointError(
                f"{where}: model_type {_show(family)} is not supported. Use a model of "
                f"{', '.join(get_args(Family))}."
            )
        _refuse_unsupported(config, where)
        whole = functools.partial(_whole, config, where=where)
        heads, width = whole("num_attention_heads"), whole("hidden_size")
        routed = family == "qwen3_moe"
        attention_bias = family == "qwen2" or bool(config.get("attention_bias"))
        theta, scaling = _rope(config, where)
        spec = ModelSpec(
            family=family,
            vocab=whole("vocab_size"),
            layers=whole("num_hidden_layers", most=MAX_LAYERS),
            width=width,
            heads=heads,
            kv_heads=whole("num_key_value_heads", default=heads),
            head_dim=whole("head_dim", default=width // heads),
            mlp=whole("moe_intermediate_size" if routed else "intermediate_size"),
            experts=_experts(config, where) if routed else 0,
            experts_per_token=whole("num_experts_per_tok") if routed else 0,
            tied=bool(config.get("tie_word_embeddings", False)),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=_number(config, "rms_norm_eps", where, 1e-6),
            attention_bias=attention_bias,
            output_bias=attention_bias and family != "qwen2",
            qk_norm=family in ("qwen3", "qwen3_moe"),
            max_positions=whole("max_position_embeddings", default=32_768),
            eos_ids=_ids(config, "eos_token_id", where),
            bos_id=next(iter(_ids(config, "bos_token_id", where)), None),
            pad_id=next(iter(_ids(config, "pad_token_id", where)), None),
        )
        if spec.heads % spec.kv_heads or spec.head_dim % 2:
            raise CheckpointError(
                f"{where}: num_attention_heads ({spec.heads}) must be a multiple of "
                f"num_key_value_heads ({spec.kv_heads}), and head_dim ({spec.head_dim}) even. "
                + COPY_AGAIN
            )
        return spec

    def is_like(self, other: "ModelSpec") -> bool:
        """Return whether both compute the same function of the same weights; special tokens and
        max_positions may differ."""
        words: dict[str, Any] = {"max_positions": 1, "eos_ids": (), "bos_id": None, "pad_id": None}
        return dataclasses.replace(self, **words) == dataclasses.replace(other, **words)

    def token_ids(self) -> dict[str, Any]:
        """Return the special tokens as config.json and generation_config.json name them."""
        eos: Any = list(self.eos_ids) if len(self.eos_ids) > 1 else next(iter(self.eos_ids), None)
        return {"eos_token_id": eos, "bos_token_id": self.bos_id, "pad_token_id": self.pad_id}

    def to_hf_config(self) -> dict[str, Any]:
        """Return a config.json that transformers loads."""
        names = {
            "llama": "LlamaForCausalLM",
            "qwen2": "Qwen2ForCausalLM",
            "qwen3": "Qwen3ForCausalLM",
            "qwen3_moe": "Qwen3MoeForCausalLM",
        }
        rope: dict[str, Any] = {"rope_theta": self.rope_theta, "rope_type": "default"}
        if self.rope_scaling:
            s = self.rope_scaling
            rope |= {
                "rope_type": "llama3",
                "factor": s.factor,
                "low_freq_factor": s.low_freq_factor,
                "high_freq_factor": s.high_freq_factor,
                "original_max_position_embeddings": s.original_max_positions,
            }
        config: dict[str, Any] = {
            "architectures": [names[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab,
            "num_hidden_layers": self.layers,
            "hidden_size": self.width,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.mlp,
            "tie_word_embeddings": self.tied,
            "rope_theta": self.rope_theta,
            "rope_parameters": rope,
            "rms_norm_eps": self.norm_eps,
            "attention_bias": self.attention_bias,
            "max_position_embeddings": self.max_positions,
            "hidden_act": "silu",
            **self.token_ids(),
        }
        if self.rope_scaling:
            config["rope_scaling"] = rope
        if self.experts:
            config |= {
                "num_experts": self.experts,
                "num_experts_per_tok": self.experts_per_token,
                "moe_intermediate_size": self.mlp,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        return config


def check_positions(spec: ModelSpec, length: int, setting: str, where: str) -> None:
    """Raise ConfigError if a setting allows longer sequences than the model was trained for.

    Rotary positions can be computed for any length, but a model's behaviour at positions that it
    has never seen is unknown.
    """
    if length > spec.max_positions:
        raise ConfigError(
            f"{setting} ({length}) is more than the max_position_embeddings ({spec.max_positions}) "
            f"of {where}. Lower the first; or raise the second in the model's config.json if "
            "the model is known to work beyond it."
        )


def _refuse_unsupported(config: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError for a feature that the decoder does not have."""
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"{where}: hidden_act {_show(config['hidden_act'])} is not supported, only silu."
        )
    if config.get("use_sliding_window") or "sliding_attention" in str(config.get("layer_types")):
        raise CheckpointError(
            f"{where}: sliding-window attention (use_sliding_window) is not supported. Set it to "
            "false if the context fits the window."
        )
    if config.get("mlp_bias"):
        raise CheckpointError(f"{where}: mlp_bias is not supported.")
    if config["model_type"] != "qwen3_moe":
        return
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise CheckpointError(
            f"{where}: layers without experts (mlp_only_layers, decoder_sparse_step) are not "
            "supported in a mixture of experts."
        )
    if not config.get("norm_topk_prob"):
        raise CheckpointError(
            f"{where}: norm_topk_prob=false is not supported: the weights of a token's experts "
            "must sum to 1."
        )


def _experts(config: Mapping[str, Any], where: str) -> int:
    """Return the experts in a layer. Raises CheckpointError if a token would use more."""
    key = "num_local_experts" if "num_experts" not in config else "num_experts"
    experts, chosen = (_whole(config, name, where=where) for name in (key, "num_experts_per_tok"))
    if chosen > experts:
        raise CheckpointError(
            f"{where}: num_experts_per_tok ({chosen}) is more than {key} ({experts}). {COPY_AGAIN}"
        )
    return experts


def _rope(config: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """Return theta and scaling, from the old or the new form of config.json."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"{where}: rope_parameters must be a JSON object. {COPY_AGAIN}")
    theta = _number(rope if rope.get("rope_theta") else config, "rope_theta", where, 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise CheckpointError(
            f"{where}: rope scaling {_show(kind)} is not supported, only default and llama3."
        )
    return theta, RopeScaling(
        factor=_number(rope, "factor", where),
        low_freq_factor=_number(rope, "low_freq_factor", where),
        high_freq_factor=_number(rope, "high_freq_factor", where),
        original_max_positions=_whole(rope, "original_max_position_embeddings", where=where),
    )


def _whole(
    config: Mapping[str, Any],
    key: str,
    *,
    where: str,
    default: int | None = None,
    most: int = MAX_SIZE,
) -> int:
    """Return a size from a config.json; null counts as missing. Raises CheckpointError."""
    value: Any = default if config.get(key) is None else config[key]
    if type(value) is not int or not 1 <= value <= most:
        raise _wrong(config, key, where, f"a whole number from 1 to {most}")
    return value


def _number(config: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    """Return a positive number from a config.json; null counts as missing. Raises
    CheckpointError."""
    value: Any = default if config.get(key) is None else config[key]
    if type(value) not in (int, float) or not 0 < value < MAX_NUMBER:
        raise _wrong(config, key, where, f"a number above 0 and below {MAX_NUMBER:g}")
    return float(value)


def _ids(config: Mapping[str, Any], key: str, where: str) -> tuple[int, ...]:
    """Return token ids from a config.json: none, one or several. Raises CheckpointError."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(i) is not int or not 0 <= i <= MAX_SIZE for i in ids):
        raise _wrong(config, key, where, "a token id, a list of them or null")
    return tuple(ids)


def _wrong(config: Mapping[str, Any], key: str, where: str, wanted: str) -> CheckpointError:
    said = f"{key} = {_show(config[key])}" if key in config else f"{key} is missing; it"
    return CheckpointError(f"{where}: {said} must be {wanted}. {COPY_AGAIN}")


def _show(value: Any) -> str:
    """Return a JSON value as text, shortened."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One parameter, declared once: init, sharding, manifest and file names are derived from it."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Init
    fan_in: int = 1  # for normal: the standard deviation is fan_in ** -0.5
    hf: str = ""  # name in a Hugging Face file, with {layer} and {expert} if stacked over those
    hf_shape: tuple[int, ...] = ()  # shape of one there, as stored (a Linear stores [out, in])

    @property
    def stacked(self) -> int:
        """Number of leading dimensions that count matrices: layers and experts."""
        names = itertools.takewhile(lambda axis: axis in ("layers", "expert"), self.axes)
        return len(tuple(names))


def contracted(weight: Weight) -> range:
    """Return the dimensions of a layer's stacked matrix that are summed over in its product: those
    after the stacked ones that make up fan_in."""
    start = stop = weight.stacked
    while math.prod(weight.shape[start:stop]) < weight.fan_in:
        stop += 1
    return range(start, stop)


def weight_table(spec: ModelSpec) -> dict[str, Any]:
    """Return every weight of the decoder, in the tree of the parameters."""
    d, v = spec.width, spec.vocab
    table: dict[str, Any] = {
        "embed": Weight(
            shape=(v, d), axes=("vocab", "embed"), init="normal", fan_in=d,
            hf="model.embed_tokens.weight", hf_shape=(v, d),
        ),
        "layers": {
            name: Weight(
                shape=(spec.layers, *w.shape), axes=("layers", *w.axes), init=w.init,
                fan_in=w.fan_in, hf=f"model.layers.{{layer}}.{w.hf}", hf_shape=w.hf_shape,
            )
            for name, w in _layer_table(spec).items()
        },
        "final_norm": Weight(
            shape=(d,), axes=("embed",), init="ones", hf="model.norm.weight", hf_shape=(d,)
        ),
    }  # fmt: skip
    if not spec.tied:
        table["lm_head"] = Weight(
            shape=(d, v), axes=("embed", "vocab"), init="normal", fan_in=d,
            hf="lm_head.weight", hf_shape=(v, d),
        )  # fmt: skip
    return table


def num_weights(spec: ModelSpec) -> int:
    """Return how many numbers the decoder's weights have."""
    table = weight_table(spec)
    weights = [*table.pop("layers").values(), *table.values()]
    return sum(math.prod(weight.shape) for weight in weights)


def _layer_table(spec: ModelSpec) -> dict[str, Weight]:
    """Return the weights of one layer."""
    d, f, h, n, k = spec.width, spec.mlp, spec.heads, spec.kv_heads, spec.head_dim

    def norm(size: int, axis: str, hf: str) -> Weight:
        return Weight(shape=(size,), axes=(axis,), init="ones", hf=hf, hf_shape=(size,))

    def project(heads: int, axis: str, hf: str) -> Weight:
        return Weight(
            shape=(d, heads, k), axes=("embed", axis, "head_dim"), init="normal", fan_in=d,
            hf=f"self_attn.{hf}.weight", hf_shape=(heads * k, d),
        )  # fmt: skip

    def bias(heads: int, axis: str, hf: str) -> Weight:
        return Weight(
            shape=(heads, k), axes=(axis, "head_dim"), init="zeros",
            hf=f"self_attn.{hf}.bias", hf_shape=(heads * k,),
        )  # fmt: skip

    table = {
        "attn_norm": norm(d, "embed", "input_layernorm.weight"),
        "q": project(h, "heads", "q_proj"),
        "k": project(n, "kv_heads", "k_proj"),
        "v": project(n, "kv_heads", "v_proj"),
        "o": Weight(
            shape=(h, k, d), axes=("heads", "head_dim", "embed"), init="normal", fan_in=h * k,
            hf="self_attn.o_proj.weight", hf_shape=(d, h * k),
        ),
        "mlp_norm": norm(d, "embed", "post_attention_layernorm.weight"),
        "gate": Weight(
            shape=(d, f), axes=("embed", "mlp"), init="normal", fan_in=d,
            hf="mlp.gate_proj.weight", hf_shape=(f, d),
        ),
        "up": Weight(
            shape=(d, f), axes=("embed", "mlp"), init="normal", fan_in=d,
            hf="mlp.up_proj.weight", hf_shape=(f, d),
        ),
        "down": Weight(
            shape=(f, d), axes=("mlp", "embed"), init="normal", fan_in=f,
            hf="mlp.down_proj.weight", hf_shape=(d, f),
        ),
    }  # fmt: skip
    if spec.experts:
        table |= _expert_table(spec)
    if spec.attention_bias:
        table |= {
            "q_bias": bias(h, "heads", "q_proj"),
            "k_bias": bias(n, "kv_heads", "k_proj"),
            "v_bias": bias(n, "kv_heads", "v_proj"),
        }
    if spec.output_bias:
        table["o_bias"] = Weight(
            shape=(d,), axes=("embed",), init="zeros", hf="self_attn.o_proj.bias", hf_shape=(d,)
        )
    if spec.qk_norm:
        table |= {
            "q_norm": norm(k, "head_dim", "self_attn.q_norm.weight"),
            "k_norm": norm(k, "head_dim", "self_attn.k_norm.weight"),
        }
    return table


def _expert_table(spec: ModelSpec) -> dict[str, Weight]:
    """Return one layer's router and experts, which replace its MLP."""
    d, f, e = spec.width, spec.mlp, spec.experts
    shapes = {"gate": (e, d, f), "up": (e, d, f), "down": (e, f, d)}
    experts = {
        name: Weight(
            shape=shape, axes=EXPERT_AXES[name], init="normal", fan_in=shape[1],
            hf=f"mlp.experts.{{expert}}.{name}_proj.weight", hf_shape=(shape[2], shape[1]),
        )
        for name, shape in shapes.items()
    }  # fmt: skip
    router = Weight(
        shape=(d, e), axes=("embed", "router"), init="normal", fan_in=d,
        hf="mlp.gate.weight", hf_shape=(e, d),
    )  # fmt: skip
    return {**experts, "router": router}
