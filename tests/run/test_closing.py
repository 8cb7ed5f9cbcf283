"""Everything is closed at the end of a run, whatever one of the closes raises."""

import threading
from types import SimpleNamespace

import pytest

from jaxrl_async.buffer.ledger import Ledger
from jaxrl_async.errors import Closed
from jaxrl_async.metrics.recorder import Recorder
from jaxrl_async.run import threads
from jaxrl_async.run.signals import Stop

pytestmark = pytest.mark.full


class Part:
    """Waits until it is closed, and may fail to."""

    error = None

    def __init__(self, name, closed, failing):
        self.name, self.closed, self.failing = name, closed, failing
        self.is_closed = threading.Event()

    def start(self):
        pass

    def pause(self):
        pass

    def run(self):
        assert self.is_closed.wait(10)
        raise Closed(self.name)

    async def play(self):
        self.run()

    def close(self):
        self.closed.append(self.name)
        self.is_closed.set()
        if self.name in self.failing:
            raise OSError(28, f"no space left for {self.name}")

    stop = close


@pytest.mark.parametrize("failing", [("schedule",), ("schedule", "buffer", "channel", "sampler")])
def test_threads_and_sampler_end_whatever_a_close_before_raises(failing):
    closed = []
    names = ("schedule", "watchdog", "notices", "buffer", "channel", "sampler")
    parts = SimpleNamespace(**{name: Part(name, closed, failing) for name in names})
    parts.rollouts = SimpleNamespace(run=parts.buffer.play)
    parts.trainer = SimpleNamespace(run=lambda: None, longest_update_s=0.0)
    parts.plays, parts.label = True, ""
    parts.sampling = SimpleNamespace(
        processes=None,
        begin_to_dismiss=lambda: None,
        close=parts.sampler.close,
        dismiss=lambda: closed.append("dismissed"),
    )
    before = threading.active_count()
    with pytest.raises(OSError, match="no space left"):
        threads.run_threads(parts, Stop())
    assert closed == [*names, "dismissed"] and threading.active_count() == before


def test_a_recorder_on_a_full_disk_closes_all_its_files(tmp_path):
    recorder = Recorder(tmp_path, tensorboard=True)
    recorder._metrics.close()
    recorder._metrics = open("/dev/full", "wb")  # noqa: SIM115
    recorder._metrics.write(b"a line that does not fit")
    with pytest.raises(OSError):
        recorder.close()
    assert recorder._metrics.closed and recorder._samples.closed and recorder._board is None
    recorder.close()


def test_a_ledger_on_a_full_disk_fails_once(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    assert ledger._file is not None
    ledger._file.close()
    ledger._file = open("/dev/full", "w")  # noqa: SIM115
    ledger._file.write("a line that does not fit")
    with pytest.raises(OSError):
        ledger.close()
    ledger.close()
