"""What processes in lockstep tell each other: carriers as bytes, draws in turns, one stop."""

import json
import threading
from contextlib import ExitStack
from dataclasses import fields

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.buffer.ledger import Ledger
from jaxrl_async.codec import dumps
from jaxrl_async.config.schema import Config, RewardSection
from jaxrl_async.errors import Closed, ConfigError, DataError, MeshError
from jaxrl_async.mesh import NO_DEVICE_LOCK, DeviceLock, make_slices, put, whole
from jaxrl_async.run.builders.devices import make_locks
from jaxrl_async.run.lockstep import (
    HostMeeting,
    Lockstep,
    SharedSource,
    SharedStop,
    merged_draws,
    read_message,
)
from jaxrl_async.run.loop import check_together, claim_together
from jaxrl_async.run.rates import combined_rates
from jaxrl_async.run.signals import Stop
from jaxrl_async.types import (
    CancelledGroup,
    Draw,
    Drop,
    Episode,
    EpisodeGroup,
    KeptTokens,
    Prompt,
    Score,
    StopReason,
    Ticket,
)


def group(number: int, seed: int = 0) -> EpisodeGroup:
    rng = np.random.default_rng(seed + number)
    n = int(rng.integers(1, 6))
    episode = Episode(
        token_ids=rng.integers(0, 9, n).astype(np.int32),
        drawn=rng.random(n) < 0.5,
        logprobs=np.where(rng.random(n) < 0.2, np.nan, rng.random(n)).astype(np.float32),
        versions=np.full(n, seed, np.int32),
        stop=StopReason.LENGTH,
        kept=KeptTokens(ids=np.arange(3, dtype=np.int32), starts=np.array([0, 3], np.int32)),
    )
    return EpisodeGroup(
        prompt=Prompt(
            prompt_id=number,
            position=number,
            token_ids=np.array([1, 2], np.int32),
            text="1 +\n1 = ä",
            reference="2",
        ),
        episodes=(episode,),
        scores=(Score(reward=float("nan"), parts={"right": np.float32(0.1)}),),
        ticket=Ticket(group=number, version=seed),
    )


def assert_same(one, other):
    """Equal carriers, arrays and numbers, with NaN equal to itself."""
    if hasattr(one, "__dataclass_fields__"):
        assert type(one) is type(other)
        for f in fields(one):
            assert_same(getattr(one, f.name), getattr(other, f.name))
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, tuple | list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    else:
        assert one == other or (one != one and other != other)
        assert isinstance(other, type(one)) or isinstance(one, np.generic)


@pytest.mark.full
@given(st.lists(st.integers(0, 50), max_size=4), st.integers(0, 5))
def test_a_draw_arrives_as_it_was_sent(numbers, seed):
    draw = Draw(
        groups=tuple(group(n, seed) for n in numbers),
        dropped=((group(7, seed), Drop.STALE),),
        waited_s=0.5,
    )
    sent = {"draw": draw, "stop": "SIGTERM", "ledger": ({"fate": "trained", "lengths": (3, 4)},)}
    assert_same(sent, read_message(dumps(sent).tobytes()))


@pytest.mark.parametrize("message", [b"", b"{}\n", b'{"carrier": "Prompt", "fields": {}}\n', b"x"])
def test_a_message_that_is_something_else_is_refused(message):
    with pytest.raises(DataError, match="same version"):
        read_message(message)


def test_draws_of_processes_are_joined_in_the_order_of_one_process():
    """Process i of n plays the prompts i, i + n, ...: one process would play 0, 1, 2, ..."""
    old = CancelledGroup(ticket=Ticket(group=6, version=0), prompt_id=1, oldest=0, lengths=(2, 1))
    draws = [
        Draw(groups=tuple(group(n) for n in (3, 4)), dropped=(), waited_s=0.25, cancelled=(old,)),
        Draw(groups=tuple(group(n) for n in (3, 5)), dropped=((group(4), Drop.STALE),), waited_s=1),
    ]
    joined = merged_draws(draws)
    assert [g.ticket.group for g in joined.groups] == [6, 7, 8, 11]
    assert [(g.ticket.group, r) for g, r in joined.dropped] == [(9, Drop.STALE)]
    assert [(g.ticket.group, g.lengths) for g in joined.cancelled] == [(12, (2, 1))]
    assert joined.waited_s == 1


class Together(Lockstep):
    """Lockstep between threads: gather waits for all."""

    def __init__(
        self,
        index: int,
        count: int,
        table: list,
        barrier: threading.Barrier,
        *,
        first_plays: bool = False,
    ) -> None:
        self._set_rank(index, count, first_plays=first_plays)
        self._table, self._barrier = table, barrier

    def gather(self, message: bytes) -> list[bytes]:
        self._table[self.index] = message
        self._barrier.wait(10)
        messages = list(self._table)
        self._barrier.wait(10)
        return messages


def lockstep(index: int, count: int) -> Together:
    return Together(index, count, [b""] * count, threading.Barrier(count))


LATE = -1


class Buffer:
    """A source that gives its groups one a draw, at LATE nothing yet, and writes its ledger."""

    pause = resume = set_limit = None  # not called here

    def __init__(self, numbers: list[int], ledger: Ledger) -> None:
        self._numbers, self._ledger = iter(numbers), ledger
        self.given_back = 0

    def draw(self, version: int, timeout_s: float | None = None) -> Draw:
        number = next(self._numbers, None)
        if number is None:
            raise Closed("over")
        self._ledger.write("admitted", group=10, version=version)
        if number == LATE:
            raise TimeoutError
        self._ledger.write("trained", group=number, version=version)
        return Draw(groups=(group(number),), dropped=(), waited_s=0.0)

    def give_back(self) -> None:
        self.given_back += 1


def of_two(tmp_path, work, numbers=((0, 1), (0, 1))):
    """work(index, source, stop) in two threads, process 0 and 1; what each returned."""
    table, barrier = [b"", b""], threading.Barrier(2)
    results: list = [None, None]

    def process(index: int) -> None:
        together, stop, kept = Together(index, 2, table, barrier), Stop(), Ledger(keep=True)
        ledger = Ledger(tmp_path / "ledger.jsonl") if together.writes else Ledger()
        source = SharedSource(Buffer(numbers[index], kept), together, stop, kept, ledger)
        results[index] = work(index, source, stop)
        ledger.close()

    threads = [threading.Thread(target=process, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def test_every_process_learns_from_the_same_groups_and_one_keeps_the_ledger(tmp_path):
    def work(index, source, stop):
        return [[g.ticket.group for g in source.draw(v).groups] for v in (0, 1)]

    assert of_two(tmp_path, work) == [[[0, 1], [2, 3]]] * 2
    trained = [(x["group"], x["version"]) for x in ledger(tmp_path) if x["fate"] == "trained"]
    assert trained == [(0, 0), (1, 0), (2, 1), (3, 1)]


def ledger(folder):
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def test_the_groups_of_the_only_process_with_rollouts_are_trained_on_by_all(tmp_path):
    """Samplers in processes of their own: the others' part of each step is empty."""
    table, barrier = [b"", b""], threading.Barrier(2)
    groups: list = [None, None]

    def process(index: int) -> None:
        together = Together(index, 2, table, barrier, first_plays=True)
        kept, run = Ledger(keep=True), Ledger()
        if together.writes:
            run = Ledger(tmp_path / "ledger.jsonl")
        numbers = [LATE, 0, 5] if together.plays else []
        joined = together.joined(Buffer(numbers, kept), Stop(), kept, run)
        joined.source.set_limit(3) if not together.plays else None
        groups[index] = [[g.ticket.group for g in joined.source.draw(v).groups] for v in (0, 1)]
        run.close()

    threads = [threading.Thread(target=process, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert groups == [[[0], [5]]] * 2, "in the numbers of the one that played them"
    trained = [(x["group"], x["version"]) for x in ledger(tmp_path) if x["fate"] == "trained"]
    assert trained == [(0, 0), (5, 1)]


def test_who_has_its_groups_waits_for_who_has_not(tmp_path):
    def work(index, source, stop):
        return [g.ticket.group for g in source.draw(0).groups]

    assert of_two(tmp_path, work, ([LATE, LATE, 0], [0])) == [[0, 1]] * 2


def test_a_stop_does_not_wait_for_the_groups_of_a_step(tmp_path):
    """They may take longer than the time there is to save; a resumed run plays them again."""

    def work(index, source, stop):
        source.draw(0)
        if index == 1:
            stop.request("SIGTERM")
        with pytest.raises(Closed):
            source.draw(1)
        source.settle()
        return source.is_set(), source.failed_alone, stop.reason

    numbers = ([0, LATE, LATE, 1], [0, 1])
    assert of_two(tmp_path, work, numbers) == [(True, False, "SIGTERM")] * 2
    trained = [(x["group"], x["version"]) for x in ledger(tmp_path) if x["fate"] == "trained"]
    assert trained == [(0, 0), (1, 0)], "the group that was drawn for nothing is not"
    assert len([x for x in ledger(tmp_path) if x["fate"] == "admitted"]) == 4


def test_a_stop_asked_of_one_process_is_made_by_all_in_the_same_step(tmp_path):
    def work(index, source, stop):
        source.draw(0)
        before = source.is_set()
        if index == 1:
            stop.request("SIGTERM")
        between = source.is_set()
        source.draw(1)
        return before, between, source.is_set(), stop.reason

    assert of_two(tmp_path, work) == [(False, False, True, "SIGTERM")] * 2


def test_a_process_that_fails_in_its_buffer_knows_that_it_is_alone(tmp_path):
    def work(index, source, stop):
        source.draw(0)
        source.draw(1)
        with pytest.raises(Closed):
            source.draw(2)
        return source.failed_alone

    assert of_two(tmp_path, work) == [True, True]


def test_a_stop_of_jobs_without_a_buffer_is_shared_too():
    table, barrier = [b"", b""], threading.Barrier(2)
    reasons: list = [None, None]

    def process(index: int) -> None:
        stop = Stop()
        if index == 0:
            stop.request("SIGINT")
        assert SharedStop(stop, Together(index, 2, table, barrier)).is_set()
        reasons[index] = stop.reason

    threads = [threading.Thread(target=process, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert reasons == ["SIGINT", "SIGINT"]


def prepared(folder, **run):
    """What two processes find that start in one folder: Paths or the error of each."""
    table, barrier = [b"", b""], threading.Barrier(2)
    found: list = [None, None]
    config = Config(run={"dir": str(folder), **run})

    def process(index: int) -> None:
        try:
            together = Together(index, 2, table, barrier)
            with ExitStack() as closing:
                found[index] = claim_together(closing, together, check_together(config, together))
        except ConfigError as error:
            found[index] = error

    threads = [threading.Thread(target=process, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_processes_start_in_one_folder_that_one_of_them_makes(tmp_path):
    (config, paths), other = prepared(tmp_path, name="new", resume_or_start=True)
    assert paths.root.is_dir() and (config, paths) == other and not config.run.resume
    (paths.root / "metrics.jsonl").write_text("{}")
    for again, _ in prepared(tmp_path, name="new", resume_or_start=True):
        assert again.run.resume


def test_a_folder_that_holds_a_run_is_refused_in_every_process(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "metrics.jsonl").write_text("{}")
    for error in prepared(tmp_path, name="there"):
        assert isinstance(error, ConfigError) and "holds a run already" in str(error)


def test_one_process_exchanges_nothing():
    alone = Lockstep()
    assert (alone.count, alone.index, alone.writes) == (1, 0, True)
    assert alone.gather(b"x") == [b"x"]
    assert alone.mean({"a": 0.5}, 3) == {"a": 0.5}


def test_one_process_uses_its_own_buffer_ledger_stop_and_schedule(tmp_path):
    alone, stop, ledger, source = Lockstep(), Stop(), Ledger(), object()
    assert alone.agreed_stop(stop) is stop
    assert alone.buffer_ledger(ledger) is ledger
    assert alone.schedule_file(tmp_path / "schedule.jsonl") == tmp_path / "schedule.jsonl"
    joined = alone.joined(source, stop, ledger, ledger)
    assert joined.source is source and joined.stop is stop
    joined.accounts.settle()
    assert not joined.accounts.failed_alone


def test_several_processes_share_groups_stop_and_accounts(tmp_path):
    several, ledger = Together(0, 2, [b"", b""], threading.Barrier(2)), Ledger()
    kept = several.buffer_ledger(ledger)
    kept.write("admitted", group=0)
    assert kept is not ledger and kept.take() == [{"fate": "admitted", "group": 0}]
    assert isinstance(several.agreed_stop(Stop()), SharedStop)
    assert several.schedule_file(tmp_path / "schedule.jsonl") is None
    joined = several.joined(Buffer((), kept), Stop(), kept, ledger)
    assert isinstance(joined.source, SharedSource)
    assert joined.source is joined.stop and joined.source is joined.accounts


def test_rates_of_processes_add_up_or_average_by_what_they_are():
    report = combined_rates(
        [
            {"sampler/busy_share": 0.5, "throughput/generated_tokens_per_s": 10.0},
            {
                "sampler/busy_share": 1.0,
                "throughput/generated_tokens_per_s": 30.0,
                "weights/probe_error": 0.1,
            },
        ]
    )
    assert report == {
        "sampler/busy_share": 0.75,
        "throughput/generated_tokens_per_s": 40.0,
        "weights/probe_error": 0.1,
    }


# ---- devices of several processes


@pytest.mark.parametrize("colocated", [False, True])
def test_one_process_saves_without_a_lock_and_shares_devices_only_if_colocated(colocated):
    axes = {"trainer": {"fsdp": 2}, "sampler": {"tensor": 2}, "colocated": colocated}
    locks = make_locks(RewardSection(), make_slices(mesh(**axes)), Lockstep())
    assert locks.saving is NO_DEVICE_LOCK and locks.trainer is locks.sampler
    assert isinstance(locks.trainer, DeviceLock) == colocated


def test_no_program_runs_beside_the_messages_of_a_save_of_several_processes():
    several = Together(0, 2, [b"", b""], threading.Barrier(2))
    judged = RewardSection(model="judge")

    def taken(lock, saving):
        """Whether another thread waits for the lock while this one saves."""
        got = threading.Event()

        def take():
            with lock:
                got.set()

        other = threading.Thread(target=take, daemon=True)
        with saving:
            other.start()
            waits = not got.wait(0.05)
        other.join(10)
        assert got.is_set(), "given back"
        return waits

    for axes, reward, shares in (
        ({"trainer": {"fsdp": 4}, "sampler": {"tensor": 2}, "colocated": True}, judged, True),
        ({"trainer": {"fsdp": 4}, "samplers": 2}, judged, False),
    ):
        locks = make_locks(reward, make_slices(mesh(**axes), devices(2, 4)), several)
        assert (locks.trainer is locks.sampler) == shares
        assert taken(locks.trainer, locks.saving) and taken(locks.sampler, locks.saving)
    own = make_locks(
        RewardSection(),
        make_slices(mesh(trainer={"fsdp": 4}, samplers=2), devices(2, 4)),
        several,
    )
    assert own.trainer is NO_DEVICE_LOCK and taken(own.sampler, own.saving)


class Meetings:
    """jax.distributed's client, which notes the barriers; None: no process comes."""

    def __init__(self, barriers: list | None) -> None:
        self.barriers = barriers

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None:
        if self.barriers is None:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: a barrier\nmore")
        self.barriers.append((barrier_id, timeout_in_ms))


def test_each_meeting_of_the_processes_is_one_of_its_own():
    meet = HostMeeting(Meetings(met := []))
    for _ in range(3):
        meet()
    assert len({name for name, _ in met}) == 3 and all(ms > 0 for _, ms in met)
    with pytest.raises(MeshError, match=r"did not arrive .* DEADLINE_EXCEEDED: a barrier\. Check"):
        HostMeeting(Meetings(None))()


class Device:
    """A device that only says where it is."""

    platform = "cpu"

    def __init__(self, process_index: int, number: int) -> None:
        self.process_index, self.id = process_index, number

    def __repr__(self) -> str:
        return f"{self.process_index}/{self.id}"


def mesh(**axes):
    return Config(mesh=axes).mesh


def devices(processes: int, each: int) -> list[Device]:
    return [Device(p, n) for n in range(each) for p in range(processes)]  # in no order


def test_each_process_gives_its_first_devices_to_the_trainer():
    section = mesh(trainer={"fsdp": 4}, sampler={"tensor": 2}, samplers=2)
    slices = make_slices(section, devices(2, 4))
    assert [repr(d) for d in slices.trainer.devices.flat] == ["0/0", "0/1", "1/0", "1/1"]
    (sampler,) = slices.samplers
    assert [repr(d) for d in sampler.devices.flat] == ["0/2", "0/3"]


def test_a_colocated_sampler_has_what_its_process_gives_to_the_trainer():
    section = mesh(trainer={"fsdp": 4}, sampler={"tensor": 2}, colocated=True)
    slices = make_slices(section, devices(2, 3))
    assert [repr(d) for d in slices.trainer.devices.flat] == ["0/0", "0/1", "1/0", "1/1"]
    assert [[repr(d) for d in m.devices.flat] for m in slices.samplers] == [["0/0", "0/1"]]
    assert slices.colocated and slices.sampler.shape["tensor"] == 2


def test_a_job_without_samplers_has_none_in_several_processes():
    section = mesh(trainer={"fsdp": 4}, samplers=7).without_samplers
    slices = make_slices(section, devices(2, 2))
    assert slices.trainer.size == 4 and slices.samplers == ()


@pytest.mark.parametrize(
    ("axes", "each", "message"),
    [
        (
            {"trainer": {"fsdp": 4}, "sampler": {"tensor": 4}, "colocated": True},
            4,
            "has 4 devices on 2 processes, and mesh.sampler 4",
        ),
        ({"trainer": {"fsdp": 4}, "colocated": True}, 4, "2 times the devices of mesh.sampler"),
        ({"trainer": {"fsdp": 3}, "samplers": 2}, 4, "multiples of the number of processes"),
        ({"trainer": {"fsdp": 2}}, 4, "multiples of the number of processes"),
        (
            {"trainer": {"fsdp": 2}, "sampler": {"tensor": 2}, "samplers": 2},
            4,
            "must divide the trainer's devices of one process",
        ),
        ({"trainer": {"fsdp": 4}, "samplers": 2}, 2, "mesh needs 6 devices"),
    ],
)
def test_slices_that_several_processes_cannot_share_are_refused(axes, each, message):
    with pytest.raises(MeshError, match=message):
        make_slices(mesh(**axes), devices(2, each))


def test_the_processes_with_fewest_devices_must_do():
    uneven = [*devices(1, 5), *[Device(1, n) for n in range(1)]]
    section = mesh(trainer={"fsdp": 2}, samplers=2)
    with pytest.raises(MeshError, match="2 devices in each of 2 processes, and one has 1"):
        make_slices(section, uneven)


@pytest.mark.full
def test_arrays_come_to_the_devices_and_back_whole():
    slices = make_slices(mesh(trainer={"fsdp": 4}), jax.devices())
    rows = jax.sharding.NamedSharding(slices.trainer, jax.sharding.PartitionSpec("fsdp"))
    there = put({"a": np.arange(8), "b": None}, rows)
    assert there["a"].sharding == rows and there["b"] is None
    np.testing.assert_array_equal(whole(there["a"]), np.arange(8))
