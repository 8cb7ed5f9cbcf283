"""What another user of this machine does, in a test that root runs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root acts as another user")


@contextmanager
def one_who_is_nobody() -> Iterator[None]:
    """Have this process act as another user, without groups, while the body runs."""
    groups, group = os.getgroups(), os.getegid()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)
        os.setgroups(groups)
