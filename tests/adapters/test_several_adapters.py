"""Several adapters that learn in one run: each as it would alone."""

import asyncio
import re
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from runs import CONFIGS, many_digits
from safetensors.numpy import load_file

from jaxrl_async.adapters.adapter_generate import AdapterGenerate
from jaxrl_async.adapters.assemble_several import StepLock
from jaxrl_async.audit import Rules, audit
from jaxrl_async.config.load import dump, load
from jaxrl_async.config.schema import ArchitectureSection, Config
from jaxrl_async.config.several import runs_of
from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.errors import ConfigError, RolloutError, StalledError
from jaxrl_async.metrics.recorder import read_lines
from jaxrl_async.model.decoder import init_params
from jaxrl_async.model.policy import Policy
from jaxrl_async.model.spec import ModelSpec
from jaxrl_async.run.loop import train
from jaxrl_async.sampler.device.engine import Engine
from jaxrl_async.testing.clock import VirtualClock
from jaxrl_async.train_command import main
from jaxrl_async.types import Completion, Partial, Request, StopReason

SHAPE = {"layers": 2, "width": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp": 32}
TINY = (
    "model.lora={rank: 4, alpha: 8}",
    "data.addition={digits: 1, eval_size: 8}",
    "data.max_prompt_tokens=16",
    "warm_start={steps: 2, batch_size: 4}",
    "sampler={slots: 8, max_length: 32, max_new_tokens: 12}",
    "staleness.max_staleness=0",
    "algorithm={group_size: 4, groups_per_step: 2, learning_rate: 1e-2}",
    "trainer={row_length: 32, micro_batch_tokens: 256, warmup_steps: 0}",
    "eval.every=0",
    "metrics={peak_flops: 1e9, tensorboard: false, samples_every: 1}",
)
FEW_DIGITS = """
def few_digits(prompt, completion, reference):
    return 1 - sum(c.isdigit() for c in completion) / 16
"""
FAILS_LATER = (
    FEW_DIGITS
    + """
calls = []

def good(*given):
    return 1 - sum(c.isdigit() for c in given[1]) / 16

def few_digits(prompt, completion, reference):
    calls.append(1)
    if len(calls) > 20:
        raise RuntimeError("broken")
    return good(prompt, completion, reference)
"""
)


def weights_in(folder: Path) -> dict[str, np.ndarray]:
    """Read the adapter of a run that has ended."""
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def several(folder: Path, *overrides: str) -> Config:
    """Return the configuration of two runs: one is paid for digits, one for their absence."""
    reward, own = folder / "few.py", folder / "many.yaml"
    reward.write_text(FEW_DIGITS, encoding="utf-8")
    own.write_text("data: {addition: {digits: 2}}\n", encoding="utf-8")
    tree = yaml.safe_load((CONFIGS / "addition.yaml").read_text(encoding="utf-8"))
    few = {"reward": {"function": f"{reward}:few_digits"}, "algorithm": {"learning_rate": 2e-2}}
    tree["runs"] = {"few": few, "many": str(own)}
    return load(tree, [f"run.dir={folder}", *TINY, many_digits(folder), *overrides])


def saved(folder: Path) -> tuple[str, ...]:
    """Write a model; return the overrides that take it as the base."""
    tokenizer = addition_tokenizer()
    vocab = -(-tokenizer.vocab_size // 8) * 8
    spec = ModelSpec.from_architecture(ArchitectureSection(**SHAPE), vocab)
    Policy(spec, init_params(spec, jax.random.key(0)), tokenizer).save_pretrained(folder)
    return f"model.path={folder}", f"data.tokenizer={folder}", "warm_start.steps=0"


def alone(config: Config, name: str, folder: Path, **run: Any) -> Config:
    """Return the configuration of one of the runs, by itself."""
    own = runs_of(config)[name]
    section = own.run.model_copy(update={"dir": str(folder), **run})
    return own.model_copy(update={"run": section})


def trained(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(folder / "metrics.jsonl") if "train/loss" in line]


def texts(folder: Path) -> list[tuple[str, str, float]]:
    lines = read_lines(folder / "samples.jsonl")
    return [(line["prompt"], line["completion"], line["reward"]) for line in lines]


def assert_twins(ours: Path, theirs: Path, steps: int) -> None:
    assert texts(ours) == texts(theirs) and len(texts(ours)) == 4 * steps
    pairs = list(zip(trained(ours), trained(theirs), strict=True))
    assert len(pairs) == steps
    for mine, other in pairs:
        for key in ("train/loss", "train/grad_norm", "reward/mean", "policy/entropy"):
            assert mine[key] == pytest.approx(other[key], abs=1e-4), key


@pytest.mark.full
def test_each_of_two_adapters_learns_what_it_would_learn_alone(tmp_path: Path) -> None:
    config = several(
        tmp_path, *saved(tmp_path / "base"), "run.steps=3", "run.name=both", "runs.few.run.steps=4"
    )
    train(config)
    assert [own.run.steps for own in runs_of(config).values()] == [4, 3]
    for name, steps in (("few", 4), ("many", 3)):
        train(alone(config, name, tmp_path / "alone"))
        assert_twins(tmp_path / "both" / name, tmp_path / "alone" / name, steps)
        assert (tmp_path / "both" / name / "adapter" / "adapter_config.json").is_file()


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_run_that_fails_ends_alone_and_a_resumed_one_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reward of one breaks after its first step; the command says so. Mended and resumed, both
    end where one run without an interruption does."""
    exact = ("run.name=both", "checkpoint.every=1", "faults={scorer_retries: 0, max_failures: 1}")
    config = several(tmp_path, *saved(tmp_path / "base"), *exact, "run.steps=3")
    whole = tmp_path / "whole"
    train(config.model_copy(update={"run": config.run.model_copy(update={"dir": str(whole)})}))
    file = tmp_path / "both.yaml"
    file.write_text(dump(config), encoding="utf-8")
    reward = tmp_path / "few.py"
    reward.write_text(FAILS_LATER, encoding="utf-8")
    few, many = tmp_path / "both" / "few", tmp_path / "both" / "many"
    assert main([str(file), "runs.many.run.steps=2"]) == 1
    errors = capsys.readouterr().err
    assert "RunsFailed: 1 of 2 runs failed" in errors and "few: " in errors and "broken" in errors
    assert len(trained(many)) == 2 and (many / "policy").is_dir()
    assert len(trained(few)) < 3 and not (few / "policy").exists()
    reward.write_text(FEW_DIGITS, encoding="utf-8")
    assert main([str(file), "--resume"]) == 0
    for name in ("few", "many"):
        assert_twins(tmp_path / "both" / name, whole / "both" / name, 3)
        mine, other = (weights_in(f / "both" / name) for f in (tmp_path, whole))
        for key, array in mine.items():
            np.testing.assert_allclose(array, other[key], atol=1e-4, err_msg=key)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("model.lora.rank=0",),
            "model.lora=null is not possible with several adapters",
        ),
        (("run.job=sft", "warm_start.steps=0"), "run.job=sft is not possible"),
        (("mesh.samplers_in=processes",), "mesh.samplers_in=processes is not possible"),
        (("mesh.colocated=true",), "mesh.colocated=true is not possible"),
        (("run.replay_schedule=x",), "run.replay_schedule is not possible"),
        (("runs.few.model.dtype=bfloat16",), "runs.few.model.dtype is shared"),
        (("runs.few.sampler.temperature=0.5",), "runs.few.sampler.temperature is shared"),
        (("runs.many.mesh.trainer.fsdp=2",), "runs.many.mesh.trainer is shared"),
        (("runs.few.warm_start.steps=9",), "runs.few.warm_start.steps is shared"),
        (("runs.few.run.seed=1",), "runs.few.run.seed is shared"),
        (("runs.few.algorithm.losss=1",), "runs.few: command line: algorithm.losss"),
        (("runs.none.run.steps=1",), "no run has this name"),
        (("runs.few=1",), "no run has this name"),
        (("runs=1",), "no run has this name"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_several_runs_cannot_do_is_refused_by_name(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        several(tmp_path, *overrides)


def test_a_run_of_other_tokens_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    tree = {
        "model": {"lora": {"rank": 4}},
        "run": {"dir": str(tmp_path)},
        "runs": {"sums": {}, "calls": {"task": "calculator"}},
    }
    with pytest.raises(
        ConfigError, match=r"runs\.calls: its vocabulary differs from the first run's"
    ):
        train(load(tree))
    assert not any(tmp_path.iterdir())


def test_an_override_is_of_the_run_with_the_longest_name_that_fits() -> None:
    runs = {"v1": {}, "v1.5": {}, "v1.5.b": {}}
    given = ("runs.v1.run.steps=1", "runs.v1.5.run.steps=2", "runs.v1.5.b.run.steps=3")
    config = load({"model": {"lora": {"rank": 4}}, "runs": runs}, given)
    assert [own.run.steps for own in runs_of(config).values()] == [1, 2, 3]
    with pytest.raises(ConfigError, match="no run has this name"):
        load({"model": {"lora": {"rank": 4}}, "runs": runs}, ["runs.v2.run.steps=1"])


def test_each_run_serves_its_metrics_by_itself() -> None:
    tree = {"model": {"lora": {"rank": 4}}, "metrics": {"prometheus": "127.0.0.1:9100"}}
    with pytest.raises(ConfigError, match="9100 would be served by a, b at the same time"):
        load({**tree, "runs": {"a": {}, "b": {}}})
    load({**tree, "runs": {"a": {}, "b": {"metrics": {"prometheus": "127.0.0.1:9101"}}}})
    load({**tree, "runs": {"a": {}, "b": {}}}, ["metrics.prometheus=127.0.0.1:0"])


@pytest.mark.parametrize(
    "runs",
    [{"a/b": {}}, {"base": {}}, {"decoder": {}}, {"a": 3}, [], 0, [1], {"a": "missing.yaml"}],
    ids=str,
)
def test_runs_that_are_no_runs_are_refused(runs: Any) -> None:
    with pytest.raises(ConfigError, match=r"runs|missing\.yaml"):
        load({"model": {"lora": {"rank": 4}}, "runs": runs})


def test_a_configuration_of_several_survives_a_dump(tmp_path: Path) -> None:
    config = several(tmp_path, "runs.few.algorithm.loss.cispo.clip=3", "runs.few.run.steps=7")
    file = tmp_path / "again.yaml"
    file.write_text(dump(config), encoding="utf-8")
    assert load(file) == config
    few, many = runs_of(config).values()
    assert few.algorithm.loss == {"cispo": {"clip": 3}} and few.algorithm.learning_rate == 2e-2
    assert many.algorithm.loss == "ppo_clip"
    assert (few.run.steps, many.data.addition.digits) == (7, 2)


def test_runs_step_in_the_order_in_which_they_waited() -> None:
    lock, order, waiting = StepLock(), list[int](), list[threading.Thread]()

    def take(number: int) -> None:
        with lock:
            order.append(number)

    with lock:
        for number in range(5):
            waiting.append(threading.Thread(target=take, args=(number,)))
            waiting[-1].start()
            while len(lock._waiting) <= number:  # until it waits; nobody takes it meanwhile
                time.sleep(0.001)
        assert order == []
    for thread in waiting:
        thread.join(10)
    assert order == [0, 1, 2, 3, 4]
    with lock:  # it is free again
        assert not lock._waiting


@pytest.mark.full
def test_a_run_does_not_wait_for_ever_for_one_that_keeps_the_lock() -> None:
    clock = VirtualClock()
    lock = StepLock(limit_s=100.0, clock=clock)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            with lock:
                pass
        except StalledError as error:
            errors.append(error)

    with lock:
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        while not lock._waiting:
            time.sleep(0.001)
        clock.advance(101)
        waiting.join(20)
        assert "held the trainer's slice for 101 s" in str(errors[0]) and not lock._waiting
    with lock:  # a run that gave up does not get the lock
        pass


class Samplers:
    """A ports.Generate that notes what it is asked, and answers when it is told to."""

    seed = 7

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.futures: list[asyncio.Future[Completion]] = []

    def submit_many(self, requests: Any) -> Any:
        self.asked += requests
        loop = asyncio.get_running_loop()
        self.futures += [loop.create_future() for _ in requests]
        return self.futures[-len(requests) :]

    def progress(self) -> tuple[Partial, ...]:
        none = np.zeros(0, np.int32)
        sampled = {"token_ids": none, "logprobs": none, "versions": none, "seed": 7}
        return tuple(Partial(request=request, **sampled) for request in self.asked)


@pytest.mark.full
def test_a_run_sees_its_own_requests_alone_and_under_their_own_ids() -> None:
    samplers = Samplers()
    one, two = (AdapterGenerate(name, samplers) for name in ("one", "two"))
    given = Request(request_id="g0/m0/t0", token_ids=np.arange(3), max_new_tokens=2, key=(1, 2))
    none = np.zeros(0, np.int32)

    async def play() -> None:
        first, second, third, fourth = (g.submit_many([given])[0] for g in (one, two, one, two))
        named = [(r.request_id, r.adapter, r.key) for r in samplers.asked[:2]]
        assert named == [("one/g0/m0/t0", "one", (1, 2)), ("two/g0/m0/t0", "two", (1, 2))]
        seen = [p.request for p in one.progress()]
        assert len(seen) == 2 and all(r.request_id == "g0/m0/t0" for r in seen)
        assert all(r.adapter == "" for r in seen), "as a run alone saves it"
        answer = Completion(
            request_id="one/g0/m0/t0",
            token_ids=none,
            logprobs=none,
            versions=none,
            stop=StopReason.EOS,
        )
        samplers.futures[0].set_result(answer)
        assert (await first).request_id == "g0/m0/t0"
        second.cancel()
        samplers.futures[2].set_exception(RolloutError("refused"))
        with pytest.raises(RolloutError, match="refused"):
            await third
        assert samplers.futures[1].cancelled(), "it frees its slot"
        samplers.futures[3].cancel()
        with pytest.raises(asyncio.CancelledError):
            await fourth
        again = one.submit_many([one.progress()[0]])
        assert samplers.asked[-1].request.adapter == "one" and not again[0].done()
        again[0].cancel()

    asyncio.run(play())


INTERRUPTS = """
import os, signal

calls = []

def few_digits(prompt, completion, reference):
    calls.append(1)
    if len(calls) == 20:
        os.kill(os.getpid(), signal.SIGINT)
    return 1 - sum(c.isdigit() for c in completion) / 16
"""


@pytest.mark.full
@pytest.mark.exhaustive
def test_ctrl_c_saves_all_and_resuming_goes_on_where_they_were(tmp_path: Path) -> None:
    """Stale groups and a warm start, too; what was under way comes back."""
    given = ("run.name=both", "run.steps=6", "staleness.max_staleness=2", "algorithm.loss=cispo")
    shape = [f"model.architecture.{name}={size}" for name, size in SHAPE.items()]
    config = several(tmp_path, *given, *shape, "model.lora.base=int8")
    (tmp_path / "few.py").write_text(INTERRUPTS, encoding="utf-8")
    train(config)
    both = tmp_path / "both"
    made = {name: len(trained(both / name)) for name in ("few", "many")}
    assert made["few"] < 6 and (both / "base").is_dir()
    (tmp_path / "few.py").write_text(FEW_DIGITS, encoding="utf-8")
    again = config.run.model_copy(update={"resume": True, "overwrite": False})
    train(config.model_copy(update={"run": again}))
    for name in made:
        lines = trained(both / name)
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
        found = audit(
            read_lines(both / name / "ledger.jsonl"),
            Rules(max_staleness=2, groups_per_step=2, reuse=1),
        )
        assert found.problems == () and found.steps >= 6


@pytest.mark.full
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "overrides",
    [
        (
            "mesh={trainer: {fsdp: 2, tensor: 2}, sampler: {tensor: 2}}",
            "algorithm.kl_coefficient=0.1",
        ),
        ("model.lora.base=nf4", "algorithm.advantage=gae"),
        ("mesh.samplers=2", "model.lora.base=int8", "mesh.trainer.fsdp=2"),
    ],
    ids=["meshes", "nf4", "two samplers"],
)
def test_they_are_twins_on_meshes_with_quantised_bases_and_several_samplers(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    base = saved(tmp_path / "base")
    config = several(tmp_path, *base, *overrides, "run.steps=2", "run.name=both")
    train(config)
    for name in ("few", "many"):
        train(alone(config, name, tmp_path / "alone"))
        assert_twins(tmp_path / "both" / name, tmp_path / "alone" / name, 2)


@pytest.mark.full
@pytest.mark.exhaustive
def test_a_sampler_that_dies_is_replaced_with_every_adapter_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor draws with the newest version of each: both runs end as they would have."""
    base = saved(tmp_path / "base")
    config = several(tmp_path, *base, "run.steps=3", "run.name=both", "faults.backoff_s=0.01")
    loads, real = [], Engine.load_adapter

    def dies_once(self: Engine, weights: Any, adapter: Any, slot: int) -> Any:
        loads.append(slot)
        if len(loads) == 6:  # 1 when it is made, 2 first ones: the third swap
            raise RuntimeError("the device is lost")
        return real(self, weights, adapter, slot)

    monkeypatch.setattr(Engine, "load_adapter", dies_once)
    train(config)
    monkeypatch.undo()
    for name in ("few", "many"):
        deaths = sum(line["faults/sampler_deaths"] for line in trained(tmp_path / "both" / name))
        assert deaths == 1
        train(alone(config, name, tmp_path / "alone"))
        assert_twins(tmp_path / "both" / name, tmp_path / "alone" / name, 3)
