"""Building blocks of families: kinds of layers, rotary positions, scales. Plain data."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "clamped_silu"]
CLAMP_SLOPE, CLAMP_LIMIT = 1.702, 7.0
"""Constants of clamped_silu: factor of the sigmoid's argument, and bound of gate and up."""
NormPlaces = Literal["before", "both", "after"]
"""Positions of a layer's norms: before attention and MLP, before and after (Gemma 2), or after
(OLMo 2)."""
QkNorm = Literal["none", "head", "whole"]
"""Norm of queries and keys: per head, or over all heads together (OLMo 2)."""

DENSE_STACK = "dense_layers"
"""The stack of a mixture's layers with one MLP in place of experts."""
LINEAR_STACK = "linear_layers"
"""The stack of the layers with a gated delta net in place of attention."""
MAX_PERIOD = 16
"""Maximum period of a pattern of layers that a loop repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """The scaling of rotary frequencies for contexts longer than in the original training.

    llama3      low frequencies are divided by factor (Llama 3.1 model card)
    linear      all frequencies are divided by factor (Chen et al. 2023, arXiv:2306.15595)
    yarn        low frequencies are divided by factor, and cos and sin are multiplied by magnitude
                (Peng et al. 2023, arXiv:2309.00071)
    longrope    each frequency is divided by its short factor, with magnitude as above; the long
                factors, for contexts beyond original_max_positions, are stored but not used (Ding
                et al. 2024, arXiv:2402.13753)
    """

    kind: Literal["llama3", "linear", "yarn", "longrope"]
    factor: float
    original_max_positions: int = 0
    low_freq_factor: float = 0.0  # llama3
    high_freq_factor: float = 0.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    of_scores: float = 0.0
    """yarn: mscale_all_dim in files, by which DeepSeek scales scores; other families ignore it."""
    truncate: bool = True  # yarn: round bounds to whole dimensions
    magnitude: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions of a layer: rotates pairs (i, i + R/2) of a head's first R components."""

    theta: float = 10_000.0
    share: float = 1.0  # R / head width
    scaling: RopeScaling | None = None
    query_growth: float = 0.0
    """g: queries at position p are multiplied by 1 + g log(1 + floor(p / original_max_positions of
    the scaling)), as in Llama 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """The properties that differ between a model's layers; static in programs."""

    window: int = 0  # a token sees itself and window - 1 tokens before it; 0: all earlier tokens
    rope: Rope | None = Rope()  # None: no rotary positions
    stack: str = "layers"
    """The name of the layer's stack of weights in the tree of parameters. Layers whose weights have
    different shapes are in separate stacks; each name ends in `layers`."""

    @property
    def is_linear(self) -> bool:
        """Whether the layer has a gated delta net in place of attention."""
        return self.stack == LINEAR_STACK


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """The sizes of multi-head latent attention, which computes all heads' keys and values from one
    latent vector per token (DeepSeek-V2, arXiv:2405.04434, sec. 2.1).

    c = norm(x A) [rank]     k_h = [c K_h, r]     v_h = c V_h

    r [rotated], x R rotated by its position, is the same for all heads; queries end in as many
    rotated components. Samplers cache only c and r.
    """

    rank: int
    query_rank: int  # size of the queries' latent vector; 0: queries are computed from x
    rotated: int
    value: int  # width of a head's values
    pairs: bool = True  # rotated pairs are 2i and 2i + 1, not i and i + rotated / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """The sizes of gated delta nets, which keep one matrix per head in place of all keys and values
    (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464); see delta.py."""

    key_heads: int  # of queries and keys; each is shared by equally many value heads
    value_heads: int
    key_width: int
    value_width: int
    kernel: int = 4  # tokens in the kernel of the preceding convolution
    grouped: bool = False
    """Whether one matrix holds the query, key, values and gates, grouped by key head, in files and
    here."""

    @property
    def shared_by(self) -> int:
        """The number of value heads per key head."""
        return self.value_heads // self.key_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """A family's scale factors and bounds."""

    attention: float = 0.0  # of q k^T; 0: head width ** -0.5
    embedding: float = 1.0
    residual: float = 1.0  # of the outputs of attention and MLP
    logits: float = 1.0
    attention_cap: float = 0.0  # c tanh(scores / c); 0: unbounded
    logit_cap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRouter:
    """The routing of tokens to experts; l are the logits of a token's experts.

    odds s: softmax(l), or sigmoid(l). The k experts with the largest s are chosen, or with the
    largest s + c for a correction c, which balances the experts and does not change their weights
    (Wang et al. 2024, arXiv:2408.15664). With groups, a token first chooses groups by the sum of
    their two largest s + c (DeepSeek-V3, arXiv:2412.19437, sec. 2.1.2; DeepSeek-V2: by the
    largest). The experts' weights are s, divided by their sum with sums_to_one, times scale.
    """

    odds: Literal["softmax", "sigmoid"] = "softmax"
    sums_to_one: bool = True
    scale: float = 1.0
    bias: bool = False  # whether the logits have a bias
    corrected: bool = False
    groups: int = 1
    groups_per_token: int = 1
    best_of_group: int = 2  # number of the largest s + c that are summed to rank a group


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A model's experts in config.json, without their number."""

    router: ExpertRouter
    width: int  # inner width of an expert
    shared_width: int  # inner width of the shared expert
    dense_layers: tuple[int, ...]  # numbers of the layers without experts


USUAL_ROUTER = ExpertRouter()
"""The softmax of the chosen logits."""
UNSCALED = Scales()
"""Scales that change nothing."""


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Layers first .. first + len(kinds) * times: these kinds, repeated `times` times."""

    first: int
    kinds: tuple[LayerKind, ...]
    times: int


def repeating(kinds: tuple[LayerKind, ...]) -> tuple[LayerKind, ...]:
    """Return the shortest pattern whose repetition gives these kinds; the last may be partial."""
    periods = range(1, len(kinds))
    fits = (p for p in periods if all(kinds[i] == kinds[i % p] for i in range(p, len(kinds))))
    return kinds[: next(fits, len(kinds))]


def runs_of(kinds: tuple[LayerKind, ...]) -> list[LayerRun]:
    """Divide layers into runs; each run has the period that covers the most layers.

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
    """Return how often the first `period` kinds are repeated."""
    same = 0
    while same < len(kinds) and kinds[same] == kinds[same % period]:
        same += 1
    return same // period
