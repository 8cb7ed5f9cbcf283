"""Compute the cost of a compiled program from its text: products, bytes, seconds, collectives and
kernels, per device. Pure functions.

The text does not give the cost of Pallas and cuDNN kernels. For attention in training, the experts'
products and the sampling of tokens it is computed from the shapes of their arguments, here and in
pace.py (attention on the pages depends on the lengths at run time: plan.py uses the mean).

One branch of each conditional counts, since one runs: the branch with cuDNN's attention if any,
else the costliest. The text does not say which one runs: gpu_packed.py decides by the number of
segments in the rows, and the rows of a plan have one segment each.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from jaxrl_async.plan.hlo import ITEM_BYTES, Instruction, Program, arrays_of, bytes_of, walk
from jaxrl_async.plan.pace import Pace

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
FREE = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "while", "conditional",
    "call", "after-all", "partition-id", "copy-done", "slice-done", "iota", "unknown", "send",
    "recv",
}  # fmt: skip
"""Opcodes that do not move any bytes themselves."""
ARRAY = r"[a-z]\w*\[[\d,]*\](?:\{[^}]*\})?"
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_PALLAS_NAME = re.compile(r'op_name="[^"]*?([\w=]+)\)*/(?:pallas_call|mpmd_map)"')
_OPERANDS = re.compile(r"operand_layout_constraints=\{(.*?)\}(?:, [a-z_]+=|$)")
IN_VMEM = re.compile(r"S\([1-9]\d*\)")
"""Memory space of an array that is not in HBM."""
ATTENTION_PRODUCTS = {
    "splash_mha_fwd": 2, "splash_mha_dkv": 4, "splash_mha_dq": 3,
    "flash_forward": 2, "flash_keys": 4, "flash_queries": 3,
    "cudnn_attention_backward": 5, "cudnn_attention": 2,
}  # fmt: skip
"""Number of matrix products of [t, T, K] in each attention kernel; causal: half of each."""
KERNEL_CALLS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu_v2")
"""Targets of custom calls that are Pallas kernels."""
CUDNN_ATTENTION = "__cudnn$fmha"
GROUPED = ("ragged-dot", "gmm", "tgmm", "grouped_")
"""Prefixes of the names of the experts' products: XLA's, and kernels for TPUs and for cards."""


BETWEEN_SLICES = "slices, over the data center network"
"""Used instead of a collective's axes if it is between slices."""
MEGASCALE = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
"""Marks transfers from slice to slice, through the hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Communication of one kind among the devices of one or several mesh axes."""

    kind: str
    axes: str  # "fsdp", "data+fsdp"; BETWEEN_SLICES
    group: int  # number of devices that communicate
    num_bytes: float  # sent by a device, all times together
    times: float
    near: int = 0  # for cards: devices of the group in one host; 0: hosts do not matter


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The calls of one Pallas kernel."""

    name: str
    times: float
    flops: float  # 0 if it depends on more than shapes
    num_bytes: float = 0.0  # to and from HBM, for the experts' products
    length: int = 0  # for attention in training and prefills: keys of a row
    width: int = 0  # for attention: head width


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one run of a program on one device."""

    flops: float = 0.0  # matrix products, without kernels
    num_bytes: float = 0.0  # to and from HBM, without kernels
    compute_s: float = 0.0  # sum over instructions, without kernels
    products_s: float = 0.0  # the part in instructions with a matrix product
    collectives: tuple[Collective, ...] = ()
    kernels: tuple[Kernel, ...] = ()


def cost_of(
    program: Program,
    mesh: Mapping[str, int],
    pace: Pace,
    *,
    open_turns: Sequence[float] = (),
    host: int = 0,
) -> Cost:
    """Count the cost of a program on a mesh with these axes and sizes.

    Args:
        program: parsed from its text.
        mesh: axes and their sizes.
        pace: how long an instruction takes.
        open_turns: assumed iterations of data-dependent loops, by nesting depth; 0 if deeper.
        host: number of devices in a host, which are neighbours in the mesh, if cards of one host
            send faster than cards of several; 0: hosts do not matter.
    """

    times: dict[str, float] = defaultdict(float)
    choose = partial(_branch_that_counts, program, mesh, pace)
    for name, count in walk(program, choose, open_turns):
        times[name] += count
    inner = set(_fused(program))
    multiplies = _with_products(program)
    flops = num_bytes = compute_s = products_s = 0.0
    collectives: dict[str, tuple[Instruction, float, str]] = {}
    between: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    kernels: dict[tuple[str, int, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for name, count in times.items():
        shapes = {i.name: i.shape for i in program.computations[name]}
        for i in program.computations[name]:
            flops += count * product_flops(i, shapes)
            if name not in inner:
                moved, multiplied = _bytes(program, i, shapes), _flops_within(program, i, shapes)
                seconds = count * pace(i, multiplied, moved)
                compute_s += seconds
                if _is_product(i) or multiplies & set(_CALLS.findall(i.rest)):
                    products_s += seconds
                num_bytes += count * moved
            if (kind := _collective_kind(i, name)) is not None:
                key = _channel(i)
                if key not in collectives or collectives[key][1] < count:
                    collectives[key] = (i, count, kind)
            if i.opcode == "send" and MEGASCALE in i.rest:
                kind, slices, sent = _between_slices(i)
                between[kind, slices][0] += count * sent
                between[kind, slices][1] += count
            if kernel := _kernel_name(i):
                flops_of, bytes_moved = _grouped(kernel, i, mesh.get("expert", 1))
                attended, length, width = _attention(kernel, i)
                sums = kernels[kernel, length, width]
                sums[0] += count
                sums[1] += count * (flops_of + attended)
                sums[2] += count * bytes_moved
    return Cost(
        flops=flops,
        num_bytes=num_bytes,
        compute_s=compute_s,
        products_s=products_s,
        collectives=(
            *_summed(list(collectives.values()), mesh, host),
            *(
                Collective(kind=k, axes=BETWEEN_SLICES, group=g, num_bytes=b, times=n)
                for (k, g), (b, n) in sorted(between.items())
            ),
        ),
        kernels=_kernels(kernels),
    )


def _kernels(sums: Mapping[tuple[str, int, int], Sequence[float]]) -> tuple[Kernel, ...]:
    """Return our kernels from their number, operations and bytes by name, length and width."""
    return tuple(
        Kernel(name=k, times=n, flops=f, num_bytes=b, length=T, width=K)
        for (k, T, K), (n, f, b) in sorted(sums.items())
    )


def _branch_that_counts(
    program: Program,
    mesh: Mapping[str, int],
    pace: Pace,
    branches: tuple[str, ...],
    open_turns: tuple[float, ...],
) -> str:
    """Return the conditional's branch with cuDNN's attention, or else the costliest."""

    def weight(name: str) -> tuple[bool, float, float]:
        branch = Program(entry=name, computations=program.computations)
        cost = cost_of(branch, mesh, pace, open_turns=open_turns)
        by_cudnn = any(k.name.startswith("cudnn_attention") for k in cost.kernels)
        return by_cudnn, cost.flops + sum(k.flops for k in cost.kernels), cost.compute_s

    return max(branches, key=weight)


def _fused(program: Program) -> Iterator[str]:
    """Find computations inside fusions, whose memory traffic the fusion counts."""
    for instructions in program.computations.values():
        for i in instructions:
            if i.opcode == "fusion" and (found := _CALLS.search(i.rest)):
                yield found[1]
            elif i.opcode not in ("while", "conditional", "call", "fusion"):
                yield from re.findall(r"to_apply=%?([\w.\-]+)", i.rest)


# ---- products


def _is_product(i: Instruction) -> bool:
    return i.opcode in ("dot", "convolution")


def _with_products(program: Program) -> set[str]:
    """Find computations that multiply matrices, directly or in a fusion."""
    calls = {
        name: {c for i in instructions for c in _CALLS.findall(i.rest)}
        for name, instructions in program.computations.items()
    }
    found: set[str] = set()
    more = {n for n, own in program.computations.items() if any(map(_is_product, own))}
    while more - found:
        found |= more
        more = {name for name, called in calls.items() if called & found}
    return found


def _flops_within(program: Program, i: Instruction, shapes: Mapping[str, str]) -> float:
    """Return the FLOPs of an instruction; for a fusion, the FLOPs of its instructions."""
    if i.opcode != "fusion":
        return product_flops(i, shapes)
    total = 0.0
    for name in _CALLS.findall(i.rest):
        inside = program.computations.get(name, ())
        own = {inner.name: inner.shape for inner in inside}
        total += sum(_flops_within(program, inner, own) for inner in inside)
    return total


def product_flops(i: Instruction, shapes: Mapping[str, str]) -> float:
    """Return two FLOPs per multiplication of a `dot` or `convolution`; 0 for anything else."""
    if not _is_product(i) or len(i.operands) < 2:
        return 0.0
    out, left, right = (
        arrays_of(s)[0][1] for s in (i.shape, shapes[i.operands[0]], shapes[i.operands[1]])
    )
    if i.opcode == "dot":
        match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.rest)
        contracted = [left[int(d)] for d in match[1].split(",") if d] if match else []
        return 2.0 * math.prod(out) * math.prod(contracted)
    return _convolution_flops(out, left, right, i.rest)


def _convolution_flops(
    out: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...], rest: str
) -> float:
    """Count the multiplications of a convolution.

    The TPU compiler writes every matrix product as a convolution: batch dimensions become a window
    of their size, in which one position of each is not padding.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", rest)
    if not labels:
        return 0.0
    of_left, of_right, of_out = labels.groups()
    total = 2.0 * out[of_out.index("b")] * out[of_out.index("f")] * right[of_right.index("i")]
    window = re.search(r"window=\{([^}]*)\}", rest)
    settings = dict(w.split("=") for w in window[1].split()) if window else {}
    spatial = sorted(label for label in of_out if label.isdigit())
    for number, label in enumerate(spatial):

        def setting(key: str, default: str, number: int = number) -> str:
            return settings[key].split("x")[number] if key in settings else default

        low = int(setting("pad", "0_0").split("_")[0])
        total *= _valid(
            size=int(setting("size", "1")),
            out=out[of_out.index(label)],
            base=left[of_left.index(label)],
            stride=int(setting("stride", "1")),
            low=low,
            base_dilation=int(setting("lhs_dilate", "1")),
            dilation=int(setting("rhs_dilate", "1")),
        )
    groups = re.search(r"batch_group_count=(\d+)", rest)
    return total / (int(groups[1]) if groups else 1)


def _valid(
    *, size: int, out: int, base: int, stride: int, low: int, base_dilation: int, dilation: int
) -> int:
    """Count pairs of output and window positions that hit a value, not padding."""
    last = (base - 1) * base_dilation
    positions = range(-low, (out - 1) * stride - low + 1, stride)
    return sum(
        0 <= position + k * dilation <= last and (position + k * dilation) % base_dilation == 0
        for k in range(size)
        for position in positions
    )


# ---- bytes


def _bytes(program: Program, i: Instruction, shapes: Mapping[str, str]) -> float:
    """Return the bytes that an instruction moves to and from HBM."""
    if i.opcode in FREE or i.opcode.endswith("-done") or "AllocateBuffer" in i.rest:
        return 0.0
    if _kernel_name(i) or "ConcatBitcast" in i.rest:
        return 0.0
    inside = None
    if i.opcode == "fusion" and (found := _CALLS.search(i.rest)):
        inside = program.computations.get(found[1])
    if i.opcode == "copy-start":  # (to, from, a number): one of them is in VMEM
        return _in_hbm(i.shape)
    if i.opcode == "slice-start":  # ((from), to, a number)
        to = re.findall(ARRAY, i.shape)[1]
        return bytes_of(to) + _in_hbm(to)
    if inside is None:
        if i.opcode in ("dynamic-slice", "gather", "slice"):
            return 2 * _in_hbm(i.shape)
        if i.opcode in ("dynamic-update-slice", "scatter"):
            return 2 * bytes_of(shapes.get(i.operands[-1 if i.opcode == "scatter" else 1], ""))
        return _in_hbm(i.shape) + sum(_in_hbm(shapes.get(o, "")) for o in set(i.operands))
    return _written(inside, i.shape) + sum(
        _read(inside, number, shapes.get(o, "")) for number, o in enumerate(i.operands)
    )


def _in_hbm(shape: str) -> float:
    """Return the bytes of the arrays in a shape's text that are in HBM."""
    return sum(bytes_of(p) for p in re.findall(ARRAY, shape) if not IN_VMEM.search(p))


def _read(inside: Sequence[Instruction], number: int, shape: str) -> float:
    """Return the bytes of an argument that a fusion reads: all, or only the slices that it uses."""
    whole = _in_hbm(shape)
    parameter = next(
        (p for p in inside if p.opcode == "parameter" and p.rest.startswith(f"{number})")), None
    )
    if not whole or parameter is None:
        return whole
    names = {parameter.name}
    part = 0.0
    for user in inside:
        if not names & set(user.operands):
            continue
        if user.opcode == "bitcast":
            names.add(user.name)
        elif user.opcode in ("dynamic-slice", "slice", "gather"):
            part += bytes_of(user.shape)
        elif user.opcode in ("dynamic-update-slice", "scatter") and user.operands[0] in names:
            continue  # in place: the update counts as written
        else:
            return whole
    return min(part, whole)


def _written(inside: Sequence[Instruction], shape: str) -> float:
    """Return the bytes that a fusion writes: its result, or an in-place update."""
    whole = _in_hbm(shape)
    names = {i.name: i for i in inside}
    root = next((i for i in inside if i.is_root), None)
    while root is not None and root.opcode == "bitcast":
        root = names.get(root.operands[0])
    if root is not None and root.opcode in ("dynamic-update-slice", "scatter"):
        update = names.get(root.operands[-1 if root.opcode == "scatter" else 1])
        return min(whole, bytes_of(update.shape)) if update else whole
    return whole


# ---- kernels


def _kernel_name(i: Instruction) -> str | None:
    """Return the name of a Pallas kernel, or of cuDNN's attention, without its trailing number;
    None for other instructions."""
    target = _TARGET.search(i.rest) if i.opcode == "custom-call" else None
    if target is None:
        return None
    if target[1].startswith(CUDNN_ATTENTION):
        return "cudnn_attention" + ("_backward" if target[1].endswith("Backward") else "")
    if target[1] not in KERNEL_CALLS:
        return None
    named = _PALLAS_NAME.search(i.rest)  # for a card; for a TPU it is the instruction's name
    return re.sub(r"[.\d]+$", "", named[1] if named else i.name)


def _attention(name: str, i: Instruction) -> tuple[float, int, int]:
    """Return the FLOPs of a training attention kernel, the keys T of a row, and the width K of its
    heads.

    FLOPs are 2 t * T * K per product and head, halved (causal). Splash attention has queries
    [heads, t, K] or [rows, heads, t, K] as the first argument that is not a mask, keys [..., T, K]
    as the second; the kernels for cards have [rows, t, heads, K] and [rows, T, heads, K].

    If the axis context divides the lengths, t is a part of T. Half of the keys are still visible on
    average, since a device has an early and a late part (model/layout.py).
    """
    products = next((n for part, n in ATTENTION_PRODUCTS.items() if name.startswith(part)), 0)
    given = _OPERANDS.search(i.rest)
    if not products or not given:
        return 0.0, 0, 0
    wide = [d for kind, d in arrays_of(given[1]) if len(d) >= 3 and kind in ("bf16", "f32")]
    queries, keys = (*wide, (0, 0, 0), (0, 0, 0))[:2]
    length = keys[-2] if name.startswith("splash") else keys[1]
    return products * math.prod(queries) * length, length, queries[-1]


def _grouped(name: str, i: Instruction, ways: int) -> tuple[float, float]:
    """Return the FLOPs and bytes of a product of rows with their experts' matrices (model/grouped).

    Rows [n, D] and [n, F], matrices [E, D, F], in any order. Rows for the experts of other devices
    are present only for the shape: with `ways` devices, 1 / ways of the rows count on average.
    Experts are assumed to be chosen evenly: few rows need few experts' matrices.
    """
    given = _OPERANDS.search(i.rest)
    grouped = name.startswith(GROUPED) or "mosaic_gpu" in i.rest
    if not grouped or not given:
        return 0.0, 0.0
    arrays = [(k, d) for k, d in (*i.arrays, *arrays_of(given[1])) if k in ("bf16", "f32")]
    matrices = next((a for a in arrays if len(a[1]) == 3), None)
    if matrices is None:
        return 0.0, 0.0
    kind, (experts, *sides) = matrices
    rows = [(k, d) for k, d in arrays if len(d) == 2]
    n = rows[0][1][0] / ways
    used = experts * (1 - (1 - 1 / experts) ** n)
    moved = sum(ITEM_BYTES[k] * n * d[1] for k, d in rows)
    return 2 * n * math.prod(sides), moved + ITEM_BYTES[kind] * used * math.prod(sides)


# ---- collectives


def _collective_kind(i: Instruction, where: str) -> str | None:
    kind = next((k for k in COLLECTIVES if i.opcode in (k, f"{k}-start")), None)
    # The TPU compiler writes a reduce-scatter as a fusion of that name: a sum, and a share of it.
    return "reduce-scatter" if kind == "all-reduce" and "all-reduce-scatter" in where else kind


def _channel(i: Instruction) -> str:
    """Return a key of a collective: parts of one asynchronous fusion share their channel."""
    match = re.search(r"channel_id=(\d+)", i.rest)
    return f"{i.opcode.removesuffix('-start')} {match[1]}" if match else i.name


def _summed(
    collectives: Sequence[tuple[Instruction, float, str]], mesh: Mapping[str, int], host: int
) -> tuple[Collective, ...]:
    totals: dict[tuple[str, str, int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for i, count, kind in collectives:
        pairs = kind == "collective-permute"
        groups = parse_groups(i.rest) or (tuple(range(math.prod(mesh.values()))),)
        size = 2 if pairs else max(map(len, groups))
        axes = group_axes(groups, mesh)
        if size == 1 or not axes:
            continue
        entry = totals[kind, axes, size, near_in(groups, host) if host else 0]
        entry[0] += count * _sent(kind, _result_bytes(i), size)
        entry[1] += count
    return tuple(
        Collective(kind=k, axes=a, group=g, num_bytes=b, times=n, near=near)
        for (k, a, g, near), (b, n) in sorted(totals.items(), key=lambda item: -item[1][0])
    )


def _between_slices(i: Instruction) -> tuple[str, int, float]:
    """Return the kind of a transfer to other slices, the number of slices, and the bytes that a
    device sends.

    The instruction holds what a device contributes: its share of an all-gather, all of a sum.
    Slices are named as in _xla_megascale_target="{1,2}x{0:3}", by numbers and ranges.
    """
    found = re.search(r'_xla_megascale_transfer_type="(\w+)"', i.rest)
    kind = found[1].lower().replace("_", "-") if found else "send"
    target = re.search(r'_xla_megascale_target="\{([\d,:]*)\}', i.rest)
    spans = [part.split(":") for part in target[1].split(",")] if target else []
    slices = max(2, sum(int(span[-1]) - int(span[0]) + 1 for span in spans if span[0]))
    given = max((bytes_of(a) for a in re.findall(r"[a-z]\w*\[[\d,]*\]", i.shape)), default=0.0)
    if kind == "all-gather":
        return kind, slices, given * (slices - 1)
    return kind, slices, _sent(kind, given, slices) if kind in COLLECTIVES else given


def _result_bytes(i: Instruction) -> float:
    """Return the bytes of a collective's result. A start's tuple also holds its arguments, except
    for an all-reduce."""
    sizes = [bytes_of(a) for a in re.findall(r"[a-z]\w*\[[\d,]*\]", i.shape)]
    if i.opcode == "all-gather-start" and i.shape.startswith("(("):
        return sum(sizes[len(sizes) // 2 :])  # several arrays: ((arguments), (results))
    if i.opcode.endswith("-start") and i.opcode != "all-reduce-start" and len(sizes) > 1:
        return max(sizes)
    return sum(sizes)


def _sent(kind: str, result: float, size: int) -> float:
    """Return the bytes that a device sends in a ring.

    result: bytes of the whole array: an all-gather's result, a reduce-scatter's argument.
    """
    if kind == "collective-permute":
        return result
    return result * (size - 1) / size * (2 if kind == "all-reduce" else 1)


def parse_groups(rest: str) -> tuple[tuple[int, ...], ...]:
    """Parse the devices of each group, in any of XLA's three notations.

    >>> parse_groups("replica_groups={{0,1},{2,3}}, x")
    ((0, 1), (2, 3))
    >>> parse_groups("replica_groups=[2,2]<=[2,2]T(1,0), x")
    ((0, 2), (1, 3))
    >>> parse_groups("replica_groups=mesh['a'=2,'b'=2] {'a'}, x")
    ((0, 2), (1, 3))
    >>> parse_groups("source_target_pairs={{0,1},{1,0}}")
    ((0, 1), (1, 0))
    """
    if found := re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)+)\}", rest):
        return tuple(
            tuple(int(d) for d in group.split(",") if d)
            for group in re.findall(r"\{([\d,]*)\}", found[1])
        )
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        dims = [int(d) for d in found[3].split(",")]
        order = [int(d) for d in found[4].split(",")] if found[4] else list(range(len(dims)))
        ids = _transposed(dims, order)
        size = int(found[2])
        return tuple(tuple(ids[at : at + size]) for at in range(0, len(ids), size))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", rest):
        axes = [a.split("=") for a in found[1].split(",")]
        names, dims = [a[0] for a in axes], [int(a[1]) for a in axes]
        within = [names.index(a.strip()) for a in found[2].split(",")]
        rest_of = [d for d in range(len(dims)) if d not in within]
        ids = _transposed(dims, rest_of + within)
        size = math.prod(dims[d] for d in within)
        return tuple(tuple(ids[at : at + size]) for at in range(0, len(ids), size))
    return ()


def _transposed(dims: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return 0, 1, 2, ... of shape dims, transposed and read in order."""
    strides = [math.prod(dims[d + 1 :]) for d in range(len(dims))]
    ids = [0]
    for d in order:
        ids = [i + k * strides[d] for i in ids for k in range(dims[d])]
    return ids


def near_in(groups: Sequence[Sequence[int]], host: int) -> int:
    """Return the smallest number of a group's members in the same host of `host` devices. Traffic
    that leaves the host uses the network cards of these devices.

    >>> near_in(((0, 1), (2, 3)), 2), near_in(((0, 1, 2, 3),), 2), near_in(((0, 2), (1, 3)), 2)
    (2, 2, 1)
    """
    return min(min(Counter(d // host for d in group).values()) for group in groups)


def group_axes(groups: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> str:
    """Return the mesh axes along which a group's members differ, joined by +.

    "" if each member is alone. No groups: all devices are one group.
    """
    names, sizes = list(mesh), list(mesh.values())
    if not groups:
        return "+".join(n for n, s in mesh.items() if s > 1)
    differ = set()
    for group in groups:
        first = _coordinates(group[0], sizes)
        for device in group[1:]:
            differ |= {
                n
                for n, a, b in zip(names, first, _coordinates(device, sizes), strict=True)
                if a != b
            }
    return "+".join(n for n in names if n in differ)


def _coordinates(device: int, sizes: Sequence[int]) -> list[int]:
    return [device // math.prod(sizes[d + 1 :]) % sizes[d] for d in range(len(sizes))]
