"""The definition of a decoder: its sizes, its family's variations, and the table of its weights.

Shape suffixes in this package: B batch, T query tokens, S cache positions, D model width, H query
heads, N key/value heads, K head width, F MLP width, V vocabulary, L layers.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxrl_async.config import schema
from jaxrl_async.errors import ConfigError
from jaxrl_async.model.families.family_registry import FAMILIES
from jaxrl_async.model.families.fields import ConfigFields
from jaxrl_async.model.families.layer_types import read_pattern
from jaxrl_async.model.families.parts import (
    DENSE_STACK,
    LINEAR_STACK,
    UNSCALED,
    USUAL_ROUTER,
    Activation,
    DeltaNet,
    ExpertRouter,
    Latent,
    LayerKind,
    LayerRun,
    Mixture,
    NormPlaces,
    QkNorm,
    Rope,
    RopeScaling,
    Scales,
    runs_of,
)
from jaxrl_async.model.own_code import OwnCode, class_of

Init = Literal["normal", "ones", "zeros", "uniform", "narrow", "off"]
"""Initialisation of a weight; uniform, narrow and off are for adapters, see lora.py."""

EXPERT_AXES = {
    "gate": ("expert", "embed", "mlp"),
    "up": ("expert", "embed", "mlp"),
    "down": ("expert", "mlp", "embed"),
}
"""Logical axes of a layer's experts."""
BIAS = "_bias"
"""Suffix of the names of biases."""
SCALE = "_scale"
"""Suffix of the names of the scales of 8-bit weights, see quantize.py."""
LORA_A, LORA_B = "_lora_a", "_lora_b"
"""Suffixes of the names of an adapter's matrices, see lora.py."""
LORA_DROP = "lora_drop"
"""Name of the dropout keys of a layer's adapter in an update, see lora.py."""
LORA_OWN = "lora_own"
"""Name, among a layer's weights, of the adapter columns of each row, see adapter_stack.py."""
ROWS_USED = "rows_used"
"""Name, among the weights of a layer or the head, of a mask [n] bool of the valid tokens; padding
and finished rows need not be computed."""

Params = Any
"""Arrays or their shapes, in the tree of a table of weights: nested dicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The definition of a decoder's function, without its weights."""

    family: str  # a label: its record (families.registry) only maps the weights' names in files
    vocab: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    tied: bool
    pattern: tuple[LayerKind, ...] = (LayerKind(),)
    """The kinds of the layers; layer i has pattern[i % len(pattern)]."""
    scales: Scales = UNSCALED
    activation: Activation = "silu"
    norms: NormPlaces = "before"
    norm_offset: bool = False  # norms multiply with 1 + weight
    norm_eps: float = 1e-6
    qk_norm: QkNorm = "none"
    attention_bias: bool = False  # on q, k, v
    output_bias: bool = False  # on o
    sinks: bool = False  # each head has an additional logit without a token
    latent: Latent | None = None  # None: no latent attention
    delta: DeltaNet | None = None  # of the layers of LINEAR_STACK; None: no such layers
    attention_gated: bool = False  # attention's output is multiplied by a sigmoid gate of x
    experts: int = 0  # per layer that is not dense, each of width mlp; 0: no experts
    experts_per_token: int = 0
    router: ExpertRouter = USUAL_ROUTER
    expert_biases: bool = False
    shared_mlp: int = 0  # inner width of the shared expert; 0: no shared expert
    shared_gated: bool = False  # the shared expert is weighed by a sigmoid gate
    dense_mlp: int = 0  # inner width of the layers of DENSE_STACK, which have no experts
    max_positions: int = 32_768
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None
    own: OwnCode | None = None  # the user's class of layers, see own_layer.py; None: a family's

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer."""
        return tuple(self.pattern[i % len(self.pattern)] for i in range(self.layers))

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with experts."""
        kinds = enumerate(self.kinds if self.experts else ())
        return tuple(i for i, kind in kinds if kind.stack != DENSE_STACK)

    @property
    def mixture(self) -> Mixture:
        """The description of the experts in a config.json."""
        dense = (i for i, kind in enumerate(self.kinds) if kind.stack == DENSE_STACK)
        return Mixture(
            router=self.router,
            width=self.mlp,
            shared_width=self.shared_mlp,
            dense_layers=tuple(dense),
        )

    @property
    def runs(self) -> list[LayerRun]:
        """The layers as runs of a repeated pattern, one loop per run."""
        return runs_of(self.kinds)

    @property
    def rotary_dim(self) -> int:
        """Components of a head to which Rope.share applies."""
        return self.latent.rotated if self.latent else self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.latent.value if self.latent else self.head_dim

    @property
    def cached_shape(self) -> tuple[int, int, int]:
        """The shape of a token's cache entry in each layer: keys and values (2) or one vector for
        both (1), number of heads, width."""
        if self.latent is None:
            return 2, self.kv_heads, self.head_dim
        return 1, 1, self.latent.rank + self.latent.rotated

    @property
    def stacks(self) -> dict[str, tuple[int, ...]]:
        """The numbers of the layers in each stack of weights."""
        kinds = self.kinds
        names = dict.fromkeys(kind.stack for kind in kinds)
        return {n: tuple(i for i, k in enumerate(kinds) if k.stack == n) for n in names}

    @property
    def in_stacks(self) -> list[tuple[str, int]]:
        """Each layer's stack of weights, and its number there."""
        found = {i: (s, n) for s, numbers in self.stacks.items() for n, i in enumerate(numbers)}
        return [found[i] for i in range(self.layers)]

    @staticmethod
    def from_architecture(architecture: schema.ArchitectureSection, vocab_size: int) -> "ModelSpec":
        """Return the decoder of a configuration. Raises ConfigError."""
        a, family = architecture, FAMILIES[architecture.family]
        fields = ConfigFields(_as_hf(a), "model.architecture")
        pattern = read_pattern(family, fields, a.layers)
        if a.window and not any(kind.window for kind in pattern):
            raise ConfigError(
                f"model.architecture.window={a.window}: none of the {a.layers} layers of family="
                f"{a.family} has a window. Remove it, or choose another family."
            )
        latent = family.latent(fields)
        return ModelSpec(
            family=a.family,
            vocab=vocab_size,
            layers=a.layers,
            width=a.width,
            heads=a.heads,
            kv_heads=a.heads if latent else a.kv_heads,
            head_dim=a.head_dim,
            mlp=a.mlp,
            tied=a.tied,
            pattern=pattern,
            latent=latent,
            delta=family.delta(fields),
            attention_gated=family.attention_gated,
            scales=family.scales(fields),
            activation=family.activation,
            norms=family.norms,
            norm_offset=family.norm_offset,
            norm_eps=family.norm_eps,
            qk_norm=family.qk_norm,
            attention_bias=family.biases == "qkv",
            sinks=family.sinks,
            experts=a.experts,
            experts_per_token=a.experts_per_token if a.experts else 0,
            router=family.router(fields),
            expert_biases=family.expert_biases,
            shared_mlp=family.shared_width(fields),
            shared_gated=family.shared_gated,
            dense_mlp=a.mlp if any(kind.stack == DENSE_STACK for kind in pattern) else 0,
        )

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> "ModelSpec":
        """Return the spec from its dataclasses.asdict, as sent over a connection. Raises TypeError
        or ValueError for other fields."""
        pattern = tuple(_kind(kind) for kind in fields["pattern"])
        scales = Scales(**fields["scales"])
        ends = tuple(fields["eos_ids"])
        own = None if fields.get("own") is None else OwnCode(**fields["own"])
        router = ExpertRouter(**fields["router"])
        read: dict[str, Any] = {"pattern": pattern, "scales": scales, "eos_ids": ends, "own": own}
        read["router"] = router
        read["delta"] = None if fields.get("delta") is None else DeltaNet(**fields["delta"])
        read["latent"] = None if fields.get("latent") is None else Latent(**fields["latent"])
        return ModelSpec(**{**fields, **read})

    def is_like(self, other: "ModelSpec") -> bool:
        """Return whether both compute the same function with the same weights; special tokens and
        max_positions may differ."""
        words: dict[str, Any] = {"max_positions": 1, "eos_ids": (), "bos_id": None, "pad_id": None}
        return dataclasses.replace(self, **words) == dataclasses.replace(other, **words)

    def token_ids(self) -> dict[str, Any]:
        """Return the special tokens by their names in config.json and generation_config.json."""
        eos: Any = list(self.eos_ids) if len(self.eos_ids) > 1 else next(iter(self.eos_ids), None)
        return {"eos_token_id": eos, "bos_token_id": self.bos_id, "pad_token_id": self.pad_id}


def check_positions(spec: ModelSpec, length: int, setting: str, where: str) -> None:
    """Raise ConfigError if a setting allows longer sequences than the model was trained for.

    Rotary positions can be computed for any length, but a model's behaviour at positions beyond its
    training is unknown.
    """
    if length > spec.max_positions:
        raise ConfigError(
            f"{setting} ({length}) is more than the max_position_embeddings ({spec.max_positions}) "
            f"of {where}. Lower the former, or raise the latter in the model's config.json if "
            "the model is known to work beyond it."
        )


def _as_hf(a: schema.ArchitectureSection) -> dict[str, Any]:
    """Return the config.json of a configuration's model. Scores are scaled by the head width;
    families with other scales use a published model's."""
    return {
        "hidden_size": a.width,
        "rope_theta": a.rope_theta,
        "sliding_window": a.window,
        "use_sliding_window": a.window is not None,
        "max_window_layers": a.layers if a.family == "qwen2_moe" else 0,  # the first; the last
        "query_pre_attn_scalar": a.head_dim,
        "norm_topk_prob": True,
        "n_routed_experts": a.experts,
        "moe_intermediate_size": a.mlp,
        "shared_expert_intermediate_size": a.mlp,
        "attention_multiplier": a.head_dim**-0.5,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 4 * a.head_dim,
        "kv_lora_rank": 2 * a.head_dim,
        "qk_rope_head_dim": (rotated := a.head_dim // 4 * 2),
        "qk_nope_head_dim": a.head_dim - rotated,
        "v_head_dim": a.head_dim - rotated,
        "linear_num_key_heads": a.kv_heads,
        "linear_num_value_heads": a.heads,
        "linear_key_head_dim": a.head_dim,
        "linear_value_head_dim": a.head_dim,
    }


def _kind(fields: Mapping[str, Any]) -> LayerKind:
    """Return a kind of layer from its fields."""
    rope = fields["rope"]
    if rope is not None:
        scaling = rope["scaling"]
        if scaling is not None:
            factors = {n: tuple(scaling[n]) for n in ("short_factors", "long_factors")}
            scaling = RopeScaling(**{**scaling, **factors})
        rope = Rope(**{**rope, "scaling": scaling})
    return LayerKind(**{**fields, "rope": rope})


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """The declaration of a parameter, for its init, sharding, manifest and names in files."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Init
    decays: bool | None = None
    """Whether weight decay applies: to matrices, not to norms and biases. None, for a user's own
    weights: if the initial values are random."""
    fan_in: int = 1  # fan_in ** -0.5 is the standard deviation (normal) or the bound (uniform)
    hf: str = ""  # name in a Hugging Face file, with {layer} and {expert} for stacked dimensions
    hf_shape: tuple[int, ...] = ()  # shape of one tensor in the file (a Linear stores [out, in])
    hf_rows: tuple[int, int] | None = None
    """Range of the rows with this weight, end exclusive; hf_shape counts all. None: all."""
    hf_columns: tuple[int, int] | None = None
    """Range of its columns, with hf_rows; the other columns are 0 in these rows."""
    hf_every: tuple[int, int] | None = None
    """Start and step in the last dimension of a tensor with all experts of a layer, stacked as
    here. None: files hold experts one by one, or the weight is not an expert's."""
    numbers: tuple[int, ...] = ()
    """The numbers of the stacked layers, for names in files."""

    @property
    def is_decayed(self) -> bool:
        """Whether weight decay applies."""
        return self.init not in ("ones", "zeros") if self.decays is None else self.decays

    @property
    def stacked(self) -> int:
        """Number of leading dimensions that count matrices: layers and experts."""
        names = itertools.takewhile(lambda axis: axis in ("layers", "expert"), self.axes)
        return len(tuple(names))


def named(weight: Weight) -> int:
    """Return the number of leading dimensions whose entries have separate names in files."""
    return weight.stacked if weight.hf_every is None else weight.axes.index("expert")


def contracted(weight: Weight) -> range:
    """Return the dimensions of a layer's stacked matrix that its product sums over: the ones after
    the stacked dimensions whose sizes multiply to fan_in."""
    start = stop = weight.stacked
    while math.prod(weight.shape[start:stop]) < weight.fan_in:
        stop += 1
    return range(start, stop)


def weight_table(spec: ModelSpec) -> dict[str, Any]:
    """Return all weights of the decoder, in the tree of the parameters: the stacks of layers by
    name (LayerKind.stack), and the rest."""
    d, v = spec.width, spec.vocab
    table: dict[str, Any] = {
        "embed": Weight(
            shape=(v, d), axes=("vocab", "embed"), init="normal", decays=True, fan_in=d,
            hf="model.embed_tokens.weight", hf_shape=(v, d),
        ),
        **{stack: _stacked(spec, stack, numbers) for stack, numbers in spec.stacks.items()},
        "final_norm": Weight(
            shape=(d,), axes=("embed",), init=_of_norms(spec), decays=False,
            hf="model.norm.weight", hf_shape=(d,),
        ),
    }  # fmt: skip
    if not spec.tied:
        table["lm_head"] = Weight(
            shape=(d, v), axes=("embed", "vocab"), init="normal", decays=True, fan_in=d,
            hf="lm_head.weight", hf_shape=(v, d),
        )  # fmt: skip
    return table if spec.own is None else table | _outer_table(spec, spec.own)


def is_stack(name: str) -> bool:
    """Return whether a name in the tree of parameters is a stack of layers' weights."""
    return name.endswith("layers")


def stacks_in(tree: Mapping[str, object]) -> list[str]:
    """Return the names of the stacks of layers' weights in a tree of parameters, or in a table."""
    return [name for name in tree if is_stack(name)]


def num_weights(spec: ModelSpec) -> int:
    """Return the number of parameters of the decoder."""
    return num_in(weight_table(spec))


def num_in(table: dict[str, Any]) -> int:
    """Return the number of parameters in a table of weights."""
    stacked = [w for stack in stacks_in(table) for w in table[stack].values()]
    rest = [weight for name, weight in table.items() if not is_stack(name)]
    return sum(math.prod(weight.shape) for weight in [*stacked, *rest])


def _stacked(spec: ModelSpec, stack: str, numbers: tuple[int, ...]) -> dict[str, Weight]:
    """Return the weights of a stack, for the layers with these numbers."""
    return {
        name: dataclasses.replace(
            w,
            shape=(len(numbers), *w.shape),
            axes=("layers", *w.axes),
            hf=f"model.layers.{{layer}}.{w.hf}",
            numbers=numbers,
        )
        for name, w in layer_table(spec, stack).items()
    }


def layer_table(spec: ModelSpec, stack: str = "layers") -> dict[str, Weight]:
    """Return the weights of one layer of a stack."""
    if spec.own is not None:
        return {name: _of_own(name, w) for name, w in class_of(spec.own).weights(spec).items()}
    if spec.experts and stack != DENSE_STACK:
        inner = _expert_table(spec) | _router_table(spec)
        if spec.shared_mlp:
            inner |= _mlp_table(spec, spec.shared_mlp, "shared_")
    else:
        inner = _mlp_table(spec, spec.dense_mlp if stack == DENSE_STACK else spec.mlp)
    norms = _norm_table(spec)
    if stack == LINEAR_STACK and spec.delta:
        norms = {name: w for name, w in norms.items() if name not in ("q_norm", "k_norm")}
        return delta_table(spec, spec.delta) | norms | inner
    return _attention_table(spec) | norms | inner


def _of_own(name: str, weight: Weight) -> Weight:
    """Return a weight of a user's own layer with its name in files: a matrix is stored as
    [outputs, inputs], anything else flat."""
    size = math.prod(weight.shape)
    matrix = weight.init == "normal"
    stored = (size // weight.fan_in, weight.fan_in) if matrix else (size,)
    return dataclasses.replace(weight, hf=f"{name}.weight", hf_shape=stored)


def _outer_table(spec: ModelSpec, own: OwnCode) -> dict[str, Weight]:
    """Return the weights of a user's own decoder outside its layers; stored flat."""
    return {
        name: dataclasses.replace(w, hf=f"model.{name}.weight", hf_shape=(math.prod(w.shape),))
        for name, w in class_of(own).outer_weights(spec).items()
    }


def _of_norms(spec: ModelSpec) -> Init:
    return "zeros" if spec.norm_offset else "ones"


def _module(spec: ModelSpec, weight: str) -> str:
    """Return the name of a layer's module in files of the spec's family."""
    return FAMILIES[spec.family].module(weight)


def _norm_table(spec: ModelSpec) -> dict[str, Weight]:
    """Return the norms of one layer."""
    d, k = spec.width, spec.head_dim

    def norm(name: str, axes: tuple[str, ...], *shape: int) -> Weight:
        return Weight(
            shape=shape, axes=axes, init=_of_norms(spec), decays=False,
            hf=f"{_module(spec, name)}.weight", hf_shape=(math.prod(shape),),
        )  # fmt: skip

    suffixes = {"before": ("",), "both": ("", "_out"), "after": ("_out",)}[spec.norms]
    names = [f"{part}{suffix}_norm" for part in ("attn", "mlp") for suffix in suffixes]
    table = {name: norm(name, ("embed",), d) for name in names}
    if spec.qk_norm == "head":
        table |= {name: norm(name, ("head_dim",), k) for name in ("q_norm", "k_norm")}
    if spec.qk_norm == "whole":
        table["q_norm"] = norm("q_norm", ("heads", "head_dim"), spec.heads, k)
        table["k_norm"] = norm("k_norm", ("kv_heads", "head_dim"), spec.kv_heads, k)
    return table


def _attention_table(spec: ModelSpec) -> dict[str, Weight]:
    """Return one layer's attention projections and their biases."""
    if spec.latent:
        return latent_table(spec, spec.latent)
    d, h, n, k = spec.width, spec.heads, spec.kv_heads, spec.head_dim
    heads = {"q": (h, "heads"), "k": (n, "kv_heads"), "v": (n, "kv_heads")}
    table: dict[str, Weight] = {}
    first = 0
    joined = FAMILIES[spec.family].joins
    for name, (count, axis) in heads.items():
        rows = (first, first + count * k) if joined else None
        module = "self_attn.qkv_proj" if joined else _module(spec, name)
        wide = 2 * k if spec.attention_gated and name == "q" else k  # each head, then its gate
        stored = (h + 2 * n) * k if joined else count * wide
        table[name] = Weight(
            shape=(d, count, wide), axes=("embed", axis, "head_dim"), init="normal", decays=True,
            fan_in=d, hf=f"{module}.weight", hf_shape=(stored, d), hf_rows=rows,
        )  # fmt: skip
        if spec.attention_bias:
            table[name + "_bias"] = Weight(
                shape=(count, k), axes=(axis, "head_dim"), init="zeros", decays=False,
                hf=f"{module}.bias", hf_shape=(stored,), hf_rows=rows,
            )  # fmt: skip
        first += count * k
    table["o"] = Weight(
        shape=(h, k, d), axes=("heads", "head_dim", "embed"), init="normal", decays=True,
        fan_in=h * k, hf=f"{_module(spec, 'o')}.weight", hf_shape=(d, h * k),
    )  # fmt: skip
    if spec.sinks:
        table["sinks"] = Weight(
            shape=(h,),
            axes=("heads",),
            init="zeros",
            decays=False,
            hf=_module(spec, "sinks"),
            hf_shape=(h,),
        )
    if spec.output_bias:
        table["o_bias"] = Weight(
            shape=(d,), axes=("embed",), init="zeros", decays=False,
            hf=f"{_module(spec, 'o')}.bias", hf_shape=(d,),
        )  # fmt: skip
    return table


def delta_table(spec: ModelSpec, delta: DeltaNet) -> dict[str, Weight]:
    """Return one layer's gated delta net (delta.py)."""
    d, heads, values = spec.width, delta.key_heads, delta.value_heads
    narrow, wide = delta.key_width, delta.value_width
    sizes = {"q": (heads, narrow), "k": (heads, narrow), "v": (values, wide)}
    channels = sum(math.prod(size) for size in sizes.values())

    def matrix(name: str, *shape: int, stored: int = 0, first: int = 0) -> Weight:
        size = math.prod(shape)
        return Weight(
            shape=(d, *shape), axes=("embed", "heads", "head_dim")[: 1 + len(shape)],
            init="normal", decays=True, fan_in=d, hf=f"{_module(spec, name)}.weight",
            hf_shape=(stored or size, d), hf_rows=(first, first + size) if stored else None,
        )  # fmt: skip

    def vector(name: str, axis: str, size: int, init: Init, ending: str = "") -> Weight:
        module = _module(spec, name) + ending
        return Weight(
            shape=(size,), axes=(axis,), init=init, decays=False, hf=module, hf_shape=(size,)
        )

    if delta.grouped:
        together = delta.shared_by
        table = {
            "delta_qkvz": matrix("delta_qkvz", heads, 2 * (narrow + together * wide)),
            "delta_ba": matrix("delta_ba", heads, 2 * together),
        }
    else:
        table = {
            "delta_z": matrix("delta_z", values, wide),
            "delta_b": matrix("delta_b", values),
            "delta_a": matrix("delta_a", values),
        }
    first = 0
    for name, (count, width) in sizes.items():
        last = first + count * width
        if not delta.grouped:
            table["delta_" + name] = matrix(
                "delta_" + name, count, width, stored=channels, first=first
            )
        table["delta_conv_" + name] = Weight(
            shape=(count, width, delta.kernel), axes=("heads", "head_dim", ""), init="uniform",
            decays=True, fan_in=delta.kernel, hf=f"{_module(spec, 'delta_conv')}.weight",
            hf_shape=(channels, 1, delta.kernel), hf_rows=(first, last),
        )  # fmt: skip
        first = last
    return table | {
        "delta_rate": vector("delta_rate", "heads", values, "zeros"),
        "delta_shift": vector("delta_shift", "heads", values, "ones"),
        "delta_norm": vector("delta_norm", "head_dim", wide, "ones", ".weight"),
        "delta_out": Weight(
            shape=(values, wide, d), axes=("heads", "head_dim", "embed"), init="normal",
            decays=True, fan_in=values * wide, hf=f"{_module(spec, 'delta_out')}.weight",
            hf_shape=(d, values * wide),
        ),
    }  # fmt: skip


def latent_table(spec: ModelSpec, latent: Latent) -> dict[str, Weight]:
    """Return one layer's latent attention projections and the norms between them."""
    d, h, k, value = spec.width, spec.heads, spec.head_dim, latent.value

    def matrix(name: str, axes: tuple[str, ...], *shape: int, inputs: int) -> Weight:
        outputs = math.prod(shape) // inputs
        return Weight(
            shape=shape, axes=axes, init="normal", decays=True, fan_in=inputs,
            hf=f"{_module(spec, name)}.weight", hf_shape=(outputs, inputs),
        )  # fmt: skip

    def norm(name: str, width: int) -> Weight:
        return Weight(
            shape=(width,), axes=("latent",), init="ones", decays=False,
            hf=f"{_module(spec, name)}.weight", hf_shape=(width,),
        )  # fmt: skip

    of_head, rank, low = ("heads", "head_dim"), latent.rank, latent.query_rank
    queries = {"q": matrix("q", ("embed", *of_head), d, h, k, inputs=d)}
    if low:
        queries = {
            "q_a": matrix("q_a", ("embed", "latent"), d, low, inputs=d),
            "q_a_norm": norm("q_a_norm", low),
            "q_b": matrix("q_b", ("latent", *of_head), low, h, k, inputs=low),
        }
    wide = k - latent.rotated + value
    return {
        **queries,
        "kv_a": matrix("kv_a", ("embed", "latent"), d, rank + latent.rotated, inputs=d),
        "kv_a_norm": norm("kv_a_norm", rank),
        "kv_b": matrix("kv_b", ("latent", *of_head), rank, h, wide, inputs=rank),
        "o": matrix("o", (*of_head, "embed"), h, value, d, inputs=h * value),
    }


def _mlp_table(spec: ModelSpec, f: int, prefix: str = "") -> dict[str, Weight]:
    """Return one layer's MLP of this inner width; prefix: prefix of its matrices' names."""
    d = spec.width
    table: dict[str, Weight] = {}
    joined = FAMILIES[spec.family].joins
    for i, name in enumerate(("gate", "up")):
        module = "mlp.gate_up_proj" if joined else _module(spec, prefix + name)
        table[prefix + name] = Weight(
            shape=(d, f), axes=("embed", "mlp"), init="normal", decays=True, fan_in=d,
            hf=f"{module}.weight", hf_shape=(2 * f if joined else f, d),
            hf_rows=(i * f, i * f + f) if joined else None,
        )  # fmt: skip
    table[prefix + "down"] = Weight(
        shape=(f, d), axes=("mlp", "embed"), init="normal", decays=True, fan_in=f,
        hf=f"{_module(spec, prefix + 'down')}.weight", hf_shape=(d, f),
    )  # fmt: skip
    return table


def _expert_table(spec: ModelSpec) -> dict[str, Weight]:
    """Return one layer's experts, which replace its MLP."""
    d, f, e = spec.width, spec.mlp, spec.experts
    if FAMILIES[spec.family].stacks_experts:
        return _stacked_experts(spec)
    shapes = {"gate": (e, d, f), "up": (e, d, f), "down": (e, f, d)}
    return {
        name: Weight(
            shape=shape, axes=EXPERT_AXES[name], init="normal", decays=True, fan_in=shape[1],
            hf=f"{_module(spec, 'expert_' + name)}.weight", hf_shape=(shape[2], shape[1]),
        )
        for name, shape in shapes.items()
    }  # fmt: skip


def _stacked_experts(spec: ModelSpec) -> dict[str, Weight]:
    """Return one layer's experts and their biases, for files that hold all experts in one tensor
    with gate and up interleaved."""
    d, f, e = spec.width, spec.mlp, spec.experts
    sizes = {"gate": (d, f, (0, 2)), "up": (d, f, (1, 2)), "down": (f, d, (0, 1))}
    table: dict[str, Weight] = {}
    for name, (inputs, outputs, every) in sizes.items():
        axes, stored = EXPERT_AXES[name], outputs * every[1]
        module = "mlp.experts.down_proj" if name == "down" else "mlp.experts.gate_up_proj"
        table[name] = Weight(
            shape=(e, inputs, outputs), axes=axes, init="normal", decays=True, fan_in=inputs,
            hf=module, hf_shape=(e, inputs, stored), hf_every=every,
        )  # fmt: skip
        if spec.expert_biases:
            table[name + BIAS] = Weight(
                shape=(e, outputs), axes=(axes[0], axes[2]), init="zeros", decays=False,
                hf=f"{module}_bias", hf_shape=(e, stored), hf_every=every,
            )  # fmt: skip
    return table


def _router_table(spec: ModelSpec) -> dict[str, Weight]:
    """Return the weights of a layer's router."""
    d, e = spec.width, spec.experts
    table = {
        "router": Weight(
            shape=(d, e), axes=("embed", "router"), init="normal", decays=True, fan_in=d,
            hf=f"{_module(spec, 'router')}.weight", hf_shape=(e, d),
        )
    }  # fmt: skip
    if spec.router.bias:
        table["router" + BIAS] = Weight(
            shape=(e,), axes=("router",), init="zeros", decays=False,
            hf=f"{_module(spec, 'router')}.bias", hf_shape=(e,),
        )  # fmt: skip
    if spec.router.corrected:
        table["correction"] = Weight(
            shape=(e,), axes=("router",), init="zeros", decays=False,
            hf=_module(spec, "correction"), hf_shape=(e,),
        )  # fmt: skip
    if spec.shared_gated:
        table["shared_router"] = Weight(
            shape=(d, 1), axes=("embed", "router"), init="normal", decays=True, fan_in=d,
            hf=f"{_module(spec, 'shared_router')}.weight", hf_shape=(1, d),
        )  # fmt: skip
    return table


def is_routing(name: str) -> bool:
    """Return whether a layer's weight is a router's matrix, which is never quantised or adapted."""
    return name in ("router", "shared_router")
