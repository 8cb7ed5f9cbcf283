"""When a step of the trainer did what, as spans and as metrics."""

from dataclasses import dataclass

from jaxrl_async.metrics.spans import add_span


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of one clock, seconds, each the end of what is named; in this order."""

    start: float
    asked: float  # the wait for an evaluation beside, if several runs learn in turns
    drawn: float  # its groups
    in_turn: float  # the wait for the turn, if several runs learn in turns
    trained: float
    evaluated: float  # the wait for an evaluation beside, else
    published: float
    ended: float  # its own evaluation, if it has one

    def record(self, version: int, *, evaluates: bool) -> None:
        """Record the spans of the step that made a version, if spans are recorded."""
        spans = [
            ("step", self.start, self.ended),
            ("wait for the evaluation", self.start, self.asked),
            ("wait for groups", self.asked, self.drawn),
            ("wait for the turn", self.drawn, self.in_turn),
            ("learn", self.in_turn, self.trained),
            ("wait for the evaluation", self.trained, self.evaluated),
            ("publish", self.evaluated, self.published),
            ("evaluate", self.published, self.ended if evaluates else self.published),
        ]
        for name, begin, end in spans:
            if end > begin:  # else there was none
                add_span(name, begin, end, version=version)

    def measures(self, waited_s: float, *, in_turns: bool, beside: bool) -> dict[str, float]:
        """Return the step's metrics of time.

        Args:
            waited_s: of the time until the groups were drawn, that without enough of them.
            in_turns: several runs learn in turns.
            beside: evaluations go on beside updates.
        """
        step_s, turn_s = self.ended - self.start, self.in_turn - self.drawn
        train_s = self.trained - self.asked - waited_s - turn_s
        eval_s = self.asked - self.start + self.evaluated - self.trained
        return {
            "time/step_s": step_s,
            "time/wait_data_s": waited_s,
            **({"time/wait_turn_s": turn_s} if in_turns else {}),
            "time/train_s": train_s,
            **({"time/wait_eval_s": eval_s} if beside else {}),
            "time/publish_s": self.published - self.evaluated,
            "trainer/idle_share": 1.0 - train_s / step_s,
        }
