"""The order of events in a run's threads: schedule.jsonl, written by every run of rl.

{"schedule": 1, "config": {...}, "made_by": {...}}          start of the run, or a resume
{"admit": 8, "count": 4, "version": 1}                      groups 8 to 11 may start
{"sampler": "sampler", "block": 41, "take": ["g8/m0/t0"], "cancel": [], "version": 2}
{"put": 8}   {"fail": 9, "reason": "failed"}                a group is finished, or dropped
{"draw": 2, "groups": [5, 6, 7, 8], "dropped": []}          step 2 -> 3 is made from these
{"look": 2, "dropped": [4], "retired": []}                  the trainer asked: some were too old
{"live": 2}   {"limit": 1}   {"pause": true}   {"resume": true}
{"prompts": 11}   {"seen": 7}   {"measured": 9}             of a curriculum: see OrderedPrompts
{"prompts": 11, "tasks": ["sums", "tools"]}                 with several tasks: groups 10 and 11
{"end": true}

A sampler's tokens depend on the requests and weights that it took after each block, everything else
on the order of the calls to the replay buffer. So a run depends only on these lines and the
configuration, at any staleness. Lines are in the order of the events. run/replay/player.py replays
them.
"""

import contextlib
import importlib.metadata
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import jax

import jaxrl_async
from jaxrl_async.buffer.replay import ReplayBuffer
from jaxrl_async.config.changes import changes
from jaxrl_async.config.load import flattened
from jaxrl_async.config.schema import Config
from jaxrl_async.data.curriculum import Curriculum
from jaxrl_async.errors import ReplayError
from jaxrl_async.types import EpisodeGroup, Prompt

if TYPE_CHECKING:
    from jaxrl_async.data.mixed_prompts import MixedPrompts
    from jaxrl_async.run.replay.player import RunSchedule

log = logging.getLogger(__name__)

FORMAT = 1
"""Version of the file's format; a reader refuses others."""
FREE = (
    "run.name",
    "run.dir",
    "run.resume",
    "run.resume_or_start",
    "run.overwrite",
    "run.replay_schedule",
)
FREE_SECTIONS = ("metrics", "checkpoint")
"""Settings that may differ between a recording and its replay: they change no number."""


class Recording:
    """A ports.Schedule that records events and prescribes nothing. Any thread.

    Lines are appended one by one: the file of a killed run is complete. Without a path no file is
    written. Replay has the same methods and prescribes events.
    """

    def __init__(self, path: Path | None, header: Mapping[str, object]) -> None:
        self._lock = threading.Lock()
        self._burst_ends: set[int] | None = None
        self._file: TextIO | None = None
        if path is not None:
            self._file = path.open("a", encoding="utf-8", buffering=1)
        self.write(**header)

    def write(self, **event: Any) -> None:
        """See ports.Schedule; events after close() are not recorded."""
        with self._lock:
            if "admit" in event and self._burst_ends is not None:
                self._burst_ends.add(event["admit"] + event["count"] - 1)
            if self._file is None:
                return
            try:
                self._file.write(json.dumps(event) + "\n")
            except OSError as error:  # a full disk: the run needs no schedule to continue
                log.error(
                    "schedule.jsonl is not written any further, and the run can be replayed only "
                    "up to here: %s. Free the disk; the run continues.",
                    error,
                )
                self._end()

    def due(self, sampler: str, block: int, working: bool) -> None:
        """See ports.Schedule: nothing is prescribed."""

    def sampler_of(self, request_id: str) -> int | None:
        """Return the number of the sampler for this request: None, any of them."""
        return None

    @contextmanager
    def turn(self, *names: str) -> Iterator[None]:
        """Run the body immediately."""
        yield

    def later(self, name: str, number: int, act: Callable[[], object]) -> None:
        """Call `act` immediately."""
        act()

    def gate(self, buffer: ReplayBuffer, *, curriculum: bool) -> ReplayBuffer:
        """Return the buffer for rollouts and trainer: unchanged."""
        return buffer

    def burst_ends(self) -> set[int]:
        """Return a set that gets the number of the last group of each burst admitted from now on;
        the caller removes numbers that it has handled."""
        with self._lock:
            self._burst_ends = set()
            return self._burst_ends

    def chosen_tasks(self) -> Sequence[str]:
        """Return the task of each group, as prescribed: nothing is."""
        return ()

    def close(self) -> None:
        """Write the end of the recording. Idempotent."""
        self.write(end=True)
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # reported already
                self._file.close()
            self._file = None


def header_of(config: Config, version: int) -> dict[str, Any]:
    """Return the first line of a recording that begins at `version`."""
    return {
        "schedule": FORMAT,
        "version": version,
        "made_by": {
            "jaxrl_async": jaxrl_async.__version__,
            "jax": importlib.metadata.version("jax"),
            "devices": jax.devices()[0].device_kind,
        },
        "config": recorded_settings(config),
    }


def recorded_settings(config: Config) -> dict[str, Any]:
    """Return the settings that a run's numbers depend on, by dotted names, as JSON reads them."""
    flat = flattened(config.model_dump(mode="json"))
    return {
        name: value
        for name, value in json.loads(json.dumps(flat)).items()
        if name not in FREE and name.partition(".")[0] not in FREE_SECTIONS
    }


# ---- reading


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSchedule:
    """A recording up to its end, or up to the point at which its run was killed."""

    path: Path
    lines: tuple[str, ...]  # without the header
    events: tuple[dict[str, Any], ...]  # the parsed lines; both are without `end`
    ended: bool  # False: killed, or crashed

    def location(self, index: int) -> str:
        """Return the file and line of an event, for people."""
        return f"{self.path}, line {index + 2}"


def read_schedule(path: Path, config: Config) -> RecordedSchedule:
    """Read a recording that this configuration can replay. Raises ReplayError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReplayError(
            f"run.replay_schedule={path} cannot be read: {error}. It is the schedule.jsonl of a "
            "run's folder; run.overwrite=true may have moved that folder aside: choose another "
            "run.name for the replay."
        ) from None
    complete, _, torn = text.rpartition("\n")
    if torn:
        log.info("%s ends within a line, which is ignored: its run was killed", path)
    lines = complete.split("\n") if complete else []
    events = [_parse(path, number, line) for number, line in enumerate(lines, 1)]
    if not events or "schedule" not in events[0]:
        raise ReplayError(
            f"{path} is no recorded schedule: its first line is not a header. Give the "
            "schedule.jsonl of a run's folder."
        )
    _check_header(path, events[0], config)
    stop = next((i for i, e in enumerate(events[1:], 1) if "schedule" in e), len(events))
    ended = stop > 1 and "end" in events[stop - 1]
    last = stop - 1 if ended else stop
    if stop < len(events):
        log.warning(
            "%s: the run was resumed from a checkpoint at line %d; its events from there on are "
            "not replayed",
            path,
            stop + 1,
        )
    _check_blocks(path, events[1:last])
    return RecordedSchedule(
        path=path, lines=tuple(lines[1:last]), events=tuple(events[1:last]), ended=ended
    )


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict) or not event:
        raise ReplayError(
            f"{path}, line {number} is no event: {line[:60]!r}. The file is damaged; use another "
            "copy of it."
        )
    return event


def _check_header(path: Path, header: Mapping[str, Any], config: Config) -> None:
    if header["schedule"] != FORMAT or not isinstance(header.get("config"), dict):
        raise ReplayError(
            f"{path} has format {header['schedule']}, and this version of jaxrl_async replays "
            f"format {FORMAT}. Use the version that made it: {header.get('made_by')}."
        )
    if header["version"] != 0:
        raise ReplayError(
            f"{path} was recorded by a run that continued from a checkpoint at version "
            f"{header['version']}: its groups in progress then are not in the file. It cannot be "
            "replayed. Replay a recording that begins at version 0."
        )
    other = list(changes(header["config"], recorded_settings(config)))
    if other:
        first, names = other[0], [one.name for one in other]
        raise ReplayError(
            f"{path} was recorded with other settings than this run's, which cannot follow it: "
            f"{first.name} was {first.before} and is {first.now}"
            f"{f' ({len(names)} differ: ' + ', '.join(names[:8]) + ')' if names[1:] else ''}. Use "
            "the config.yaml next to the recording, with another run.name."
        )
    made_by = header_of(config, 0)["made_by"]
    if header.get("made_by") != made_by:
        log.warning(
            "%s was made by %s, and is replayed by %s: last bits may differ, and the replay stops "
            "if that changes a sampled token",
            path,
            header.get("made_by"),
            made_by,
        )


def _check_blocks(path: Path, events: list[dict[str, Any]]) -> None:
    """Raise ReplayError if a sampler was restarted: its running requests are not in the file."""
    blocks: dict[str, int] = {}
    for number, event in enumerate(events, 2):
        name, block = event.get("sampler"), event.get("block", 0)
        if name is not None and block < blocks.get(name, 0):
            raise ReplayError(
                f"{path}, line {number}: {name} was restarted there, and its running requests are "
                "not in the file: such a run cannot be replayed."
            )
        if name is not None:
            blocks[name] = block


class OrderedPrompts:
    """Prompts of a curriculum or of several tasks: they depend on the groups seen before, which are
    recorded, too.

    The rollouts take the prompts of a burst one after another; the burst is recorded by its last
    number, and with the tasks of its groups if there are several. Each group seen is recorded, and
    each time that the trainer measures.
    """

    def __init__(self, prompts: "Curriculum | MixedPrompts", schedule: "RunSchedule") -> None:
        self._prompts, self._schedule = prompts, schedule
        if not isinstance(prompts, Curriculum):
            prompts.prescribed = schedule.chosen_tasks()
        self._tasks: list[str] = []  # of the groups since the last record
        self._burst_ends = schedule.burst_ends()
        self._next = 0
        self._lock = threading.RLock()  # an event and its line are one

    def __iter__(self) -> "OrderedPrompts":
        return self

    def __next__(self) -> Prompt:
        """See Curriculum."""
        with self._lock:
            prompt = next(self._prompts)
            number, self._next = self._next, self._next + 1
            self._tasks += [prompt.task] if prompt.task else []
            if number in self._burst_ends:
                self._burst_ends.remove(number)
                chosen = {"tasks": self._tasks} if self._tasks else {}
                self._schedule.write(prompts=number, **chosen)
                self._tasks = []
            return prompt

    def restore(self, next_group: int) -> None:
        """Continue the groups' numbers; the curriculum is restored separately."""
        self._next = next_group

    def observe(self, group: EpisodeGroup) -> None:
        """See Curriculum; in a replay when its turn comes."""
        self._schedule.later("seen", group.ticket.group, lambda: self._see(group))

    def _see(self, group: EpisodeGroup) -> None:
        with self._lock:
            self._prompts.observe(group)
            self._schedule.write(seen=group.ticket.group)

    def measures(self, next_draw: int) -> dict[str, float]:
        """See Curriculum."""
        with self._schedule.turn("measured"), self._lock:
            self._schedule.write(measured=next_draw)
            return self._prompts.measures(next_draw)
