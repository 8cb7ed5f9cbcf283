"""Times of the trainer's steps: for the watchdog, as spans and as metrics."""

import time
from collections import defaultdict
from collections.abc import Collection

from jaxrl_async.metrics.spans import add_span
from jaxrl_async.ports.run import Clock

GROUPS, LEARN, PUBLISH, EVALUATE = "wait for groups", "learn", "publish", "evaluate"
"""Phases of every step; not every version is evaluated."""
TURN, EVALUATION = "wait for the turn", "wait for the evaluation"
"""Waits of runs that share a slice, and of runs with asynchronous evaluations."""
WAITS = {TURN: "time/wait_turn_s", EVALUATION: "time/wait_eval_s"}
"""Metric of each wait, in seconds."""


class StepClock:
    """The trainer's activity, and the seconds of each phase of its step.

    Owned by the trainer's thread; the watchdog reads `doing` and `since`.
    """

    def __init__(self, waits: Collection[str] = (), clock: Clock = time.perf_counter) -> None:
        """Begin. waits: the WAITS of this run; the others are neither recorded nor reported."""
        self.doing, self.since = "starting", clock()
        self._waits, self._clock = waits, clock
        self._begun: list[tuple[str, float]] = []  # phases of the step under way

    def now(self, doing: str, phase: str = "") -> None:
        """Note a new activity. phase: of the step, begins now; "": the last one continues."""
        self.doing, self.since = doing, self._clock()
        if phase:
            self._begun.append((phase, self.since))

    def elapsed_s(self) -> float:
        """Return the seconds of the activity under way."""
        return self._clock() - self.since

    def end_step(self, version: int, waited_s: float) -> dict[str, float]:
        """Record the spans of the step that made this version; return its metrics of time.

        waited_s: the part of GROUPS in which too few groups were ready, in seconds.
        """
        begun, self._begun = self._begun, []
        start, end = begun[0][1], self._clock()
        add_span("step", start, end, version=version)
        took: defaultdict[str, float] = defaultdict(float)
        ends = (*(begin for _, begin in begun[1:]), end)
        for (phase, begin), until in zip(begun, ends, strict=True):
            took[phase] += until - begin
            if phase not in WAITS or phase in self._waits:
                add_span(phase, begin, until, version=version)
        train_s = took[GROUPS] - waited_s + took[LEARN]
        return {
            "time/step_s": end - start,
            "time/wait_data_s": waited_s,
            "time/train_s": train_s,
            **{WAITS[phase]: took[phase] for phase in self._waits},
            "time/publish_s": took[PUBLISH],
            "trainer/idle_share": 1.0 - train_s / (end - start),
        }
