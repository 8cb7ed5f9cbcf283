"""The comparison itself, and the table that is kept of it; needs no peer."""

import re
from pathlib import Path

import numpy as np
import pytest
from agree import agree

ROOT = Path(__file__).parents[2]
RIGHT = {"loss": np.float32(2.0), "gradient": np.array([1.0, -4.0]), "version": np.array("1")}


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": 2.0001, "gradient": RIGHT["gradient"]},
        {"loss": 2.0, "gradient": np.array([1.0001, -4.0])},
        {"loss": 2.0, "gradient": np.array([np.nan, -4.0])},
        {"loss": np.nan, "gradient": RIGHT["gradient"]},
        {},
    ],
)
def test_what_differs_is_refused(wrong, monkeypatch):
    monkeypatch.setattr("agree.ROWS", [])
    agree("right", "peer", RIGHT, RIGHT)
    with pytest.raises(AssertionError):
        agree("wrong", "peer", wrong, RIGHT)


def test_the_table_is_of_the_versions_that_the_environments_pin():
    table = (ROOT / "docs/agreement.md").read_text(encoding="utf-8")
    pins = (ROOT / "benchmarks/peers/environments.py").read_text(encoding="utf-8")
    measured = set(re.findall(r"^\| `.*` \| .+ \| (\d[\d.]+) \|", table, re.MULTILINE))
    pinned = set(re.findall(r'"(?:trl|google-tunix)==([\d.]+)"', pins))
    assert len(measured) == 2 and measured == pinned
