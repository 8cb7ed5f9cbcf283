"""Python's collector, kept off what was there before."""

import gc
import weakref

import pytest

from jaxrl_async.host import only_new_garbage

pytestmark = pytest.mark.full


class Cycle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def is_looked_at(one: object) -> bool:
    return any(found is one for found in gc.get_objects())


def test_what_was_there_is_left_alone_until_the_end_and_new_cycles_are_freed(nothing_frozen):
    early = Cycle()
    gone_before = weakref.ref(Cycle())
    with only_new_garbage():
        assert gone_before() is None  # nor is garbage kept that was there
        assert not is_looked_at(early)
        new, of_early = weakref.ref(Cycle()), weakref.ref(early)
        assert is_looked_at(new())
        del early
        gc.collect()
        assert new() is None and of_early() is not None
    gc.collect()
    assert of_early() is None and gc.get_freeze_count() == 0


def test_an_error_ends_it_too(nothing_frozen):
    with pytest.raises(ValueError, match="mine"), only_new_garbage():
        raise ValueError("mine")
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_froze_stays_frozen(nothing_frozen):
    gc.freeze()
    with only_new_garbage():
        pass
    assert gc.get_freeze_count() > 0
