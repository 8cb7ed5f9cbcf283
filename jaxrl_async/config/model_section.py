"""Settings of the policy's model, and of the weights that are sent to the sampler. Needs no JAX."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from jaxrl_async.config.lora_section import LoraSection
from jaxrl_async.config.section import (
    Count,
    NonNegative,
    Positive,
    ReadWith,
    Section,
    check,
)

NumberType = Literal["float32", "bfloat16"]
AMPERE = 8
"""The first compute capability of NVIDIA that multiplies in bfloat16, and for which XLA has Triton,
which our own kernels use."""
FamilyName = Literal[
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "mistral",
    "ministral",
    "ministral3",
    "mixtral",
    "phi3",
    "olmo2",
    "olmo3",
    "smollm3",
    "granite",
    "gpt_oss",
    "glm4_moe",
    "qwen2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
]
"""The model_type of each family in model.families.family_registry."""
ROUTED_FAMILIES: tuple[FamilyName, ...] = (
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "glm4_moe",
    "qwen2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5_moe_text",
)
"""The families with experts."""


class BalanceSection(Section):
    """Spread tokens evenly over the experts of a mixture. Both ways are off by default: a
    pre-trained model's routers are balanced, and a loss on them distracts from the rewards."""

    loss: float = Field(0.0, ge=0)
    """Coefficient of the load-balance loss (Switch Transformer, arXiv:2101.03961, eq. 4) over an
    update's tokens. The model's router_aux_loss_coef is not read."""
    each_layer: Annotated[bool, ReadWith("loss")] = False
    """Balance each layer separately, and take the mean of their losses."""
    bias_rate: float = Field(0.0, ge=0)
    """Step by which each update moves the bias of a router that has one (glm4_moe) towards even
    load (arXiv:2408.15664; DeepSeek-V3 took 0.001)."""


class ArchitectureSection(Section):
    """A decoder with random weights, where model.path is not set."""

    family: FamilyName = "qwen3"
    """Model family."""
    layers: Count = 4
    """Number of layers."""
    width: Positive = 128
    """Model width (hidden size)."""
    heads: Count = 4
    """Query heads."""
    kv_heads: Count = 2
    """Key and value heads."""
    head_dim: Annotated[Positive, Field(multiple_of=2)] = 32
    """Width of a head, even."""
    mlp: Positive = 384
    """Hidden width of the MLP, or of each expert."""
    experts: NonNegative = 0
    """Experts per layer, for mixture-of-experts families; 0: a dense MLP."""
    experts_per_token: Positive = 2
    """Experts that each token is routed to."""
    window: Positive | None = None
    """Size of the sliding window, tokens, for families with one."""
    tied: bool = True
    """Share the embedding with the output head."""
    rope_theta: float = Field(10_000.0, gt=0)
    """Base of the rotary embedding."""
    vocab: Positive | None = None
    """Vocabulary size, at least the tokenizer's; null: the tokenizer's."""

    @check
    def experts_belong_to_their_family(self) -> Iterator[str]:
        """Require experts exactly for the mixture-of-experts families."""
        if bool(self.experts) != (self.family in ROUTED_FAMILIES):
            yield (
                f"model.architecture.experts ({self.experts}) and family ({self.family}) do not "
                "match: set a number of experts exactly with "
                f"family={' or '.join(ROUTED_FAMILIES)}."
            )

    @check
    def query_heads_share_kv_heads_evenly(self) -> Iterator[str]:
        """Require each key-value head to serve the same number of query heads."""
        if self.heads % self.kv_heads:
            yield (
                f"model.architecture.heads ({self.heads}) must be a multiple of "
                f"model.architecture.kv_heads ({self.kv_heads}). Change one of them."
            )


class ModelSection(Section):
    path: str | None = None
    """Hugging Face directory, OWNER/NAME on the hub, or a GGUF file: FILE.gguf, or
    package:NAME/FILE.gguf of an installed package; null: random weights of model.architecture."""
    architecture: ArchitectureSection = ArchitectureSection()
    """Shape of the model if path is null."""
    decoder: str | None = None
    """Your own decoder layer, FILE.py:CLASS (docs/own_decoder.md)."""
    dtype: NumberType | None = None
    """Data type of all computations; null: bfloat16 on TPUs and on NVIDIA's GPUs from Ampere on,
    else float32."""
    param_dtype: NumberType = "float32"
    """Data type of the trainer's weights and gradients; with bfloat16 see trainer.rounding."""
    remat: Literal["none", "layer", "attention", "dots"] = "none"
    """Recomputation in the backward pass: none, each layer (layer), each layer except its attention
    (attention), or everything but matrix products (dots)."""
    lora: LoraSection | None = None
    """Train a low-rank adapter instead of all weights."""
    balance: BalanceSection = BalanceSection()
    """Spread tokens evenly over the experts of a mixture."""
    attention: Literal["auto", "reference", "splash", "cudnn", "flash"] = "auto"
    """The trainer's attention: reference (plain JAX, all scores of a row in memory), splash (TPU),
    cudnn (NVIDIA since Hopper) or flash (our own kernels, NVIDIA); auto: by platform and model."""

    @check
    def own_layers_have_no_family(self) -> Iterator[str]:
        """Refuse a family next to the user's own layers."""
        family = self.architecture.family
        if self.decoder is not None and self.architecture.is_set("family"):
            yield (
                f"model.architecture.family ({family}) has no effect without model.decoder=null: "
                "your own layer has no family. Set that, or leave model.architecture.family out."
            )

    @property
    def computes_in(self) -> NumberType:
        """The data type of all computations: `dtype`, which a run chooses by its devices at the
        start (Config.on_devices); the CPU's if it has not been chosen."""
        return self.dtype or dtype_on("cpu")

    @check
    def an_adapter_leaves_routers_as_they_are(self) -> Iterator[str]:
        """Refuse to balance experts with frozen routers."""
        balance, lora = self.balance, self.lora
        for name, value in (("loss", balance.loss), ("bias_rate", balance.bias_rate)):
            if lora is not None and value:
                yield (
                    f"model.balance.{name} ({value:g}) changes routers, which an adapter "
                    f"(model.lora.rank={lora.rank}) keeps frozen. Set {name}=0, or train all "
                    "weights (model.lora=null)."
                )


def dtype_on(platform: str, capability: str | None = None) -> NumberType:
    """Return what model.dtype is on devices if it is null.

    Args:
        platform: as JAX calls it: cpu, gpu, cuda, rocm, tpu.
        capability: NVIDIA's compute capability, such as "9.0"; None, or another text: not an
            NVIDIA card.

    >>> dtype_on("tpu"), dtype_on("cuda", "7.5"), dtype_on("gpu", "8.9")
    ('bfloat16', 'float32', 'bfloat16')
    """
    if platform == "cpu":
        return "float32"
    major = (capability or "").partition(".")[0]
    return "float32" if major.isdigit() and int(major) < AMPERE else "bfloat16"


class WeightsSection(Section):
    dtype: Literal["float32", "bfloat16", "int8", "float8_e4m3fn"] | None = None
    """Data type of the sampler's weights: float32, bfloat16, or int8 or float8_e4m3fn, which
    quantise the layers' matrices with one scale per output; null: model.dtype."""
    probe: bool = True
    """After each publish, compare the sampler's log-probs of a prompt with the trainer's. Wrong
    weights end the run."""
    probe_tolerance: Annotated[float | None, ReadWith("probe")] = Field(None, gt=0)
    """Maximum difference between those log-probs without a warning, nats; null: derived from
    rounding."""
    checksum: bool = True
    """After each transfer, compare a checksum of every array on both sides."""

    @property
    def eight_bits(self) -> Literal["int8", "float8_e4m3fn"] | None:
        """The type to which the sampler's matrices are quantised; None: they are not."""
        return self.dtype if self.dtype in ("int8", "float8_e4m3fn") else None
