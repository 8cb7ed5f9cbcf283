"""When a step of the trainer did what, as spans and as metrics."""

from dataclasses import dataclass

from jaxrl_async.metrics.spans import add_span


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of one clock, seconds, each the end of what is named; in this order."""

    start: float
    drawn: float  # its groups
    in_turn: float  # the wait for the turn, if several runs learn in turns
    trained: float
    evaluated: float  # the wait for an evaluation beside
    published: float
    ended: float  # its own evaluation, if it has one

    def record(self, version: int, *, evaluates: bool) -> None:
        """Record the spans of the step that made a version, if spans are recorded."""
        spans = {
            "step": (self.start, self.ended),
            "wait for groups": (self.start, self.drawn),
            "wait for the turn": (self.drawn, self.in_turn),
            "learn": (self.in_turn, self.trained),
            "wait for the evaluation": (self.trained, self.evaluated),
            "publish": (self.evaluated, self.published),
        }
        if evaluates:
            spans["evaluate"] = (self.published, self.ended)
        for name, (begin, end) in spans.items():
            add_span(name, begin, end, version=version)

    def measures(self, waited_s: float, *, in_turns: bool, beside: bool) -> dict[str, float]:
        """Return the step's metrics of time.

        Args:
            waited_s: of the time until the groups were drawn, that without enough of them.
            in_turns: several runs learn in turns.
            beside: evaluations go on beside updates.
        """
        step_s, turn_s = self.ended - self.start, self.in_turn - self.drawn if in_turns else 0.0
        train_s = self.trained - self.start - waited_s - turn_s
        return {
            "time/step_s": step_s,
            "time/wait_data_s": waited_s,
            **({"time/wait_turn_s": turn_s} if in_turns else {}),
            "time/train_s": train_s,
            **({"time/wait_eval_s": self.evaluated - self.trained} if beside else {}),
            "time/publish_s": self.published - self.evaluated,
            "trainer/idle_share": 1.0 - train_s / step_s,
        }
