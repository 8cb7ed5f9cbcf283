"""Encode lines of a run's files as JSON that any browser reads. Pure."""

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any


def plain_json(value: Any) -> str:
    """Return a value as JSON. Non-finite numbers become null, unpaired surrogates become question
    marks."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value
