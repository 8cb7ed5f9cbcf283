"""Fixtures for the tests of configurations."""

import pytest

from jaxrl_async.config.load import load
from jaxrl_async.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    """Write a configuration's text, or its bytes, to a file."""

    def to_file(text):
        path = tmp_path / "c.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return to_file


@pytest.fixture
def refusal():
    """Return the error that loading a file with overrides raises."""

    def of(path, *overrides):
        with pytest.raises(ConfigError) as caught:
            load(path, overrides)
        return str(caught.value)

    return of
