"""The doctor: what it finds on a machine that is well, and on one that is made ill."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import jax
import optax
import pytest

from jaxrl_async import host
from jaxrl_async.command import config_checks, machine
from jaxrl_async.command.doctor import main
from jaxrl_async.command.machine import (
    Devices,
    check_disk,
    check_packages,
    find_devices,
    host_memory,
)
from jaxrl_async.config.load import load
from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.spec import num_weights
from jaxrl_async.run.builders.initial_policy import spec_of_run

ROOT = Path(__file__).parents[2]


def telling(**facts) -> str:
    """A PROBE that tells this of one device."""
    usual = {"kind": "a device", "count": 1, "memory": None, "capability": None}
    return f"print('{json.dumps({**usual, **facts})}')"


def levels(text: str) -> list[str]:
    return re.findall(r"^(ok|warning|error) ", text, re.MULTILINE)


@pytest.mark.full
def test_the_default_job_is_well_here(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["recipe:addition"]) == 0
    told = capsys.readouterr().out
    assert "error" not in levels(told) and len(levels(told)) > 10
    for part in ("jax 0", "devices:", "host memory", "cores", "/dev/shm", "disk", "tokenizer"):
        assert part in told
    assert list(tmp_path.iterdir()) == [], "it only looks"


@pytest.mark.full
def test_what_is_missing_is_an_error_with_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(config_checks, "find_spec", lambda name: None)
    words = ["data.addition=null", "data.jsonl.path=x.parquet", "model.path=nowhere",
             "reward.function=no.py:f", "warm_start.steps=0", "endpoint={}",
             "run.callbacks=[no.py:Upload]",
             "evals={a: {task: no.py:t}, b: {data: x.jsonl, reward: no.py:r}}"]  # fmt: skip
    assert main(["recipe:gsm8k", *words]) == 1
    told = capsys.readouterr().out
    assert "pip install 'jaxrl_async[datasets]'" in told
    assert "pip install 'jaxrl_async[serve]'" in told
    assert "model.path = 'nowhere': there is no such folder" in told
    for setting in ("reward.function=no.py:f", "run.callbacks=no.py:Upload",
                    "evals.a.task=no.py:t", "evals.b.reward=no.py:r"):  # fmt: skip
        assert f"{setting}: there is no such file here" in told
    assert f"{levels(told).count('error')} errors" in told.splitlines()[-1]


@pytest.mark.full
def test_a_model_that_would_be_downloaded_is_a_warning_and_stays_where_it_is(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert main(["recipe:addition", "model.path=Qwen/Qwen3-0.6B"]) == 0
    told = capsys.readouterr().out
    assert "model.path=Qwen/Qwen3-0.6B is a name on the Hugging Face hub" in told
    assert "-> hf download Qwen/Qwen3-0.6B\n" in told and levels(told).count("warning") == 1


@pytest.mark.full
def test_a_wrong_setting_is_one_of_its_errors(capsys):
    assert main(["recipe:addition", "sampler.slot=3"]) == 1
    told = capsys.readouterr().out
    assert "did you mean sampler.slots" in told and "host memory" in told


def test_a_bad_command_line_is_refused():
    for words in (["--timeout", "0"], ["--timout", "3"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2


@pytest.mark.full
def test_devices_are_what_jax_sees(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    devices, diagnostics = find_devices(60)
    assert devices == Devices("cpu", "cpu", 3, None)
    assert [f.level for f in diagnostics] == ["ok"]


@pytest.mark.full
def test_a_driver_that_never_answers_is_given_up_and_leaves_no_process(monkeypatch, tmp_path):
    """As where another process holds the TPU: the child even ignores SIGTERM."""
    mark = tmp_path / "pid"
    monkeypatch.setattr(
        machine,
        "PROBE",
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)",
    )
    monkeypatch.setattr(machine, "holders_of_devices", lambda: iter(["process 7 (python x.py)"]))
    devices, (diagnostic,) = find_devices(2)
    assert devices is None and diagnostic.level == "error"
    assert "no answer within 2 s" in diagnostic.text and "held by process 7" in diagnostic.text
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_a_driver_that_fails_is_reported_in_its_words(monkeypatch):
    monkeypatch.setattr(machine, "PROBE", "raise RuntimeError('The TPU is already in use')")
    monkeypatch.setattr(machine, "holders_of_devices", lambda: iter([]))
    _, (diagnostic,) = find_devices(60)
    assert "RuntimeError: The TPU is already in use" in diagnostic.text and diagnostic.remedy


def test_a_process_that_has_a_device_open_is_found(monkeypatch):
    """/dev/zero in place of a chip; a child holds it, which has its name once it prints."""
    monkeypatch.setattr(machine, "TPU_FILES", ("zero",))
    words = ["tail", "-v", "-f", "/dev/null"]
    with (
        open("/dev/zero") as chip,
        subprocess.Popen(words, stdin=chip, stdout=subprocess.PIPE) as child,
    ):
        try:
            assert child.stdout is not None and child.stdout.readline()
            holders = list(machine.holders_of_devices())
        finally:
            child.kill()
    assert f"process {child.pid} (tail -v -f /dev/null)" in holders
    assert not any(text.startswith(f"process {os.getpid()} ") for text in holders)


def test_an_old_package_is_an_error_and_a_missing_one_too(monkeypatch):
    versions = {"flax": "0.1", "jax": "0.10.99"}
    monkeypatch.setattr(machine, "version_of", lambda name: versions.get(name, ""))
    found = {f.text: f.remedy for f in check_packages() if f.level == "error"}
    assert any("flax 0.1 is installed" in what for what in found)
    assert any("optax is not installed" in what for what in found)
    assert not any(what.startswith("jax ") for what in found)
    assert all(remedy.startswith("pip install -U '") for remedy in found.values())


def test_a_folder_that_cannot_hold_the_checkpoints_is_reported(tmp_path):
    assert check_disk(tmp_path / "a/b", 0, "").level == "ok"
    assert check_disk(tmp_path, 2.0**60, "for checkpoints").level == "warning"
    (tmp_path / "file").touch()
    assert check_disk(tmp_path / "file/runs", 0, "").level == "error"


def test_memory_is_that_of_the_arrays_that_a_run_holds():
    """Weights, gradients, AdamW's state and the weights in transfer, as arrays."""
    config = load("recipe:addition")
    spec = spec_of_run(config.model, addition_tokenizer(), config.longest_example)
    params = jax.eval_shape(lambda key: init_params(spec, key), jax.random.key(0))
    state = jax.eval_shape(optax.adamw(1.0).init, params)

    def size(tree) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    counters = 8  # AdamW's step
    assert config_checks.trainer_bytes(config, spec) == pytest.approx(
        3 * size(params) + size(state), abs=counters
    )
    kv = config_checks.sampler_bytes(config, spec) - 2 * size(params)
    tokens = config.sampler.slots * config.sampler.max_length
    shape = config.model.architecture
    least = tokens * 2 * shape.layers * shape.kv_heads * shape.head_dim * 4
    assert least <= kv <= 2 * least + 2**20


def test_devices_that_are_too_small_or_too_few_are_errors():
    config = load("recipe:addition", ["sampler.slots=2"]).on_devices("gpu")
    kept = config_checks.trainer_bytes(
        config, spec_of_run(config.model, addition_tokenizer(), config.longest_example)
    )

    def told(count: int, memory: float) -> dict[str, str]:
        found = config_checks.check_config(config, Devices("gpu", "H100", count, int(memory)))
        return {f.text.split(":")[0]: f.level for f in found}

    trainer = "memory of a trainer's device"
    assert told(2, 10 * kept)[trainer] == "ok"
    assert told(2, 1.2 * kept)[trainer] == "warning"
    assert told(2, 0.9 * kept)[trainer] == "error"
    assert told(2, 10 * kept)["the mesh needs 2 of 2 devices"] == "ok"
    assert told(1, 10 * kept)["the mesh needs 2 devices, and there are 1"] == "error"


def test_weights_in_transfer_count_once_where_both_sides_share_the_devices():
    settings = ["sampler.slots=2", "mesh.colocated=true", "model.dtype=float32"]
    config = load("recipe:addition", settings).on_devices("gpu")
    spec = spec_of_run(config.model, addition_tokenizer(), config.longest_example)
    both = config_checks.trainer_bytes(config, spec) + config_checks.sampler_bytes(config, spec)
    kept = both - 4 * num_weights(spec)

    def level(memory: float) -> str:
        found = config_checks.check_config(config, Devices("gpu", "H100", 1, int(memory)))
        return next(f.level for f in found if "both sides" in f.text)

    assert level(kept + 1) != "error" and level(kept - 1) == "error"


def test_the_hosts_memory_is_at_most_what_it_has():
    total, free = host_memory()
    assert 0 < free <= total <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_doctor_says_how_much_of_a_gpu_jax_takes(monkeypatch):
    told = telling(platform="gpu", kind="H100", memory=64_000_000_000, capability="9.0")
    monkeypatch.setattr(machine, "PROBE", told)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")
    devices, (_, share) = find_devices(60)
    assert devices == Devices("gpu", "H100", 1, 64_000_000_000, "9.0")
    assert share.level == "ok" and share.text.startswith("JAX takes 40% of each GPU at its start")
    config = load("recipe:addition", ["sampler.slots=2"])
    found = config_checks.check_config(config, Devices("gpu", "H100", 2, 1_000_000))
    remedies = [f.remedy for f in found if f.text.startswith("memory of a")]
    assert remedies and all("XLA_PYTHON_CLIENT_MEM_FRACTION=0.95" in r for r in remedies)


@pytest.mark.parametrize(
    ("name", "text", "level", "said"),
    [
        ("XLA_CLIENT_MEM_FRACTION", "0.5", "ok", r"JAX takes 50% .*\(XLA_CLIENT_MEM_FRACTION,"),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false", "ok", "JAX takes 75% of each GPU on demand"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", "ok", "on demand, without its own limit"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "2", "warning", "=2 is not a share of a card's memory"),
    ],
)
def test_doctor_reads_the_variables_of_a_gpus_memory(monkeypatch, name, text, level, said):
    monkeypatch.setattr(machine, "PROBE", telling(platform="gpu", capability="8.9"))
    monkeypatch.setenv(name, text)
    devices, (_, share) = find_devices(60)
    assert share.level == level and re.search(said, share.text)
    config = load("recipe:addition", ["sampler.slots=2"])
    (memory,) = (f for f in config_checks.check_config(config, devices) if "memory" in f.text)
    assert memory.level == "warning" and "JAX does not report" in memory.text


@pytest.mark.parametrize(
    ("platform", "capability", "width"),
    [("gpu", "7.5", 4), ("gpu", "8.0", 2), ("tpu", None, 2), ("cpu", None, 4)],
)
def test_a_run_is_counted_in_the_type_that_its_cards_compute_in(
    monkeypatch, platform, capability, width
):
    """A T4 multiplies in float32, and weights that a sampler has are twice as large."""
    counted = []
    monkeypatch.setattr(
        config_checks,
        "sampler_bytes",
        lambda config, spec: counted.append(config.model.computes_in) or 0.0,
    )
    devices = Devices(platform, "a card", 2, 2**40, capability)
    assert list(config_checks.check_config(load("recipe:addition"), devices))
    assert {"float32": 4, "bfloat16": 2}[counted[0]] == width


def test_doctor_warns_of_a_plugin_without_a_driver(tmp_path, monkeypatch):
    (tmp_path / "jax_plugins" / "xla_cuda13").mkdir(parents=True)
    (tmp_path / "jax_plugins" / "xla_cuda13" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    importlib.invalidate_caches()
    monkeypatch.setattr(host, "NVIDIA_FILES", ("no",))
    monkeypatch.setattr(host, "TPU_FILES", ("no",))
    monkeypatch.setattr(machine, "PROBE", telling(platform="cpu"))
    monkeypatch.setenv("JAX_PLATFORMS", "")
    _, (_, driver) = find_devices(60)
    assert driver.level == "warning" and driver.text.startswith("jax-cuda13-plugin is installed")
    assert "NVIDIA's driver is not here" in driver.text and "install the driver" in driver.remedy
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert len(find_devices(60)[1]) == 1
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setattr(host, "NVIDIA_FILES", ("null",))  # /dev/null, as if it were the driver
    assert "this host has an NVIDIA GPU" in find_devices(60)[1][1].text
