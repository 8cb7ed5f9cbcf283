"""Settings of the players in a game's seats: the section `seats`. Needs no JAX."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from jaxrl_async.config.section import Count, NonNegative, Positive, ReadWith, Section

OF_ENDPOINT = ReadWith("endpoint", switches=("mixture",))
"""Marks settings that only an endpoint uses."""
INITIAL = "initial"
"""Model of a seat: the weights before the run's first update."""


class OlderSection(Section):
    """The league: one of several snapshots of the policy plays."""

    every: Positive = 10
    """Versions between two snapshots."""
    keep: Count = 8
    """Number of newest snapshots that may play."""
    pick: Literal["uniform", "latest", "worst"] = "uniform"
    """Choice of the snapshot: any (uniform), the latest, or the snapshots that win most often
    (worst: prioritised fictitious self-play)."""
    resident: Count = 2
    """Maximum snapshots on the sampler's devices; the others are loaded when they play."""


class FillingSection(Section):
    """The player in a seat: exactly one of policy, model, endpoint and older."""

    policy: bool = False
    """The policy itself, whose turns are trained on."""
    model: str | None = None
    """A Hugging Face directory with fixed weights, or initial: the run's first weights; with
    endpoint, the model's name there."""
    endpoint: str | None = Field(None, pattern=r"^https?://\S+$")
    """Address of an OpenAI-compatible endpoint, up to /v1."""
    older: OlderSection | None = None
    """Older versions of the policy."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature; null: sampler.temperature, or the endpoint's default."""
    max_tokens: Positive | None = None
    """Maximum tokens of a message; null: sampler.max_new_tokens, or the endpoint's default."""
    key_env: Annotated[str | None, OF_ENDPOINT] = Field(None, pattern=r"^\w+$")
    """Environment variable with the endpoint's API key."""
    extra: Annotated[dict[str, Any], OF_ENDPOINT] = Field({})
    """Further fields of each call."""
    send_seed: Annotated[bool, OF_ENDPOINT] = True
    """Send the endpoint a seed that depends only on run.seed, the game and the turn."""
    concurrency: Annotated[Count, OF_ENDPOINT] = 16
    """Maximum concurrent calls."""
    timeout_s: Annotated[float, OF_ENDPOINT] = Field(60.0, gt=0)
    """Timeout of one call, seconds."""
    retries: Annotated[NonNegative, OF_ENDPOINT] = 5
    """Retries of a call that broke or met an overload."""
    backoff_s: Annotated[float, OF_ENDPOINT] = Field(1.0, ge=0)
    """Wait before the first retry, seconds; doubles, up to 60."""

    @model_validator(mode="before")
    @classmethod
    def _from_word(cls, value: object) -> Any:
        """Accept the words `policy` and `initial`. Raises ValueError for another word."""
        words: Mapping[str, Any] = {"policy": {"policy": True}, INITIAL: {"model": INITIAL}}
        if isinstance(value, str) and value not in words:
            raise ValueError(
                f"{value!r} must be policy, initial, or a mapping such as {{model: DIR}}"
            )
        return words[value] if isinstance(value, str) else value


class WeightedFilling(FillingSection):
    """One player of a mixture."""

    weight: float = Field(1.0, gt=0)
    """Relative frequency of this player."""


class SeatFilling(FillingSection):
    """The player in a seat, or a mixture of players."""

    mixture: list[WeightedFilling] = Field([])
    """Several players, each with a `weight`: one is chosen at random for each group's games."""

    @property
    def choices(self) -> tuple[FillingSection, ...]:
        """All players that may fill the seat."""
        return tuple(self.mixture) or (self,)

    @property
    def weights(self) -> tuple[float, ...]:
        """Relative frequency of each of `choices`."""
        return tuple(one.weight for one in self.mixture) or (1.0,)


class SeatSection(SeatFilling):
    """The player in a seat, in training and in the evaluation."""

    eval: SeatFilling | None = None
    """The player in the evaluation; null: the same."""

    @property
    def in_evaluation(self) -> SeatFilling:
        """The player in the evaluation."""
        return self if self.eval is None else self.eval


def fillings(seats: Mapping[str, SeatSection]) -> Iterator[tuple[str, FillingSection]]:
    """Yield every filling with the path of its setting."""
    for seat, section in seats.items():
        for path, filling in ((seat, section), (f"{seat}.eval", section.eval)):
            if filling is None:
                continue
            if not filling.mixture:
                yield f"seats.{path}", filling
            for number, one in enumerate(filling.mixture):
                yield f"seats.{path}.mixture[{number}]", one


def frozen_models(seats: Mapping[str, SeatSection]) -> tuple[str, ...]:
    """Return the directories of the models that fill seats, each once."""
    paths = (one.model for _, one in fillings(seats) if one.model and one.endpoint is None)
    return tuple(dict.fromkeys(path for path in paths if path != INITIAL))


def resident_snapshots(seats: Mapping[str, SeatSection]) -> int:
    """Return how many versions of the policy may be on the sampler's devices to fill seats."""
    filled = [one for _, one in fillings(seats) if one.endpoint is None]
    league = max((min(o.resident, o.keep) for one in filled if (o := one.older)), default=0)
    return league + any(one.model == INITIAL for one in filled)


def has_opponents(seats: Mapping[str, SeatSection]) -> bool:
    """Return whether weights on the sampler's devices fill seats."""
    return bool(frozen_models(seats) or resident_snapshots(seats))
