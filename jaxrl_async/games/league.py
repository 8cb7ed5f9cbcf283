"""The players of a run's games: checked before the run, and made once it has weights."""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_async.config.schema import Config
from jaxrl_async.config.seats_section import (
    FillingSection,
    fillings,
    frozen_models,
    has_opponents,
    resident_snapshots,
)
from jaxrl_async.data.chat import chat_format
from jaxrl_async.data.tokenizer import load_tokenizer
from jaxrl_async.errors import ConfigError
from jaxrl_async.games.endpoint_player import EndpointPlayer, PlayerEndpoint
from jaxrl_async.games.opponent_pool import FrozenPool
from jaxrl_async.games.opponents import (
    LeagueTerms,
    Opponents,
    WatchedPublisher,
    WatchedSource,
)
from jaxrl_async.games.seating import SeatedPlayer, chance
from jaxrl_async.games.snapshots import Snapshots
from jaxrl_async.games.weights_player import AnswerLimits, WeightsPlayer
from jaxrl_async.judge.judge_client import JudgeMeter
from jaxrl_async.mesh import SAMPLER_RULES, DeviceGuard, Slices, shardings
from jaxrl_async.metrics.fault_counts import FaultCounts
from jaxrl_async.model.hf import check_params, load_params, load_spec
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec, Params, weight_table
from jaxrl_async.outages import Outages
from jaxrl_async.ports.rollout import ChatFormat, GroupSource, Player
from jaxrl_async.ports.weights import Publisher
from jaxrl_async.run.builders.initial_policy import check_lengths
from jaxrl_async.run.folder import Paths
from jaxrl_async.run.lockstep import Lockstep
from jaxrl_async.sampler.setup import SamplerSettings, build_setup
from jaxrl_async.types import EpisodeGroup, Prompt, SamplingParams, Ticket

log = logging.getLogger(__name__)

LEAGUE = "league"
"""Folder for the snapshots, inside the run's folder."""
SEEDS = 2**31 - 1
SLACK = 8
"""Versions that a ticket may lag in addition to the staleness limit, for late cancellations."""


class RunOpponents:
    """The players of a run. `opponents` is set by `begin`; until then, and in a run without
    `seats`, the policy fills all seats."""

    def __init__(
        self,
        config: Config,
        chat: ChatFormat | None,
        spec: ModelSpec,
        faults: FaultCounts,
        outages: Outages | None = None,
    ) -> None:
        """Check everything that can be checked before the run. Raises ConfigError, CheckpointError,
        DataError.

        Args:
            config: seats, sampler, and so on.
            chat: the policy's format; None: it has none.
            spec: the policy's spec.
            faults: counts recovered faults.
            outages: Outages of the endpoints; None: a new object for each.
        """
        self.opponents: Opponents | None = None
        self._policy: Policy | None = None
        self._config, self._chat, self._spec = config, chat, spec
        self._pools: dict[str | None, FrozenPool] = {}
        self._chats: dict[str | None, ChatFormat] = {} if chat is None else {None: chat}
        self._specs = {path: self._checked(path) for path in frozen_models(config.players)}
        self._endpoints: dict[str, PlayerEndpoint] = {}
        self._costs: dict[str, float] = {}
        for path, filling in fillings(config.players):
            if filling.endpoint is not None and _key_of(filling) not in self._endpoints:
                self._endpoints[_key_of(filling)] = PlayerEndpoint(
                    filling, path, count=faults.add, outages=outages
                )

    def _checked(self, path: str) -> ModelSpec:
        """Return the spec of a frozen model, and store its chat format."""
        folder, config = Path(path), self._config
        spec = load_spec(folder)
        check_params(folder, spec)
        check_lengths(config, spec, path)
        if (folder / "tokenizer.json").is_file():
            tokenizer = load_tokenizer(folder)
            tokenizer.max_tokens = config.longest_text
            self._chats[path] = chat_format(tokenizer, folder)
        elif spec.vocab != self._spec.vocab:
            raise ConfigError(
                f"seats: {path} has no tokenizer.json and a vocabulary of {spec.vocab} tokens, the "
                f"policy's has {self._spec.vocab}. Put the model's own tokenizer there."
            )
        elif self._chat is not None:
            self._chats[path] = self._chat
        return spec

    # ---- used by the run

    def __call__(self, prompt: Prompt) -> Mapping[str, Player]:
        """Return the players of this prompt's seats that the policy does not fill."""
        return {} if self.opponents is None else self.opponents(prompt)

    def begins(self, ticket: Ticket, prompt: Prompt) -> None:
        """Record that a group starts: the version of its ticket decides its opponents."""
        if self.opponents is not None:
            self.opponents.begins(ticket, prompt)

    def names(self, group: EpisodeGroup) -> dict[str, str]:
        """Return the names of the players in a group's games, for display."""
        return {} if self.opponents is None else self.opponents.names(group)

    def measures(self) -> dict[str, float]:
        """Return the metrics of the games in the last version's batch, and the cost of endpoints
        and loads since the last call."""
        if self.opponents is None:
            return {}
        now = {f"seats/{name}": 0.0 for name in JudgeMeter.NAMES if name != "cached"}
        for endpoint in self._endpoints.values():
            for name, amount in endpoint.meter.read().items():
                if name != "cached":
                    now[f"seats/{name}"] += amount
        costs = now if self._endpoints else {}
        if self._pools:
            costs = {**costs, "seats/loads": float(sum(p.loads for p in self._pools.values()))}
        before, self._costs = self._costs, costs
        since = {name: amount - before.get(name, 0.0) for name, amount in costs.items()}
        return {**self.opponents.measures(), **since}

    def watched(self, source: GroupSource, publisher: Publisher) -> tuple[GroupSource, Publisher]:
        """Wrap a trainer's source and publisher so that the opponents observe both."""
        if self.opponents is None or self._policy is None:
            return source, publisher
        return (
            WatchedSource(source, self.opponents),
            WatchedPublisher(publisher, self.opponents, self._policy),
        )

    def begin(
        self, paths: Paths, version: int, policy: Policy, slices: Slices, lock: DeviceGuard
    ) -> None:
        """Create the opponents, unless the policy fills all seats. Raises CheckpointError,
        ConfigError.

        Args:
            paths: paths of the run, with its snapshots.
            version: version of the policy.
            policy: the policy at the start or resume of the run.
            slices: opponents' weights are on the first sampler's devices.
            lock: held while they compute.
        """
        config = self._config
        if not config.players:
            return
        self._policy = policy
        slack = config.staleness.max_staleness + config.staleness.lookahead + SLACK
        snapshots = Snapshots(paths.root / LEAGUE, remembered=slack + 1)
        self.opponents = Opponents(
            config.players,
            LeagueTerms(
                seed=config.run.seed,
                slack=slack,
                oldest_resumable=functools.partial(_oldest_checkpoint, paths.checkpoints),
            ),
            snapshots,
            self._player,
        )
        self.opponents.begin(version, policy)
        if has_opponents(config.players):
            self._open_pools(snapshots, slices.sampler, lock)

    def close(self) -> None:
        """Close all samplers and connections. Idempotent."""
        for pool in self._pools.values():
            pool.close()
        for endpoint in self._endpoints.values():
            endpoint.close()

    # ---- inside

    def _open_pools(self, snapshots: Snapshots, mesh: Mesh, lock: DeviceGuard) -> None:
        """Create the pools that sample for seats; weights are loaded on first use."""
        config, dtype = self._config, jnp.dtype(self._config.model.computes_in)

        def loader(spec: ModelSpec, where: Callable[[int], Path]) -> Callable[[int], Params]:
            divided = shardings(weight_table(spec), mesh, SAMPLER_RULES)
            return lambda key: load_params(where(key), spec, divided, dtype)

        models: dict[str | None, tuple[ModelSpec, Callable[[int], Path], int]] = {
            path: (spec, functools.partial(_same, Path(path)), 1)
            for path, spec in self._specs.items()
        }
        if most := resident_snapshots(config.players):
            models[None] = (self._spec, snapshots.path, most)
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        settings = SamplerSettings(
            dtype=dtype,
            device_lock=lock,
            one_thread=on_cpu and mesh.size == 1 and not config.mesh.colocated,
        )
        for path, (spec, where, most) in models.items():
            setup = build_setup(
                spec,
                config.sampler,
                mesh,
                int(chance(config.run.seed, "opponents", path) * SEEDS),
                replace(settings, name=f"opponent-{Path(path).name if path else 'league'}"),
            )
            self._pools[path] = FrozenPool(setup, loader(spec, where), most=most)

    def _player(self, seated: SeatedPlayer) -> Player:
        filling, config = seated.filling, self._config
        if filling.endpoint is not None:
            endpoint = self._endpoints[_key_of(filling)]
            return EndpointPlayer(endpoint, filling, seated.seat, config.run.seed)
        path = filling.model if seated.snapshot is None else None
        section = config.sampler
        temperature = section.temperature if filling.temperature is None else filling.temperature
        most = filling.max_tokens or section.max_new_tokens
        return WeightsPlayer(
            name=seated.full_name,
            seat=seated.seat,
            lease=functools.partial(self._pools[path].lease, seated.snapshot or 0),
            chat=self._chats[path],
            limits=AnswerLimits(
                sampling=SamplingParams(
                    temperature=temperature,
                    top_k=section.top_k,
                    top_p=section.top_p,
                    min_p=section.min_p,
                ),
                max_new_tokens=min(most, section.max_new_tokens),
                max_length=section.max_length,
            ),
        )


def check_alone(config: Config, lockstep: Lockstep) -> None:
    """Raise ConfigError if a run of several processes has opponents."""
    if config.players and lockstep.count > 1:
        raise ConfigError(
            f"seats ({', '.join(config.players)}) cannot be filled in a run of {lockstep.count} "
            "processes. Use one process, with samplers in threads, or remove seats."
        )


def _same(path: Path, key: int) -> Path:
    """Return the directory of a frozen model, for any key."""
    return path


def _key_of(filling: FillingSection) -> str:
    """Return a key that is equal for fillings which share one PlayerEndpoint."""
    return filling.model_dump_json(exclude={"weight", "eval", "mixture"})


def _oldest_checkpoint(folder: Path) -> int | None:
    """Return the version of the oldest checkpoint in the folder; None: it has none."""
    return min((int(p.name) for p in folder.glob("[0-9]*") if p.name.isdigit()), default=None)
