"""What families combine: kinds of layers, rotary positions, scales. Plain data."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "clamped_silu"]
CLAMP_SLOPE, CLAMP_LIMIT = 1.702, 7.0
"""Of clamped_silu: what multiplies the argument of the sigmoid, and where gate and up end."""
NormPlaces = Literal["before", "both", "after"]
"""Where a layer normalises: before attention and MLP, before and after (Gemma 2), or after (OLMo
2)."""
QkNorm = Literal["none", "head", "whole"]
"""Norm of queries and keys: of each head by itself, or over all heads at once (OLMo 2)."""

DENSE_STACK = "dense_layers"
"""The stack of the layers of a mixture that have one MLP in place of experts."""
LINEAR_STACK = "linear_layers"
"""The stack of the layers with a gated delta net in place of attention."""
MAX_PERIOD = 16
"""Longest period of a pattern of layers that a loop repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies change for contexts longer than those of the first training.

    llama3      low frequencies are divided by factor (Llama 3.1 model card)
    linear      all are (Chen et al. 2023, arXiv:2306.15595)
    yarn        low ones are, and cos and sin are multiplied by magnitude (Peng et al. 2023,
                arXiv:2309.00071)
    longrope    each is divided by its short factor, and magnitude as above; the long factors, for
                contexts beyond original_max_positions, are only kept (Ding et al. 2024,
                arXiv:2402.13753)
    """

    kind: Literal["llama3", "linear", "yarn", "longrope"]
    factor: float
    original_max_positions: int = 0
    low_freq_factor: float = 0.0  # llama3
    high_freq_factor: float = 0.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    of_scores: float = 0.0
    """yarn: mscale_all_dim in files, by which DeepSeek scales scores; others only keep it."""
    truncate: bool = True  # yarn: to whole dimensions
    magnitude: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions of a layer: pairs (i, i + R/2) of a head's first R components turn."""

    theta: float = 10_000.0
    share: float = 1.0  # R / head width
    scaling: RopeScaling | None = None
    query_growth: float = 0.0
    """g: queries at position p are multiplied by 1 + g log(1 + floor(p / original_max_positions of
    the scaling)), as in Llama 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """How a layer differs from others of its model; static in every program."""

    window: int = 0  # a token sees itself and window - 1 tokens before it; 0: all of them
    rope: Rope | None = Rope()  # None: no positions
    stack: str = "layers"
    """The stack of weights that holds the layer's: its name in the tree of parameters. Layers
    whose weights have other shapes are in a stack of their own; each ends in `layers`."""

    @property
    def is_linear(self) -> bool:
        """Whether a gated delta net stands in place of attention."""
        return self.stack == LINEAR_STACK


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """How keys and values of all heads are made of one narrow vector a token (multi-head latent
    attention, DeepSeek-V2, arXiv:2405.04434, sec. 2.1).

    c = norm(x A) [rank]     k_h = [c K_h, r]     v_h = c V_h

    r [rotated], x R turned by its position, is the same for all heads; queries end in as many
    components that turn. Samplers cache c and r alone.
    """

    rank: int
    query_rank: int  # queries are made of such a vector, too; 0: of x itself
    rotated: int
    value: int  # width of a head's values
    pairs: bool = True  # neighbours 2i and 2i + 1 turn together, not i and i + rotated / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """The sizes of layers that keep one matrix a head in place of all keys and values (gated delta
    net; Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464); see delta.py."""

    key_heads: int  # of queries and keys; each serves as many value heads as its neighbours
    value_heads: int
    key_width: int
    value_width: int
    kernel: int = 4  # tokens that the convolution before it sees
    grouped: bool = False
    """Each key head's query, key, values and gates are neighbours in one matrix, in files and
    here."""

    @property
    def shared_by(self) -> int:
        """How many value heads a key head serves."""
        return self.value_heads // self.key_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Numbers that a family multiplies with, or bounds by."""

    attention: float = 0.0  # of q k^T; 0: head width ** -0.5
    embedding: float = 1.0
    residual: float = 1.0  # of what attention and MLP add
    logits: float = 1.0
    attention_cap: float = 0.0  # c tanh(scores / c); 0: unbounded
    logit_cap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRouter:
    """How tokens are routed to experts: l are the logits of a token's experts.

    odds s: softmax(l), or sigmoid(l). The k experts of the largest s are chosen, or of the largest
    s + c with a correction c, which balances the experts and weighs nothing (Wang et al. 2024,
    arXiv:2408.15664). With groups, a token first chooses groups by the sum of their two largest s +
    c (DeepSeek-V3, arXiv:2412.19437, sec. 2.1.2; DeepSeek-V2: by the largest one). Their weights
    are s, divided by their sum with sums_to_one, times scale.
    """

    odds: Literal["softmax", "sigmoid"] = "softmax"
    sums_to_one: bool = True
    scale: float = 1.0
    bias: bool = False  # the logits have one
    corrected: bool = False
    groups: int = 1
    groups_per_token: int = 1
    best_of_group: int = 2  # so many of the largest s + c speak for a group


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """What a config.json says of a model's experts beside their number."""

    router: ExpertRouter
    width: int  # inner width of an expert
    shared_width: int  # of the one that every token uses
    dense_layers: tuple[int, ...]  # numbers of the layers without experts


USUAL_ROUTER = ExpertRouter()
"""The softmax of the chosen logits."""
UNSCALED = Scales()
"""Nothing is changed."""


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Layers first .. first + len(kinds) * times: these kinds, so many times."""

    first: int
    kinds: tuple[LayerKind, ...]
    times: int


def repeating(kinds: tuple[LayerKind, ...]) -> tuple[LayerKind, ...]:
    """Return the shortest pattern that repeats to these kinds, the last time perhaps in part."""
    periods = range(1, len(kinds))
    fits = (p for p in periods if all(kinds[i] == kinds[i % p] for i in range(p, len(kinds))))
    return kinds[: next(fits, len(kinds))]


def runs_of(kinds: tuple[LayerKind, ...]) -> list[LayerRun]:
    """Divide layers into runs: from the first layer on, the period that covers the most.

    >>> a, b = LayerKind(window=8), LayerKind()
    >>> [(r.first, len(r.kinds), r.times) for r in runs_of((a, a, b) * 3 + (a, a))]
    [(0, 3, 3), (9, 1, 2)]
    """
    runs: list[LayerRun] = []
    first = 0
    while first < len(kinds):
        rest = kinds[first:]
        covered = {p: _repeats(rest, p) for p in range(1, min(MAX_PERIOD, len(rest)) + 1)}
        covered = {p: n for p, n in covered.items() if p == 1 or n > 1}
        period = max(covered, key=lambda p: (p * covered[p], -p))
        runs.append(LayerRun(first, rest[:period], covered[period]))
        first += period * covered[period]
    return runs


def _repeats(kinds: tuple[LayerKind, ...], period: int) -> int:
    """Return how often the first `period` kinds come one after the other."""
    same = 0
    while same < len(kinds) and kinds[same] == kinds[same % period]:
        same += 1
    return same // period
