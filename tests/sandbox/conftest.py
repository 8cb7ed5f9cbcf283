"""Both ways of making a sandbox, where this machine allows them."""

import functools
import shutil

import pytest

from jaxrl_async.errors import ConfigError, Unavailable
from jaxrl_async.sandbox import sandbox_layout as layout
from jaxrl_async.sandbox.sandbox import Sandbox, SandboxLimits

KINDS = ("own", "bubblewrap")


def use(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make sandboxes in this way, whoever the user is."""
    monkeypatch.setattr(layout.os, "geteuid", lambda: 1000 if kind == "bubblewrap" else 0)


@functools.cache
def refused(kind: str) -> str:
    """Why no sandbox can be made here; "": one can."""
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    with pytest.MonkeyPatch.context() as monkeypatch:
        use(kind, monkeypatch)
        try:
            with Sandbox(SandboxLimits()) as box:
                box.wait_ready()
        except (Unavailable, ConfigError) as error:
            return str(error)
    return ""


@pytest.fixture
def sandboxes() -> None:
    """Sandboxes as users have them."""
    if why := refused("own"):
        pytest.skip(why)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way in turn."""
    if why := refused(request.param):
        pytest.skip(why)
    use(request.param, monkeypatch)
    return request.param
