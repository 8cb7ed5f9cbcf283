"""Values made one ahead, of a stream with a place."""

import threading

import pytest

from jaxrl_async.run.update_loop import Ahead


class Numbers:
    """A stream that fails once, at 3."""

    def __init__(self) -> None:
        self.next, self.failed, self.threads = 0, False, set[str]()

    def make(self) -> int:
        self.threads.add(threading.current_thread().name)
        if self.next == 3 and not self.failed:
            self.failed = True
            raise ValueError("three")
        self.next += 1
        return self.next - 1

    def state(self) -> int:
        return self.next


def test_the_state_is_that_after_what_was_taken_however_much_was_made():
    numbers = Numbers()
    ahead = Ahead(numbers.make, numbers.state)
    assert ahead.state == 0 and numbers.next == 0, "nothing is made before it is asked for"
    numbers.next = 1  # restored
    assert ahead.state == 1
    assert [ahead.take(), ahead.state, ahead.take(), ahead.state] == [1, 2, 2, 3]
    with pytest.raises(ValueError, match="three"):
        ahead.take()
    assert ahead.state == 3
    ahead.close()
    assert threading.current_thread().name not in numbers.threads and len(numbers.threads) == 1


def test_the_next_value_is_made_before_it_is_asked_for():
    made, count = threading.Event(), [0]

    def make() -> int:
        count[0] += 1
        if count[0] == 2:
            made.set()
        return count[0] - 1

    ahead = Ahead(make, lambda: count[0])
    assert ahead.take() == 0
    assert made.wait(60) and ahead.state == 1, "that of what was taken"
    ahead.close()
