"""Attention kernels for TPU that ship with JAX, wrapped for this package's shapes: splash and
ragged paged attention. Tests compare them with model/attention.py.

A kernel is opaque to XLA's partitioner, so under a mesh each device runs it on its own rows and
heads (`per_shard`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu import splash_attention as splash_lib
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from numpy.typing import NDArray

from jaxrl_async.errors import ConfigError
from jaxrl_async.mesh import divided, spec_for, trainer_rules
from jaxrl_async.model.layout import Layout, natural

LANES = 128
"""Width of a TPU vector register: the unit of head widths and block lengths."""
SPARE = 2
"""Number of a head's columns for sinks."""
UNSEEN = -1e30
"""A score without a share, finite in bfloat16."""


def page_head_dim(head_dim: int) -> int:
    """Return the head width of pages that `kernels.ragged_paged` reads without a copy."""
    return -(-head_dim // LANES) * LANES


def has_spare(head_dim: int) -> bool:
    """Return whether pages have spare columns for sinks after heads of this width."""
    return head_dim + SPARE <= page_head_dim(head_dim)


def refuse_sinks(head_dim: int, window: int) -> None:
    """Raise ConfigError if heads leave no columns for sinks, or if the layer has a window."""
    if not has_spare(head_dim) or window:
        why = "with a window" if window else f"for heads of width {head_dim}"
        raise ConfigError(
            f"sampler.attention=ragged does not support attention sinks {why}. Set "
            "sampler.attention=gathered."
        )


def sinks_page(page_tokens: int, kv_rows: int, head_dim: int, dtype: DTypeLike) -> Array:
    """Return the page [1, page_tokens, kv_rows, W], keys and values alternating on the third
    axis."""
    columns = jnp.arange(page_head_dim(head_dim))
    column = jnp.where(jnp.arange(page_tokens) == 0, head_dim, head_dim + 1)
    keys = columns == column[:, None]
    is_key = (jnp.arange(kv_rows) % 2 == 0)[:, None]
    return (keys[:, None] & is_key).astype(dtype)[None]


def with_sinks(q_tHK: Array, sinks_H: Array, width: int) -> Array:
    """Return queries [t, H, width] whose scores with the keys of a sinks_page, times K ** -0.5, are
    their heads' sinks and UNSEEN."""
    t, H, K = q_tHK.shape
    sinks = (sinks_H.astype(q_tHK.dtype).astype(jnp.float32) * K**0.5).astype(q_tHK.dtype)
    unseen = jnp.full(H, UNSEEN, q_tHK.dtype)
    spare = jnp.broadcast_to(jnp.stack([sinks, unseen], axis=1), (t, H, SPARE))
    whole = jnp.concatenate([q_tHK, spare], axis=2)
    return jnp.pad(whole, ((0, 0), (0, 0), (0, width - K - SPARE)))


MAX_SPLASH_BLOCK = 512
"""Maximum block of queries and keys: 512 x 512 scores in float32 are 1 MiB of VMEM."""
SPLASH_BLOCKS = {"TPU v6 lite": 1024}
"""Maximum block by kind of device, if not MAX_SPLASH_BLOCK. Each block of queries reads all keys
and values before it again, so its FLOPs per byte equal its length. 512 is enough to keep the matrix
units of most generations busy (peak / HBM bandwidth: v5p 166, v4 229, v5e 241, tpu7x 313); v6e
needs 560."""
FORWARD_BLOCKS = {"TPU v5 lite": (1024, 256), "TPU v5": (1024, 256), "TPU v6 lite": (1024, 512)}
"""By kind of device, the maximum block of the forward kernel on whole rows in bfloat16, and the
number of its keys multiplied at a time: the fastest in tokamax's measurements for rows of 4,096
tokens and heads of 128 (github.com/openxla/tokamax, data/autotuning/tpu_v5 and tpu_v6_lite,
pallas_mosaic_tpu_flash_attention.json). v5e has v5p's matrix units."""
ATTENDED = "attended"
"""Name for jax.checkpoint of the values that splash attention's backward pass needs."""
MAX_RAGGED_PAGES = 16
"""Maximum number of pages in a block, as in most entries of JAX's tuned table."""
MAX_RAGGED_QUERIES = 32
"""Query tokens in a block, as in most entries of JAX's tuned table."""
RAGGED_KV_BYTES = 4 * 2**20
"""VMEM for the two buffers of pages; a kernel may use 16 MiB in total."""
RAGGED_TABLE_BYTES = 2**19
"""Scalar memory for the page indices of one call, out of 1 MiB on a TPU v5e. For 256 sequences the
compiler accepts 512 pages each, and rejects 900."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """Options of attention in addition to the softmax of causal scores; static in a kernel."""

    window: int = 0  # a query sees itself and window - 1 keys before it; 0: all earlier keys
    cap: float = 0.0  # c: scores become c tanh(scores / c); 0: unchanged

    @property
    def kernel_cap(self) -> float | None:
        """The cap in the form of JAX's kernels."""
        return self.cap or None


PLAIN = Scoring()


class SequenceAttention(Protocol):
    """(q [B, T, H, K], k [B, T, N, K], v [B, T, N, K], segment_ids [B, T]) -> [B, T, H, K]: grouped
    queries, causal within a segment. Rows of segment 0 (padding) hold any finite numbers.

    If contexts share prefixes, the last array holds attention.visible_until in place of the segment
    ids or, if a layer of the model has a window, visible_until and the positions [B, T, 2]. The
    function is then one of attention.TREE_ATTENTION."""

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        extent: Array,
        scoring: Scoring = PLAIN,
        sinks: Array | None = None,
        /,
    ) -> Array:
        """Attend; sinks [H]: an additional logit of each head, without a token."""


class PartAttention(NamedTuple):
    """SequenceAttention for some queries of each row against all keys of the row.

    prepare   (query heads, positions [devices, t] of the queries in their rows, mesh, Scoring) ->
              constants, and their sharding over the axis context
    attend    (q [B, t, H, K], k and v [B, T, N, K], segment ids of the queries [B, t] and of the
              keys [B, T], one device's constants, Scoring, sinks [H] or None) -> [B, t, H, K]
    """

    prepare: Callable[..., tuple[Any, Any]]
    attend: Callable[..., Array]


# ---- whole sequences


def splash(
    q_BTHK: Array,
    k_BTNK: Array,
    v_BTNK: Array,
    segment_ids_BT: Array,
    scoring: Scoring = PLAIN,
    sinks_H: Array | None = None,
    *,
    most: int = MAX_SPLASH_BLOCK,
    forward: tuple[int, int] | None = None,
) -> Array:
    """Run JAX's TPU flash attention, which skips blocks above the diagonal and before the window.
    Differentiable.

    float32 or bfloat16, any head width; T is padded to whole blocks (`splash_block`) of at most
    `most`. Scores, softmax and sums are in float32.

    Args:
        q_BTHK: queries.
        k_BTNK: keys.
        v_BTNK: values.
        segment_ids_BT: segments; 0 is padding.
        scoring: window and cap.
        sinks_H: sinks, or None.
        most: maximum block.
        forward: maximum block of the forward kernel, and the number of keys multiplied at a time;
            None, and with a window: the backward kernels' block. With a window, a longer block has
            fewer visible keys.
    """
    T, H, K = q_BTHK.shape[1:]
    block = splash_block(T, most)
    causal = _splash_mask((_rounded_up(T, block),) * 2, scoring)
    kernel = splash_lib.make_splash_mha(
        splash_lib.MultiHeadMask([causal] * H),
        block_sizes=_row_blocks(T, block, None if scoring.window else forward),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=ATTENDED,
        attn_logits_soft_cap=scoring.kernel_cap,
    )
    q, k, v = (_heads_first(x, block) for x in (q_BTHK * K**-0.5, k_BTNK, v_BTNK))
    segments = _whole_blocks(segment_ids_BT, block)
    out = _over_rows(kernel, q, k, v, splash_lib.SegmentIds(segments, segments), sinks_H)
    return jnp.swapaxes(out, 1, 2)[:, :T]


def _over_rows(
    kernel: Any, q: Array, k: Array, v: Array, segments: Any, sinks_H: Array | None
) -> Array:
    """Run splash attention on every row, with the same sinks."""
    if sinks_H is None:
        out: Array = jax.vmap(kernel)(q, k, v, segments)
        return out
    out = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))(q, k, v, segments, sinks_H.astype(q.dtype))
    return out


def _splash_mask(shape: tuple[int, int], scoring: Scoring) -> Any:
    """Return the lazy mask of queries and keys of a row, computed block by block."""
    if scoring.window:
        return splash_lib.LocalMask(shape, (scoring.window - 1, 0), 0)
    return splash_lib.CausalMask(shape)


def _whole_blocks(x: Array, block: int) -> Array:
    """Pad T of [B, T, ...] to a multiple of the block."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), *((0, 0) for _ in x.shape[2:])))


def _heads_first(x_BTHK: Array, block: int) -> Array:
    """Pad T to a multiple of the block and return [B, H, T, K]."""
    return jnp.swapaxes(_whole_blocks(x_BTHK, block), 1, 2)


def splash_on(device: jax.Device, dtype: DTypeLike) -> SequenceAttention:
    """Return splash attention with the block length for a device and dtype."""
    most = most_splash_block(device, dtype)
    forward = FORWARD_BLOCKS.get(device.device_kind) if jnp.dtype(dtype) == jnp.bfloat16 else None
    return partial(splash, most=most, forward=forward) if forward else splash


def splash_part_on(device: jax.Device, dtype: DTypeLike) -> PartAttention:
    """Return splash attention for parts of rows, as splash_on does for whole rows."""
    most = most_splash_block(device, dtype)
    prepare = partial(_splash_part_kernel, most=most)
    return PartAttention(prepare, partial(_splash_part, most=most))


def most_splash_block(device: jax.Device, dtype: DTypeLike) -> int:
    """Return the maximum block of splash attention. Blocks above MAX_SPLASH_BLOCK are for bfloat16
    only; in float32 they do not fit VMEM."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return MAX_SPLASH_BLOCK
    return SPLASH_BLOCKS.get(device.device_kind, MAX_SPLASH_BLOCK)


def splash_block(length: int, most: int = MAX_SPLASH_BLOCK) -> int:
    """Return the largest block (a multiple of 128, at most `most`) with little padding of `length`:
    to the next multiple of 128, or by at most an eighth.

    Larger blocks keep the matrix unit busier; padding is wasted computation.

    >>> [splash_block(n) for n in (16, 300, 640, 1024, 1100, 4000)]
    [128, 384, 128, 512, 384, 512]
    >>> splash_block(4000, 1024)
    1024
    """
    fits = max(_rounded_up(length, LANES), length + length // 8)
    blocks = range(LANES, most + 1, LANES)
    return max(b for b in blocks if _rounded_up(length, b) <= fits)


def _splash_part_kernel(
    heads: int,
    positions: NDArray[np.int32],
    mesh: Mesh,
    scoring: Scoring = PLAIN,
    *,
    most: int = MAX_SPLASH_BLOCK,
) -> tuple[Any, Any]:
    """Return the kernel for all devices, with the blocks of each device's mask, and its sharding.

    Queries are padded to whole blocks on each device, at the position of its last query.
    """
    ways, t = positions.shape
    block = splash_block(t, most)
    positions = np.pad(positions, ((0, 0), (0, -t % block)), mode="edge")
    causal = _splash_mask((positions.size, _rounded_up(ways * t, block)), scoring)
    causal.q_sequence = positions.reshape(-1)
    kernel = splash_lib.make_splash_mha(
        splash_lib.MultiHeadMask([causal] * heads),
        block_sizes=_equal_blocks(block),
        head_shards=1,
        q_seq_shards=ways,
        residual_checkpoint_name=ATTENDED,
        attn_logits_soft_cap=scoring.kernel_cap,
    )
    over_queries = NamedSharding(mesh, PartitionSpec(None, "context"))
    return kernel, kernel.manual_sharding_spec(over_queries)


def _splash_part(
    q_BtHK: Array,
    k_BTNK: Array,
    v_BTNK: Array,
    q_segments: Array,
    kv_segments: Array,
    kernel: object,
    scoring: Scoring = PLAIN,
    sinks_H: Array | None = None,
    *,
    most: int = MAX_SPLASH_BLOCK,
) -> Array:
    block, (t, K) = splash_block(q_BtHK.shape[1], most), q_BtHK.shape[1::2]
    q, k, v = (_heads_first(x, block) for x in (q_BtHK * K**-0.5, k_BTNK, v_BTNK))
    segments = splash_lib.SegmentIds(*(_whole_blocks(x, block) for x in (q_segments, kv_segments)))
    return jnp.swapaxes(_over_rows(kernel, q, k, v, segments, sinks_H), 1, 2)[:, :t]


SPLASH_PART = PartAttention(_splash_part_kernel, _splash_part)


def seen_in_tree(
    until: Array, indices: Array, positions: Array | None = None, window: int = 0
) -> Array:
    """Return [..., t, T] bool: whether the query at each index [t] of its row sees the key. The key
    must not be later, have ended before the query, or lie before its window.

    Args:
        until: [..., T], attention.visible_until of the keys.
        indices: [t], indices of the queries in their rows.
        positions: [..., T], positions of the keys in their contexts; needed for a window.
        window: number of tokens that a query sees; 0: all.
    """
    keys = jnp.arange(until.shape[-1])
    seen = (keys <= indices[:, None]) & (indices[:, None] < until[..., None, :])
    if not window:
        return seen
    assert positions is not None, "a window counts positions"
    own = jnp.take(positions, jnp.minimum(indices, positions.shape[-1] - 1), axis=-1)
    return seen & (positions[..., None, :] > own[..., :, None] - window)


def of_extent(extent: Array) -> tuple[Array, Array | None]:
    """Return visible_until [B, T] and the positions [B, T], if present."""
    return (extent[..., 0], extent[..., 1]) if extent.ndim == 3 else (extent, None)


def splash_in_tree(
    q_BtHK: Array,
    k_BTNK: Array,
    v_BTNK: Array,
    extent_BT: Array,
    indices_t: Array,
    scoring: Scoring = PLAIN,
    sinks_H: Array | None = None,
    *,
    most: int = MAX_SPLASH_BLOCK,
) -> Array:
    """Run splash attention of contexts that share prefixes (`seen_in_tree`). Differentiable.

    Blocks without visible keys are skipped. Rows run one after the other, and all heads of a row
    read the same mask. With the gradient it takes about 15 bytes per query and key of a row.
    """
    t, K = q_BtHK.shape[1], q_BtHK.shape[3]
    block = splash_block(t, most)
    q, k, v = (_heads_first(x, block) for x in (q_BtHK * K**-0.5, k_BTNK, v_BTNK))
    extent = tuple(_whole_blocks(x, block) for x in of_extent(extent_BT) if x is not None)
    indices = jnp.pad(indices_t, (0, -t % block), mode="edge")

    def one_row(row: tuple[Array, Array, Array, tuple[Array, ...]]) -> Array:
        q, k, v, (until, *position) = row
        kernel = splash_lib.make_splash_mha(
            seen_in_tree(until, indices, position[0] if position else None, scoring.window)[None],
            block_sizes=_equal_blocks(block),
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name=ATTENDED,
            attn_logits_soft_cap=scoring.kernel_cap,
        )
        for name in ("fwd_mask_info", "dq_mask_info", "dkv_mask_info"):  # traced under jit
            setattr(kernel, name, getattr(kernel, name)._replace(is_dynamic_mask=True))
        return kernel(q, k, v, None, None if sinks_H is None else sinks_H.astype(q.dtype))

    return jnp.swapaxes(jax.lax.map(one_row, (q, k, v, extent)), 1, 2)[:, :t]


def _row_blocks(T: int, block: int, forward: tuple[int, int] | None) -> splash_lib.BlockSizes:
    """Return the blocks for whole rows, padded to a multiple of `block`. The forward kernel's block
    is a multiple of `block` that divides the padded length."""
    equal = _equal_blocks(block)
    if forward is None:
        return equal
    most, at_once = forward
    padded = _rounded_up(T, block)
    wide = max(n for n in range(block, max(most, block) + 1, block) if padded % n == 0)
    return replace(equal, block_q=wide, block_kv=wide, block_kv_compute=gcd(wide, at_once))


def _equal_blocks(block: int) -> splash_lib.BlockSizes:
    """Return block sizes that are equal for the forward and both backward kernels."""
    return splash_lib.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )


def per_shard(
    function: SequenceAttention, mesh: Mesh | None, part: PartAttention
) -> SequenceAttention:
    """Return `function` run by each device on its own rows and heads: rows over the batch's axes,
    heads over tensor.

    If context divides the rows' lengths, each device runs `part` on its own queries. Keys and
    values are then gathered over context (their gradients are reduce-scattered), once per layer:
    [rows, length, kv heads, head width] on each device while the layer runs. Rows are in the
    balanced order of Layout(mesh). Dimensions that an axis does not divide are replicated over it.
    If tensor divides the query heads but not the kv heads, kv heads are repeated until it does.
    """
    if mesh is None or mesh.size == 1:
        return function

    def sharded(
        q_BTHK: Array,
        k_BTNK: Array,
        v_BTNK: Array,
        segment_ids_BT: Array,
        scoring: Scoring = PLAIN,
        sinks_H: Array | None = None,
    ) -> Array:
        layout, (T, H) = Layout(mesh), q_BTHK.shape[1:3]
        ways = layout.ways(T)
        axes = ("batch", "length" if ways > 1 else None, "heads", "head_dim")
        heads = spec_for(q_BTHK.shape, axes, mesh, trainer_rules())
        rows = PartitionSpec(*heads[:2])
        copies = kv_copies(H, k_BTNK.shape[2], mesh.shape["tensor"])
        k, v = (jnp.repeat(x, copies, axis=2) if copies > 1 else x for x in (k_BTNK, v_BTNK))
        local: Callable[..., Array] = _scored(function, scoring)
        sinks = () if sinks_H is None else (sinks_H,)
        of_sinks = tuple(PartitionSpec(heads[2]) for _ in sinks)
        constants: tuple[Any, ...] = ()
        of_constants: tuple[Any, ...] = ()
        if ways > 1:
            local_heads = H // (mesh.shape["tensor"] if heads[2] else 1)
            positions = layout.order(T).reshape(ways, -1)
            one, spec = part.prepare(local_heads, positions, mesh, scoring)
            local, constants, of_constants = _gathering(part, ways, scoring), (one,), (spec,)
        in_specs = (heads, heads, heads, rows, *of_constants, *of_sinks)
        run = divided(local, mesh, in_specs, heads)
        out: Array = run(q_BTHK, k, v, segment_ids_BT, *constants, *sinks)
        return out

    return sharded


def _scored(function: SequenceAttention, scoring: Scoring) -> Callable[..., Array]:
    return lambda q, k, v, extent, *sinks: function(q, k, v, extent, scoring, *sinks)


def _gathering(part: PartAttention, ways: int, scoring: Scoring) -> Callable[..., Array]:
    """Return `part` for one device, which first gathers the other devices' keys and values."""

    def local(
        q: Array, k: Array, v: Array, segments: Array, constants: object, *sinks: Array
    ) -> Array:
        k, v, all_segments = (
            natural(jax.lax.all_gather(x, "context", axis=1, tiled=True), ways)
            for x in (k, v, segments)
        )
        return part.attend(q, k, v, segments, all_segments, constants, scoring, *sinks)

    return local


def kv_copies(heads: int, kv_heads: int, ways: int) -> int:
    """Return the number of adjacent copies of each kv head that divides them over `ways` devices.

    1 if `ways` does not divide the query heads: then nothing is divided. Otherwise kv_heads *
    copies = lcm(kv_heads, ways), which divides heads, since both do. Query head h still reads a
    copy of its kv head.
    """
    return 1 if heads % ways else ways // gcd(kv_heads, ways)


# ---- pages


def ragged_paged(
    q_tHK: Array,
    kv_pages: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    scoring: Scoring = PLAIN,
    sinks_H: Array | None = None,
    *,
    mesh: Mesh | None = None,
) -> Array:
    """Run JAX's TPU ragged paged attention: queries of several sequences against their KV pages.

    q_tHK         [tokens, H, K]: the queries of sequence 0, then of sequence 1, ...
    kv_pages      [pages, page_size, 2 N, K or more]: key and value of kv head 0, of kv head 1, ...
    kv_lens       [seqs] int32: tokens in the pages, including the queries' tokens
    page_indices  [seqs, pages_per_seq] int32: pages of a sequence in order, each < pages
    cu_q_lens     [seqs + 1] int32: sequence s has queries cu_q_lens[s] .. cu_q_lens[s + 1]
    num_seqs      [1] int32: number of valid sequences; later ones are ignored
    -> [tokens, H, K], 0 after the last query

    A sequence's queries are its last tokens: one query is a decode step, many are a chunk of a
    prompt, and both may be in one call. Each sequence has 1 <= queries <= kv_lens.

    The kernel needs float32 or bfloat16, the same for queries and pages; 1, 2, 4 or a multiple of
    8 kv heads on each device (`refuse_heads`); heads 128 wide; any page size. Narrower heads are
    padded here: the queries cheaply, the pages by a copy of all of them at each call. A cache
    should therefore hold pages of `page_head_dim(K)`, with zeros after K, which takes no more
    memory on a TPU. mesh: heads are divided over tensor, everything else is replicated. sinks_H:
    the last page is a sinks_page, and belongs to no sequence. Raises ConfigError for
    heads too wide for sinks, and for sinks with a window, which would not contain the page.
    """
    K = q_tHK.shape[-1]
    if sinks_H is not None:
        refuse_sinks(K, scoring.window)
        q_tHK = with_sinks(q_tHK, sinks_H, page_head_dim(K))
        kv_lens = kv_lens + kv_pages.shape[1]
        page_indices = jnp.pad(
            page_indices, ((0, 0), (1, 0)), constant_values=kv_pages.shape[0] - 1
        )
    ways = head_ways(kv_pages, mesh)
    width = page_head_dim(max(q_tHK.shape[-1], kv_pages.shape[-1]))
    refuse_heads(q_tHK.shape[1] // ways, kv_pages.shape[2] // 2 // ways, width, kv_pages.dtype)

    def kernel(q: Array, pages: Array, *tables: Array) -> Array:
        pages_block, queries_block = ragged_blocks(
            q.shape[0], page_indices.shape[1], pages.shape[1], pages.shape[2], width, pages.dtype
        )
        return ragged_paged_attention(
            q,
            pages,
            *tables,
            sm_scale=K**-0.5,
            sliding_window=scoring.window or None,
            soft_cap=scoring.kernel_cap,
            num_kv_pages_per_block=pages_block,
            num_queries_per_block=queries_block,
        )

    if mesh is not None:
        heads = "tensor" if ways > 1 else None
        whole = (PartitionSpec(),) * 4
        kernel = jax.shard_map(
            kernel,
            mesh=mesh,
            in_specs=(PartitionSpec(None, heads), PartitionSpec(None, None, heads), *whole),
            out_specs=PartitionSpec(None, heads),
            check_vma=False,
        )
    out = kernel(
        _widened(q_tHK, width),
        _widened(kv_pages, width),
        kv_lens,
        page_indices,
        cu_q_lens,
        num_seqs,
    )
    real = jnp.arange(q_tHK.shape[0]) < cu_q_lens[num_seqs[0]]
    return jnp.where(real[:, None, None], out[..., :K], 0)


def ragged_blocks(
    tokens: int, pages_per_seq: int, page_size: int, kv_rows: int, head_dim: int, dtype: DTypeLike
) -> tuple[int, int]:
    """Return (pages, queries) in a block of `ragged_paged`; kv_rows is 2 N, keys and values.

    As many pages as a sequence has, at most 16, such that two buffers fit 4 MiB. The kernel handles
    2 N rows at a time, or 8 (float32) or 16 (bfloat16) if those divide 2 N.

    >>> ragged_blocks(256, 64, 32, 16, 128, jnp.bfloat16)
    (16, 32)
    >>> ragged_blocks(8, 4, 512, 20, 128, jnp.float32)
    (1, 8)
    """
    itemsize = jnp.dtype(dtype).itemsize
    tile = 8 * 4 // itemsize
    rows = tile if kv_rows % tile == 0 else kv_rows
    page_bytes = 2 * page_size * rows * head_dim * itemsize
    most = max(1, RAGGED_KV_BYTES // page_bytes)
    return min(pages_per_seq, MAX_RAGGED_PAGES, most), min(tokens, MAX_RAGGED_QUERIES)


def sequences_in_a_call(pages_per_seq: int) -> int:
    """Return the maximum number of sequences in a call of `ragged_paged`. Their page indices are in
    scalar memory, in rows of multiples of 128 x 4 bytes.

    >>> sequences_in_a_call(64), sequences_in_a_call(1026)
    (1024, 112)
    """
    row_bytes = 4 * 128 * -(-pages_per_seq // 128)
    return max(8, RAGGED_TABLE_BYTES // row_bytes // 8 * 8)


def refuse_heads(heads: int, kv_heads: int, head_dim: int, dtype: DTypeLike) -> None:
    """Raise ConfigError if `ragged_paged` cannot lay out such heads on one device.

    Its copies need key and value rows that fill registers (8 rows of 4 bytes), or 1, 2 or 4 of
    those rows. If it processes the rows in several parts, the queries of a part must fill
    registers, too.
    """
    packing = 4 // jnp.dtype(dtype).itemsize
    rows, rest = divmod(2 * kv_heads, packing)
    part = 4 * packing * heads // kv_heads  # queries of 8 * packing rows
    rows_fit = not rest and (rows in (1, 2, 4, 8) or (rows % 8 == 0 and part % 8 == 0))
    if not rows_fit or head_dim > LANES:
        raise ConfigError(
            f"sampler.attention=ragged cannot lay out {heads} query and {kv_heads} kv heads of "
            f"{head_dim} x {jnp.dtype(dtype)} on a device: it needs 1, 2, 4 or a multiple of 8 kv "
            f"heads, at most {LANES} wide. Set sampler.attention=gathered, or change "
            "mesh.sampler.tensor."
        )


def head_ways(kv_pages: Array, mesh: Mesh | None) -> int:
    """Return the number of devices that divide the kv heads; a key and its value stay together."""
    ways = 1 if mesh is None else mesh.shape["tensor"]
    return ways if (kv_pages.shape[2] // 2) % ways == 0 else 1


def _widened(x: Array, width: int) -> Array:
    """Pad the last axis with zeros up to `width`."""
    missing = width - x.shape[-1]
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, missing),)) if missing else x


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
