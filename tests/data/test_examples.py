"""Examples: what the embedded task gives, splits of files, and a stream that can be resumed."""

import json

import numpy as np
import pytest

from jaxrl_async.config.schema import DataSection
from jaxrl_async.data.addition import Problem, addition_tokenizer, worked_answer, wrong_answer
from jaxrl_async.data.examples import ExampleStream, demonstrations, preferences
from jaxrl_async.errors import ConfigError, DataError

TOKENIZER = addition_tokenizer()
DATA = DataSection.model_validate({"addition": {"digits": 3, "eval_size": 20}})


def text(ids):
    return TOKENIZER.decode(ids)


def pairs(seed=0, data=DATA, row=64):
    return preferences(data, TOKENIZER, seed, row, halves=False)


def test_a_wrong_answer_has_one_digit_of_the_sum_wrong_with_or_without_work():
    random = np.random.default_rng(0)
    worked = 0
    for _ in range(300):
        problem = Problem(a=int(random.integers(1000)), b=int(random.integers(1000)))
        wrong = wrong_answer(problem, random)
        right = problem.a + problem.b
        told = int(wrong.rpartition("#")[2])
        different = [(right // 10**c - told // 10**c) % 10 != 0 for c in range(4)]
        assert told != right and abs(right - told) in [
            d * 10**c for d in range(10) for c in range(3)
        ]
        assert any(different)
        if "#" in wrong:
            worked += 1
            steps = zip(
                wrong.split(" "), worked_answer(problem.a, problem.b).split(" "), strict=True
            )
            assert sum(one != other for one, other in steps) == 2  # the slip, and the sum
    assert 100 < worked < 200


def test_pairs_are_a_function_of_seed_and_index_and_held_out_ones_of_neither():
    one, same, other = pairs(), pairs(), pairs(seed=1)
    at = [0, 5, 999_999]
    told = [[text(s.train[i].rejected_ids) for i in at] for s in (one, same, other)]
    assert told[0] == told[1] != told[2]
    held = [[text(p.rejected_ids) for p in s.held_out] for s in (one, other)]
    assert held[0] == held[1] and len(held[0]) == 20
    first = one.train[5]
    assert text(first.chosen_ids).rpartition("#")[2] == str(
        sum(map(int, text(first.prompt_ids).rstrip("=").split("+")))
    )


def test_demonstrations_are_worked_answers_with_what_is_trained():
    split = demonstrations(DATA, TOKENIZER, 0, 64)
    ids, mask = split.train[3]
    prompt, answer = text(ids[~mask]), text(ids[mask])
    a, b = map(int, prompt.rstrip("=").split("+"))
    assert answer == worked_answer(a, b) and ids[-1] == TOKENIZER.eos_ids[0]
    assert len(split.held_out) == 20


def test_a_task_that_does_not_fit_a_row_is_refused_at_the_start():
    longest = len("999+999=" + worked_answer(999, 999)) + 1
    demonstrations(DATA, TOKENIZER, 0, longest)
    for make in (lambda n: demonstrations(DATA, TOKENIZER, 0, n), lambda n: pairs(row=n)):
        with pytest.raises(ConfigError, match=f"up to {longest} tokens.*trainer.row_length"):
            make(longest - 1)


def test_a_stream_goes_on_where_it_was_and_shuffles_anew_in_each_pass():
    examples = list(range(10))
    whole = ExampleStream(examples, 3)
    first, second = whole.take(10), whole.take(10)
    assert sorted(first) == sorted(second) == examples and first != second
    parts = ExampleStream(examples, 3)
    parts.take(7)
    resumed = ExampleStream(examples, 3)
    resumed.restore(json.loads(json.dumps(parts.state())))
    assert resumed.take(13) == [*first[7:], *second]
    with pytest.raises(DataError, match="another stream of examples: seed 3 then, 4 now"):
        ExampleStream(examples, 4).restore(parts.state())


def test_files_are_split_and_long_prompts_are_counted(tmp_path):
    path = tmp_path / "p.jsonl"
    lines = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "0"} for i in range(6)]
    path.write_text("\n".join(map(json.dumps, [*lines, {**lines[0], "prompt": "1" * 20}])))
    section = {"path": str(path), "eval_size": 2, "max_bad_share": 0.2}
    data = DataSection.model_validate({"jsonl": section, "max_prompt_tokens": 10})
    split = pairs(data=data)
    assert [text(p.prompt_ids) for p in split.train] == ["0+1=", "1+1=", "2+1=", "3+1="]
    assert [text(p.prompt_ids) for p in split.held_out] == ["4+1=", "5+1="]
    own = data.model_copy(update={"jsonl": data.jsonl.model_copy(update={"eval_path": str(path)})})
    assert len(pairs(data=own).train) == 6 and len(pairs(data=own).held_out) == 2


def test_examples_that_do_not_fit_are_left_out_and_the_place_is_kept(caplog):
    examples = [None if i % 3 == 0 else i for i in range(10)]
    stream = ExampleStream(examples, seed=0)
    first, second = stream.take(6), stream.take(6)
    assert None not in first + second and set(first + second) == {1, 2, 4, 5, 7, 8}
    assert sorted(first) == [1, 2, 4, 5, 7, 8]
    assert "skipped" in caplog.text
    half = ExampleStream(examples, seed=0)
    half.take(4)
    rest = ExampleStream(examples, seed=0)
    rest.restore(half.state())
    assert rest.take(8) == [*first, *second][4:]
    with pytest.raises(DataError, match="5 examples in a row are longer"):
        ExampleStream([None] * 5, seed=0).take(1)
