"""Settings of an adapter: model.lora. Needs no JAX."""

from typing import Annotated, Literal

from pydantic import Field

from jaxrl_async.config.section import ReadWith, Section

FOUR_BITS = ("nf4", "int4", "q4_1")
"""Forms of the base in 4 bits."""
ALL_LINEAR = "all-linear"
"""Target of every matrix of every layer, experts included; not of routers, embedding and head."""


class LoraSection(Section):
    """Train small low-rank changes of frozen weights (LoRA, arXiv:2106.09685). Defaults follow
    "LoRA Without Regret" (Schulman et al. 2025): every matrix, alpha 32; LoRA needs about ten
    times the learning rate of full fine-tuning."""

    rank: Annotated[int, Field(ge=1, le=65_536)]
    """Rank of the change of each adapted matrix."""
    alpha: float = Field(32.0, gt=0)
    """The change is scaled by alpha / rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (arXiv:2312.03732)."""
    targets: str | tuple[str, ...] = ALL_LINEAR
    """Adapted matrices: all-linear, names such as [q_proj, v_proj], or regular expressions of whole
    names, such as model.layers.[0-9]+.self_attn.q_proj."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout of the inputs of each change, only in updates. Keep 0 for rl."""
    init: Literal["uniform", "normal"] = "uniform"
    """Initialization of the input side: uniform within 1 / sqrt(inputs), as in PEFT, or normal with
    deviation 1 / rank."""
    base: Literal["full", "int8", "nf4", "int4", "q4_1"] = "full"
    """Format of the frozen matrices in trainer and samplers (QLoRA): full (model.param_dtype),
    int8, or 4 bits: nf4, int4 or q4_1. With group_size=32 blocks of a GGUF file are kept: Q4_0
    (int4, q4_1), Q4_1 and Q4_K (q4_1)."""
    group_size: Annotated[
        int,
        Field(ge=2, le=65_536),
        ReadWith("base", FOUR_BITS, "model.lora.base in 4 bits", ()),
    ] = 64
    """Maximum inputs that share a scale in 4 bits."""
