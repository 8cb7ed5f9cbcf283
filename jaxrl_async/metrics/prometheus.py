"""Serve a run's newest metrics to Prometheus: http://HOST:PORT/metrics."""

import importlib
import logging
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_async.errors import ConfigError, MissingExtraError
from jaxrl_async.metrics.metric import metric_of
from jaxrl_async.metrics.recorder import MetricsWriter

log = logging.getLogger(__name__)


class PrometheusWriter:
    """A writer of metrics that also serves the newest value of each to Prometheus.

    `reward/mean` is the gauge `jaxrl_reward_mean` with the label `run`; `jaxrl_step` is the number
    of updates so far. Usable from any thread; never waits for a reader.
    """

    writes = True

    def __init__(self, writer: MetricsWriter, address: str, *, run: str) -> None:
        """Listen. Raises ConfigError if that fails, MissingExtraError.

        Args:
            writer: gets everything first.
            address: "HOST:PORT"; port 0: any free port, which is logged.
            run: name of the run, the label of every value.
        """
        self._writer, self._run, self.samples = writer, run, writer.samples
        self._lock = threading.Lock()
        self._step, self._values = 0, dict[str, float]()
        host, _, port = address.rpartition(":")
        try:
            self._client = _client()
            registry = self._client.CollectorRegistry()
            registry.register(self)
            self._server, self._thread = self._client.start_http_server(
                int(port), host.strip("[]"), registry
            )
        except MissingExtraError:
            writer.close()
            raise
        except OSError as error:
            writer.close()
            raise ConfigError(
                f"metrics.prometheus={address}: nothing can listen there ({error}). Give an "
                "address of this machine and a free port, or port 0 for any."
            ) from error
        self.port: int = self._server.server_port
        log.info("metrics for Prometheus: http://%s:%d/metrics", host, self.port)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a step's metrics, and serve them from now on."""
        self._writer.log(step, values)
        with self._lock:
            self._step = step
            self._values |= {key: float(value) for key, value in values.items()}

    def close(self) -> None:
        """Stop listening and writing. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._writer.close()

    def collect(self) -> Iterator[Any]:
        """Yield the newest values in the form that prometheus_client collects."""
        with self._lock:
            step, values = self._step, dict(self._values)
        shown = {"jaxrl_step": ("Updates so far.", float(step))}
        for key, value in values.items():
            shown.setdefault(gauge_name(key), (metric_of(key).help, value))
        for name, (about, value) in shown.items():
            gauge = self._client.core.GaugeMetricFamily(name, about, labels=["run"])
            gauge.add_metric([self._run], value)
            yield gauge


def gauge_name(key: str) -> str:
    """Return a metric's name for Prometheus, which allows only letters, digits and _."""
    return "jaxrl_" + re.sub(r"\W", "_", key, flags=re.ASCII)


def _client() -> Any:
    try:
        importlib.import_module("prometheus_client.core")
        return importlib.import_module("prometheus_client")
    except ImportError as error:
        raise MissingExtraError(
            "metrics.prometheus needs the package prometheus-client, which is not installed. Run "
            "`pip install 'jaxrl_async[prometheus]'` or set metrics.prometheus=null."
        ) from error
