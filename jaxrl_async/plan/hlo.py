"""Parse a compiled program from its text: computations, instructions, and iterations of loops.

XLA's own summary (cost_analysis) counts a loop's body only once, and does not say which devices
communicate. So the text is parsed: each computation's instructions, times the number of iterations
of the loops around it. Everything is per device, as in the text. Pure functions.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

ITEM_BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2,
    "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8,
}  # fmt: skip
NO_ESTIMATE = 2**63 - 1
"""The TPU compiler's cycles for an instruction that it cannot estimate."""
MAX_NESTING = 64
"""Maximum nesting of computations in a program."""

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.\-]+)")
_BRANCHES = re.compile(
    r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=(%?[\w.\-]+))"
)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str  # as written: "bf16[8,128]{1,0}", or a tuple of such
    opcode: str
    operands: tuple[str, ...]  # names
    rest: str  # everything after the opcode
    is_root: bool

    @property
    def arrays(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(type, dimensions) of the result, one per array of a tuple."""
        return arrays_of(self.shape)

    @property
    def cycles(self) -> int:
        """The compiler's estimate; 0 if missing, NO_ESTIMATE if the compiler could not estimate."""
        match = _CYCLES.search(self.rest)
        return int(match[1]) if match else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A compiled program, parsed from its text."""

    entry: str
    computations: Mapping[str, tuple[Instruction, ...]]


def parse(text: str) -> Program:
    """Parse the text of a compiled program. Raises ValueError if it has no entry."""
    computations: dict[str, list[Instruction]] = {}
    entry, here = None, None
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            here = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line == "}":
            here = None
        elif here is not None and (found := _LINE.match(line)):
            here.append(_instruction(*found.groups()))
    if entry is None:
        raise ValueError("no ENTRY computation: this is not the text of a compiled program")
    return Program(entry=entry, computations={n: tuple(x) for n, x in computations.items()})


def _instruction(root: str | None, name: str, text: str) -> Instruction:
    size = len(_inside(text[1:])) + 2 if text.startswith("(") else len(text.split(" ", 1)[0])
    found = _OPCODE.match(text[size:])
    opcode, rest = found.groups() if found else ("unknown", text[size:])
    return Instruction(
        name=name,
        shape=text[:size],
        opcode=opcode,
        operands=tuple(re.findall(r"%([\w.\-]+)", _inside(rest))),
        rest=rest,
        is_root=bool(root),
    )


def _inside(rest: str) -> str:
    """Return the text before the bracket that closes the one opened before `rest`."""
    depth = 1
    for index, sign in enumerate(rest):
        depth += (sign == "(") - (sign == ")")
        if not depth:
            return rest[:index]
    return rest


def arrays_of(shape: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return (type, dimensions) of each array in a shape's text.

    >>> arrays_of("(bf16[2,3]{1,0}, f32[])")
    (('bf16', (2, 3)), ('f32', ()))
    """
    return tuple(
        (kind, tuple(int(d) for d in dims.split(",") if d))
        for kind, dims in _ARRAY.findall(shape)
        if kind in ITEM_BYTES
    )


def bytes_of(shape: str) -> float:
    """Count the bytes of all arrays in a shape's text, without the padding of tiles."""
    return sum(ITEM_BYTES[kind] * math.prod(dims) for kind, dims in arrays_of(shape))


# ---- loops and branches

Choice = Callable[[tuple[str, ...], tuple[float, ...]], str]
"""(computations, open_turns of the loops in them) -> the computation that counts."""


def walk(
    program: Program, choose: Choice, open_turns: Sequence[float] = ()
) -> Iterator[tuple[str, float]]:
    """Yield (computation, number of times it runs), counting loops.

    A computation that is called from several places is yielded once for each.

    choose: returns the branch of a conditional that counts, also for nested conditionals, since
    the branch that runs is decided at run time.
    open_turns: iterations of loops whose end is decided at run time, by the number of such loops
    around them; 0 for deeper ones.
    """
    yield from _walk(program, program.entry, 1.0, choose, tuple(open_turns), 0)


def _walk(
    program: Program,
    name: str,
    times: float,
    choose: Choice,
    open_turns: tuple[float, ...],
    depth: int,
) -> Iterator[tuple[str, float]]:
    assert depth < MAX_NESTING, f"{name} is nested too deep"
    yield name, times
    for instruction in program.computations.get(name, ()):
        iterations, left = 1.0, open_turns
        if instruction.opcode == "while":
            counted = trip_count(program, instruction, name)
            if counted is None:
                iterations, left = (open_turns[0] if open_turns else 0.0), open_turns[1:]
            else:
                iterations = float(counted)
        called = _CALLED.findall(instruction.rest)
        if branches := branches_of(instruction):
            called.append(choose(branches, left))
        for computation in called:
            yield from _walk(program, computation, times * iterations, choose, left, depth + 1)


def branches_of(instruction: Instruction) -> tuple[str, ...]:
    """Return a conditional's computations, one of which runs; () for other instructions."""
    if instruction.opcode != "conditional":
        return ()
    listed = ", ".join(a or b for a, b in _BRANCHES.findall(instruction.rest))
    return tuple(re.findall(r"[\w.\-]+", listed))


def trip_count(program: Program, loop: Instruction, where: str) -> int | None:
    """Return the iterations of a counting loop from its start, step and bound; None for other
    loops.

    XLA's text has these as constants: `compare(counter, 36), direction=LT`, `add(counter, 1)`.
    """
    if known := re.search(r'known_trip_count":?\{"?n"?:"?(\d+)', loop.rest):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", loop.rest)
    body = re.search(r"body=%?([\w.\-]+)", loop.rest)
    if not condition or not body:
        return None
    names = {i.name: i for i in program.computations.get(condition[1], ())}
    root = next((i for i in names.values() if i.is_root), None)
    if root is None or root.opcode != "compare" or "direction=LT" not in root.rest:
        return None
    counter, bound = (names.get(o) for o in root.operands[:2])
    limit = _constant(bound)
    if counter is None or limit is None or counter.opcode != "get-tuple-element":
        return None
    index = _index(counter)
    step = _step(program.computations.get(body[1], ()), index)
    start = _start(program.computations[where], loop, index)
    return None if step is None else max(0, -(-(limit - start) // step))


def _constant(instruction: Instruction | None) -> int | None:
    if instruction is None or instruction.opcode != "constant":
        return None
    found = re.match(r"(-?\d+)\)", instruction.rest)
    return int(found[1]) if found else None


def _index(element: Instruction) -> int:
    found = re.search(r"index=(\d+)", element.rest)
    assert found, "a get-tuple-element has an index"
    return int(found[1])


def _step(body: Sequence[Instruction], index: int) -> int | None:
    """Return the total that a loop's body adds to its counter, in any number of additions."""
    names = {i.name: i for i in body}
    root = next((i for i in body if i.is_root and i.opcode == "tuple"), None)
    if root is None:
        return None
    total, at = 0, names.get(root.operands[index])
    while at is not None and at.opcode in ("add", "copy"):
        constants = [_constant(names.get(o)) for o in at.operands]
        total += sum(c for c in constants if c is not None)
        others = [o for o, c in zip(at.operands, constants, strict=True) if c is None]
        at = names.get(others[0]) if others else None
    return total if total > 0 and at is not None and at.opcode == "get-tuple-element" else None


def _start(computation: Sequence[Instruction], loop: Instruction, index: int) -> int:
    """Return the counter's first value; 0 if the text does not give it."""
    names = {i.name: i for i in computation}
    given = names.get(loop.operands[0])
    while given is not None and given.opcode == "copy":
        given = names.get(given.operands[0])
    if given is None or given.opcode != "tuple":
        return 0
    first = names.get(given.operands[index])
    while first is not None and first.opcode == "copy":
        first = names.get(first.operands[0])
    return _constant(first) or 0
