"""The command line of a sampler: what it takes, and how it says no."""

import os
import socket
from argparse import Namespace
from pathlib import Path

import pytest

from jaxrl_async import sample
from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.config.schema import DistributedSection
from jaxrl_async.errors import ConfigError
from jaxrl_async.remote.run import sampler_process
from jaxrl_async.run import distributed


@pytest.fixture(autouse=True)
def neither_ends_nor_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "leave", lambda code: code)
    monkeypatch.setattr(distributed, "join_sampler_processes", lambda section: None)
    monkeypatch.setattr(sample, "end_on_ctrl_c", lambda: None)
    monkeypatch.delenv("JAXRL_ASYNC_SECRET", raising=False)


@pytest.mark.parametrize(
    ("text", "axes"),
    [("", {}), ("tensor=4", {"tensor": 4}), ("tensor=2,expert=8", {"tensor": 2, "expert": 8})],
)
def test_axes(text: str, axes: dict[str, int]) -> None:
    assert sample.axes_of(text) == axes


@pytest.mark.parametrize("text", ["tensor", "tensor=0", "tensor=x", "tensor=-1", "width=2", "=2"])
def test_what_is_no_axis_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not an axis. Give AXIS=SIZE.*--mesh tensor=4"):
        sample.axes_of(text)


def test_cores() -> None:
    mine = sorted(os.sched_getaffinity(0))
    assert sample.cores_of("") == set()
    assert sample.cores_of(",".join(map(str, mine))) == set(mine)
    for text in ("x", "-1", f"{mine[-1] + 4096}", "0,,0"):
        with pytest.raises(ConfigError, match="give cores that this process may use"):
            sample.cores_of(text)


def test_processes() -> None:
    def given(process: str | None, coordinator: str | None = "h:1") -> DistributedSection:
        return sample.section_of(Namespace(process=process, coordinator=coordinator))

    assert given(None) == DistributedSection()
    assert (given("1/4").process_id, given("1/4").num_processes) == (1, 4)
    for process, coordinator in (("1", "h:1"), ("a/2", "h:1"), ("1/2", None)):
        with pytest.raises(ConfigError, match="INDEX/COUNT"):
            given(process, coordinator)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("127.0.0.1",), 2, "is not HOST:PORT"),
        (("::1:7077",), 2, "write an IPv6 address in brackets"),
        (("127.0.0.1:9", "--mesh", "tensor"), 2, "is not an axis"),
        (("127.0.0.1:9", "--tls-key", "/none"), 2, "tls"),
        (("127.0.0.1:9", "--wait", "0.1"), 69, "no trainer let this sampler join within 0.1 s"),
        (("/no/such/run", "--wait", "0.1"), 69, "join.json, which a trainer writes"),
    ],
)
def test_an_error_is_one_line(
    words: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sample.main(["--join", *words]) == code
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_sampler_has_a_port_of_its_own_only_if_it_is_given_one() -> None:
    def own(*words: str) -> RemoteSection:
        return sample.connections_of(sample._parser().parse_args(["--join", "h:1", *words]))

    assert "data_port" not in own().model_fields_set
    assert own("--data-port", "7078").data_port == 7078
    assert "data_port" in own("--data-port", "0").model_fields_set, "any, whatever the run says"
    for port in ("-1", "65536", "x"):
        with pytest.raises(SystemExit):
            own(f"--data-port={port}")


@pytest.mark.parametrize("wait", ["-1", "nan", "soon"])
def test_a_wait_must_be_a_time(wait: str) -> None:
    with pytest.raises(SystemExit) as ended:
        sample.main(["--join", "127.0.0.1:9", f"--wait={wait}"])
    assert ended.value.code == 2


@pytest.mark.full
def test_a_sampler_that_no_trainer_answers_says_so_by_its_code_and_keeps_its_programs(
    monkeypatch, tmp_path, capsys
):
    """A cluster gives back the nodes of one without a trainer, and starts any other again."""
    kept: list[Path] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAXRL_ASYNC_HEALTH", "127.0.0.1:0")
    for name in ("keep_used", "keep_compiled_programs"):
        monkeypatch.setattr(sampler_process, name, kept.append)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    assert sample.main(["--join", address, "--wait", "0.2"]) == 69
    assert "Disconnected" in capsys.readouterr().err
    assert kept == [tmp_path / "jaxrl_async" / "programs"] * 2, "bounded, and used"
