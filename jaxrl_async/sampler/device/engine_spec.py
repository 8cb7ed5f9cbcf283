"""All that the sampler's compiled programs depend on, as one hashable record."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxrl_async.model.adapter_stack import AdapterRoom
from jaxrl_async.model.kernels import LANES
from jaxrl_async.model.kv_layout import KvLayout, layout_of
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.sampler.device.sampling_kernel import takes_kernel


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Model, shapes, mesh and number types of an engine. Engines of equal specs share programs."""

    model: ModelSpec
    slots: int  # rows that decode at the same time
    reserve: int = 0  # slots that are prefilled ahead and take over ended rows
    max_length: int  # tokens of the longest sequence
    pages: int
    page_tokens: int = 32
    block: int = 16  # decode steps in one dispatch
    mesh: Mesh | None = None
    dtype: DTypeLike = jnp.float32  # kept as a numpy.dtype
    mixed: bool = False  # matrix products in bfloat16, everything else in dtype
    eight_bits: bool = False  # products of int8 with int8, by our CPU kernels
    ragged: bool = False  # decode on the pages: by a kernel for TPU or GPU, or a slow reference
    cpu_products: bool = False  # by our kernels, see cpu/, which must be built
    cpu_attention: bool = False  # decode on the pages, by our CPU kernel
    on_tpu: bool | None = None  # None: from the devices; always a bool after init
    on_gpu: bool | None = None  # the same
    samples_by_kernel: bool | None = None  # sample by the TPU kernel; None: from the devices
    one_thread: bool = False  # CPU programs without XLA's threads, for several samplers
    room: AdapterRoom | None = None  # for adapters on top of the base; None: no adapters
    keeps_routes: bool = False  # prefill and generate return each token's experts
    layout: KvLayout | None = None  # of pages; None: the model's; always set after init

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        given = {"tpu": self.on_tpu, "gpu": self.on_gpu}
        platform = next((name for name, is_set in given.items() if is_set), None)
        if platform is None and None in given.values():
            platform = self._device.platform
        for name, is_set in given.items():
            if is_set is None:
                object.__setattr__(self, f"on_{name}", platform == name)
        if self.samples_by_kernel is None:
            supported = bool(self.on_tpu) and takes_kernel(self._device, self.model.vocab)
            object.__setattr__(self, "samples_by_kernel", supported)
        if self.layout is None:
            object.__setattr__(self, "layout", layout_of(self.model.kinds))

    @property
    def _device(self) -> jax.Device:
        """One of the engine's devices."""
        device: jax.Device = jax.devices()[0] if self.mesh is None else self.mesh.devices.flat[0]
        return device

    @property
    def kv_layout(self) -> KvLayout:
        """The groups of layers whose keys and values share pages."""
        assert self.layout is not None
        return self.layout

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each group's layers, tokens; 0: no window."""
        kinds = self.model.kinds
        return tuple(kinds[g.layers[0]].window if g.layers else 0 for g in self.kv_layout.groups)

    @property
    def total_slots(self) -> int:
        """Decoding slots and reserve slots together: the S of all shapes."""
        return self.slots + self.reserve

    @property
    def fused(self) -> bool:
        """Whether projections of the same input are one product: on one device, except in custom
        layers and in attention with a gate."""
        plain = self.model.own is None and not self.model.attention_gated
        return plain and (self.mesh is None or self.mesh.size == 1)

    @property
    def in_pages(self) -> bool:
        """Whether decoding reads the pages themselves, not copies of them."""
        return self.ragged or self.cpu_attention

    @property
    def gpu_pages(self) -> bool:
        """Whether decoding reads the pages by the kernel for GPUs, which supports all windows,
        heads and sinks."""
        return self.ragged and bool(self.on_gpu)

    @property
    def pads_pages(self) -> bool:
        """Whether heads in pages are as wide as a TPU's register."""
        return self.ragged and not self.on_gpu

    @property
    def wide_heads(self) -> bool:
        """Whether heads of keys in pages are wider than a TPU's register. False for latent
        attention, whose kernel supports all widths."""
        return self.model.latent is None and self.model.head_dim > LANES

    @property
    def prefills_in_pages(self) -> bool:
        """Whether prompts without images are prefilled on the pages, too. That needs a model
        without states; on a TPU also pages that hold all tokens that later tokens of a prompt see
        (no windows, which hide some before its end), and heads narrow enough for the kernel."""
        takes_all = self.gpu_pages or not (any(self.windows) or self.wide_heads)
        return self.ragged and takes_all and not self.model.delta

    @property
    def has_few_prefills(self) -> bool:
        """Whether few sizes of prefills are enough: attention costs only a prompt's own tokens."""
        return self.cpu_attention or self.prefills_in_pages

    def num_pages(self, tokens: int) -> int:
        """Return the number of pages that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)
