"""The endpoint's counts in Prometheus' text format, version 0.0.4. Pure."""

from collections.abc import Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "jaxrl_async_endpoint_"


def prometheus_text(counts: Mapping[str, int], gauges: Mapping[str, int]) -> str:
    """Return counters and gauges as text.

    Args:
        counts: counters since the start, by name.
        gauges: current values, by name.
    """
    lines = []
    for kind, values in (("counter", counts), ("gauge", gauges)):
        end = "_total" if kind == "counter" else ""
        for name, value in values.items():
            lines += [f"# TYPE {PREFIX}{name}{end} {kind}", f"{PREFIX}{name}{end} {value}"]
    return "".join(f"{line}\n" for line in lines)
