"""HBM of one device by kind, on either side: what lies there for good, and what a program adds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxrl_async.plan.compiled import Compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Of one side. Bytes of a device."""

    kinds: Mapping[str, float]  # at the moment when there is most
    moment: str  # the program that runs then
    usable_bytes: float

    @property
    def total_bytes(self) -> float:
        """All kinds."""
        return sum(self.kinds.values())

    @property
    def fits(self) -> bool:
        """Whether the chip holds it."""
        return self.total_bytes <= self.usable_bytes

    @property
    def largest(self) -> str:
        """The kind that takes most."""
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
"""Kinds that are arguments or results of a program: what the compiler says that it needs holds
them. All others lie beside it."""


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
    """reference: that the gradient runs; resting: one that only looks at the step before it.

    The weights that were sent stay until every sampler has taken them, which may be in the next
    step: they count with the gradient and the update, too."""
    by_name = {p.name: p for p in programs}
    code = sum(p.code_bytes for p in programs)
    lying = {
        "parameters": params, "optimiser": optimizer, "reference": reference,
        "resting reference": resting,
        "weights in transfer": transfer, "code": code,
    }  # fmt: skip
    moments = {
        "gradient": {"gradients": gradients},
        "update": {"gradients": gradients},
        "cast": {},
    }
    return _worst(lying, moments, by_name, usable)


def sampler_memory(
    programs: Sequence[Compiled],
    *,
    weights: float,
    pages: float,
    state: float,
    usable: float,
) -> Memory:
    """The next weights come while the present ones are used; at the swap they are unpacked where
    those were."""
    by_name = {p.name: p for p in programs}
    code = sum(p.code_bytes for p in programs)
    lying = {
        "weights": weights, "next weights": weights, "KV cache": pages, "logits": state,
        "code": code,
    }  # fmt: skip
    moments: dict[str, dict[str, float]] = {"prepare": {}, "decode": {}, "prefill": {}}
    moments["prefill"]["prefilled"] = by_name["prefill"].output_bytes
    if "reshard" in by_name:
        moments["reshard"] = {}
    return _worst(lying, moments, by_name, usable)


def _worst(
    lying: Mapping[str, float],
    moments: Mapping[str, Mapping[str, float]],
    programs: Mapping[str, Compiled],
    usable: float,
) -> Memory:
    """The moment with most. A program that the compiler refused counts with what it asked for."""
    found = []
    for name, more in moments.items():
        kinds = {**lying, **more}
        program = programs[name]
        used = sum(v for k, v in kinds.items() if k in ARGUMENTS[name])
        asked = max(0.0, program.needed_bytes - used)
        kinds["activations and temporaries"] = max(program.temp_bytes, asked)
        found.append(
            Memory(
                kinds={k: v for k, v in kinds.items() if v},
                moment=name,
                usable_bytes=usable,
            )
        )
    return max(found, key=lambda m: m.total_bytes)
