"""HBM of one device by kind, on either side: what always is there, and what a program adds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxrl_async.plan.compiled import Compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of one side, in bytes per device."""

    kinds: Mapping[str, float]  # at the moment of the peak
    moment: str  # the program that runs then
    usable_bytes: float

    @property
    def total_bytes(self) -> float:
        """The sum of all kinds."""
        return sum(self.kinds.values())

    @property
    def fits(self) -> bool:
        """Whether the chip's memory is enough."""
        return self.total_bytes <= self.usable_bytes

    @property
    def largest(self) -> str:
        """The kind that takes most memory."""
        return max(self.kinds, key=lambda name: self.kinds[name])


ARGUMENTS = {
    "gradient": ("parameters", "gradients", "reference"),
    "update": ("parameters", "gradients", "optimiser"),
    "cast": ("parameters", "weights in transfer"),
    "prepare": ("next weights", "weights"),
    "prefill": ("weights", "KV cache", "prefilled"),
    "decode": ("weights", "KV cache", "logits"),
    "reshard": ("next weights",),
}
"""Kinds that are arguments or results of a program, so that the compiler's number includes them.
All others come on top of it."""


def trainer_memory(
    programs: Sequence[Compiled],
    *,
    params: float,
    gradients: float,
    optimizer: float,
    reference: float,
    resting: float = 0.0,
    transfer: float,
    usable: float,
) -> Memory:
    """Return the trainer's memory at its peak.

    The weights in transfer stay until every sampler has taken them, which may be in the next step,
    so they count with the gradient and the update, too.

    Args:
        programs: the trainer's, compiled.
        params, gradients, optimizer: bytes of the training state.
        reference: bytes of a reference that the gradient runs.
        resting: bytes of a reference that only a pass before the gradient runs.
        transfer: bytes of the weights in transfer.
        usable: bytes that programs may have.
    """
    by_name = {p.name: p for p in programs}
    code = sum(p.code_bytes for p in programs)
    resident = {
        "parameters": params, "optimiser": optimizer, "reference": reference,
        "resting reference": resting,
        "weights in transfer": transfer, "code": code,
    }  # fmt: skip
    moments = {
        "gradient": {"gradients": gradients},
        "update": {"gradients": gradients},
        "cast": {},
    }
    return _worst(resident, moments, by_name, usable)


def sampler_memory(
    programs: Sequence[Compiled],
    *,
    weights: float,
    pages: float,
    state: float,
    usable: float,
) -> Memory:
    """Return a sampler's memory at its peak.

    The next weights arrive while the present ones are in use; at the swap they are unpacked in
    their place.
    """
    by_name = {p.name: p for p in programs}
    code = sum(p.code_bytes for p in programs)
    resident = {
        "weights": weights, "next weights": weights, "KV cache": pages, "logits": state,
        "code": code,
    }  # fmt: skip
    moments: dict[str, dict[str, float]] = {"prepare": {}, "decode": {}, "prefill": {}}
    moments["prefill"]["prefilled"] = by_name["prefill"].output_bytes
    if "reshard" in by_name:
        moments["reshard"] = {}
    return _worst(resident, moments, by_name, usable)


def _worst(
    resident: Mapping[str, float],
    moments: Mapping[str, Mapping[str, float]],
    programs: Mapping[str, Compiled],
    usable: float,
) -> Memory:
    """Return the memory at the peak. A program that the compiler refused counts as it asked."""
    candidates = []
    for name, more in moments.items():
        kinds = {**resident, **more}
        program = programs[name]
        used = sum(v for k, v in kinds.items() if k in ARGUMENTS[name])
        asked = max(0.0, program.needed_bytes - used)
        kinds["activations and temporaries"] = max(program.temp_bytes, asked)
        candidates.append(
            Memory(
                kinds={k: v for k, v in kinds.items() if v},
                moment=name,
                usable_bytes=usable,
            )
        )
    return max(candidates, key=lambda m: m.total_bytes)
