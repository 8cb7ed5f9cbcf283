"""A run's metrics as Prometheus' own client reads them."""

import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxrl_async.errors import ConfigError
from jaxrl_async.metrics.prometheus import PrometheusWriter, gauge_name
from jaxrl_async.metrics.recorder import Recorder, read_lines


def scraped(port: int) -> dict[str, tuple[float, dict]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        families = text_string_to_metric_families(reply.read().decode())
        return {s.name: (s.value, s.labels) for family in families for s in family.samples}


@pytest.mark.full
def test_the_newest_value_of_each_metric_is_read_and_all_are_kept(tmp_path):
    kept = Recorder(tmp_path, tensorboard=False)
    writer = PrometheusWriter(kept, "127.0.0.1:0", run="mine")
    assert scraped(writer.port) == {"jaxrl_step": (0.0, {"run": "mine"})}
    writer.log(1, {"reward/mean": 0.5, "reward/a.b": 1.0, "train/loss": float("nan")})
    writer.log(2, {"reward/mean": 0.75})
    writer.samples(2, [{"prompt": "p"}])
    found = scraped(writer.port)
    assert found["jaxrl_step"] == (2.0, {"run": "mine"})
    assert found["jaxrl_reward_mean"] == (0.75, {"run": "mine"})
    assert found["jaxrl_reward_a_b"][0] == 1.0 and found["jaxrl_train_loss"][0] != 0
    writer.close()
    with pytest.raises(OSError):
        scraped(writer.port)
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert len(read_lines(tmp_path / "samples.jsonl")) == 1


def test_a_port_that_is_taken_is_refused_with_what_to_do(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"metrics.prometheus={address}: nothing can listen"):
            PrometheusWriter(Recorder(tmp_path, tensorboard=False), address, run="mine")


def test_names_hold_what_prometheus_allows():
    assert gauge_name("staleness/lag_1_kl") == "jaxrl_staleness_lag_1_kl"
    assert gauge_name("reward/größe-x") == "jaxrl_reward_gr__e_x"
