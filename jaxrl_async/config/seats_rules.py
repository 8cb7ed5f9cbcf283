"""Rules about the players of a game (seats). Needs no JAX."""

from collections.abc import Iterator

from jaxrl_async.config.rule import RuleBook
from jaxrl_async.config.schema import Config
from jaxrl_async.config.seats_section import FillingSection, fillings

rule = RuleBook()

OWN_CALL_FIELDS = ("model", "messages", "tools", "stream", "n", "temperature", "max_tokens", "seed")
"""Fields of a player's call that other settings decide, or that would make replies unreadable."""


def has_own_weights(filling: FillingSection) -> bool:
    """Return whether a player's weights are on the sampler's devices."""
    frozen = filling.model is not None and filling.endpoint is None
    return frozen or filling.older is not None


@rule("seats")
def each_seat_is_filled_once(config: Config) -> Iterator[str]:
    """Require exactly one kind of player per seat."""
    for path, filling in fillings(config.players):
        ways = [
            name
            for name, present in (
                ("policy", filling.policy),
                ("model", filling.model is not None and filling.endpoint is None),
                ("endpoint", filling.endpoint is not None),
                ("older", filling.older is not None),
            )
            if present
        ]
        if len(ways) != 1:
            yield (
                f"{path} names {' and '.join(ways) or 'no player'}. Give one of: policy, "
                "{model: DIR}, {endpoint: URL, model: NAME}, {older: {every: N}}, or a mixture of "
                "these."
            )
    for path, seat in [
        *((f"seats.{name}", section) for name, section in config.players.items()),
        *((f"seats.{name}.eval", s.eval) for name, s in config.players.items() if s.eval),
    ]:
        another = seat.policy or seat.model or seat.endpoint or seat.older
        if seat.mixture and another:
            yield f"{path} has a mixture and another player. Move that player into the mixture."


@rule("seats")
def an_endpoint_names_its_model(config: Config) -> Iterator[str]:
    """Require a model name for an endpoint, and no field of its calls that is set elsewhere."""
    for path, filling in fillings(config.players):
        if filling.endpoint is not None and filling.model is None:
            yield f"{path}.endpoint needs {path}.model, the model's name there. Set it."
        if reserved := [name for name in OWN_CALL_FIELDS if name in filling.extra]:
            yield (
                f"{path}.extra has {', '.join(reserved)}, which other settings of this player "
                "decide. Leave it out of extra."
            )


@rule("seats", job="rl")
def seats_are_of_a_run_that_plays(config: Config) -> Iterator[str]:
    """Refuse seats for a run without a game."""
    if config.players and config.task is None:
        yield (
            f"seats ({', '.join(config.players)}) are the players of a game, and task is null. Set "
            "a task with a game, such as nim."
        )


@rule(job="rl")
def opponents_have_devices(config: Config) -> Iterator[str]:
    """Refuse opponents with weights if this process has no sampler's devices for them."""
    paths = [path for path, filling in fillings(config.players) if has_own_weights(filling)]
    if not paths:
        return
    instead = "Serve the opponent (python -m jaxrl_async.serve DIR) and set endpoint"
    if config.mesh.remote:
        yield (
            f"{paths[0]} has weights on the sampler's devices, which with mesh.samplers_in="
            f"{config.mesh.samplers_in} are another process's. {instead}, or samplers_in=threads."
        )
    if config.sampler.engine != "native":
        yield (
            f"{paths[0]} has weights on the sampler's devices, and with sampler.engine="
            f"{config.sampler.engine} this process has none. {instead}."
        )
    if config.mesh.samplers > 1 and config.mesh.sampler.num_devices > 1:
        yield (
            f"{paths[0]} computes alternately with the sampler whose devices it shares; with "
            f"mesh.samplers={config.mesh.samplers} of several devices each, all would wait for it. "
            f"Set mesh.samplers=1 or one device each. {instead} otherwise."
        )
