"""metrics.jsonl and samples.jsonl: one line a step, continued after a resume, nothing lost."""

import json
import math
import threading

import numpy as np
import pytest

from jaxrl_async.errors import MissingExtraError
from jaxrl_async.metrics import recorder as recorder_module
from jaxrl_async.metrics.recorder import Recorder, encode, read_lines


def write_run(folder, steps, **options):
    recorder = Recorder(folder, tensorboard=False, **options)
    for step in steps:
        recorder.log(step, {"reward/mean": step / 10})
        recorder.samples(step, [{"prompt": f"p{step}", "completion": "c", "reward": 1.0}])
    recorder.close()


def test_one_sorted_line_per_step_with_the_step_first(tmp_path):
    recorder = Recorder(tmp_path, tensorboard=False)
    recorder.log(1, {"train/loss": 0.25, "reward/mean": np.float32(0.5)})
    recorder.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"step": 1, "reward/mean": 0.5, "train/loss": 0.25}\n'


def test_a_float_comes_back_bit_for_bit(tmp_path):
    value = 0.1 + 0.2
    recorder = Recorder(tmp_path, tensorboard=False)
    recorder.log(1, {"train/loss": value})
    recorder.close()
    assert read_lines(tmp_path / "metrics.jsonl")[0]["train/loss"] == value


def test_a_line_is_on_disk_before_the_next_step(tmp_path):
    recorder = Recorder(tmp_path, tensorboard=False)
    recorder.log(1, {"reward/mean": 0.5})
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 1
    recorder.close()


def test_what_is_not_finite_is_a_string_in_strict_json_and_a_number_again_when_read(tmp_path):
    recorder = Recorder(tmp_path, tensorboard=False)
    recorder.log(1, {"train/loss": math.nan, "train/grad_norm": math.inf})
    recorder.close()

    def refuse(word):
        raise AssertionError(word)

    raw = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert raw["train/loss"] == "nan" and raw["train/grad_norm"] == "inf"
    line = read_lines(tmp_path / "metrics.jsonl")[0]
    assert math.isnan(line["train/loss"]) and line["train/grad_norm"] == math.inf


def test_an_undeclared_key_is_refused_and_nothing_is_written(tmp_path):
    recorder = Recorder(tmp_path, tensorboard=False)
    with pytest.raises(AssertionError, match="made/up"):
        recorder.log(1, {"reward/mean": 1.0, "made/up": 1.0})
    recorder.close()
    assert read_lines(tmp_path / "metrics.jsonl") == []


def test_logging_a_step_again_merges_into_its_line(tmp_path):
    recorder = Recorder(tmp_path, tensorboard=False)
    recorder.log(1, {"reward/mean": 0.1})
    recorder.log(2, {"reward/mean": 0.2, "train/loss": 3.0})
    recorder.log(2, {"eval/accuracy": 0.9, "reward/mean": 0.25})
    recorder.log(3, {"reward/mean": 0.3})
    recorder.close()
    assert read_lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "reward/mean": 0.1},
        {"step": 2, "eval/accuracy": 0.9, "reward/mean": 0.25, "train/loss": 3.0},
        {"step": 3, "reward/mean": 0.3},
    ]


def test_a_resumed_run_moves_later_lines_aside_and_continues(tmp_path):
    write_run(tmp_path, [1, 2, 3, 4])
    write_run(tmp_path, [3, 4, 5], resume_step=2)
    for name in ("metrics", "samples"):
        assert [x["step"] for x in read_lines(tmp_path / f"{name}.jsonl")] == [1, 2, 3, 4, 5]
        assert [x["step"] for x in read_lines(tmp_path / f"{name}.superseded.jsonl")] == [3, 4]


def test_a_resumed_run_keeps_the_line_of_the_step_it_starts_from(tmp_path):
    write_run(tmp_path, [1, 2])
    recorder = Recorder(tmp_path, tensorboard=False, resume_step=2)
    recorder.log(2, {"eval/accuracy": 0.5})
    recorder.close()
    assert read_lines(tmp_path / "metrics.jsonl")[1] == {
        "step": 2,
        "eval/accuracy": 0.5,
        "reward/mean": 0.2,
    }


def test_a_second_resume_adds_to_the_lines_moved_before(tmp_path):
    write_run(tmp_path, [1, 2])
    write_run(tmp_path, [2], resume_step=1)
    write_run(tmp_path, [2], resume_step=1)
    assert [x["step"] for x in read_lines(tmp_path / "metrics.superseded.jsonl")] == [2, 2]


def test_a_line_torn_by_a_crash_is_moved_aside(tmp_path):
    write_run(tmp_path, [1])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rewa')
    write_run(tmp_path, [2], resume_step=1)
    assert [x["step"] for x in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert '{"step": 2, "rewa' in (tmp_path / "metrics.superseded.jsonl").read_text()


def test_samples_keep_text_in_any_script(tmp_path):
    recorder = Recorder(tmp_path, tensorboard=False)
    record = {"prompt": 'a "quote"\n', "completion": "три 三", "rewards": np.array([1, 0])}
    recorder.samples(4, [record])
    recorder.close()
    lines = read_lines(tmp_path / "samples.jsonl")
    assert lines == [{"step": 4, **record, "rewards": [1, 0]}]


def test_lines_from_several_threads_never_mix(tmp_path):
    recorder = Recorder(tmp_path, tensorboard=False)

    def write(name):
        for i in range(50):
            recorder.samples(i, [{"prompt": name * 500}])

    threads = [threading.Thread(target=write, args=(n,)) for n in "abc"]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    recorder.close()
    assert len(read_lines(tmp_path / "samples.jsonl")) == 150


def test_closing_twice_is_harmless(tmp_path):
    recorder = Recorder(tmp_path, tensorboard=False)
    recorder.close()
    recorder.close()


def test_encode_refuses_nothing_that_a_sample_may_hold():
    assert (
        encode({"a": (1, np.float32("nan")), "b": {"c": None}})
        == '{"a": [1, "nan"], "b": {"c": null}}'
    )


def test_a_missing_tensorboard_package_is_named_with_the_way_out(tmp_path, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(recorder_module.importlib, "import_module", missing)
    with pytest.raises(MissingExtraError, match=r"metrics\.tensorboard=false"):
        Recorder(tmp_path, tensorboard=True)


@pytest.mark.full
def test_tensorboard_gets_the_same_numbers(tmp_path):
    from tensorboardX.event_file_writer import EventsWriter  # noqa: F401  (the extra is installed)
    from tensorboardX.proto.event_pb2 import Event

    recorder = Recorder(tmp_path, tensorboard=True)
    recorder.log(1, {"reward/mean": 0.5})
    recorder.log(2, {"reward/mean": 0.75})
    recorder.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    found = {
        (e.step, v.tag): v.simple_value
        for e in (Event.FromString(r) for r in tf_records(file.read_bytes()))
        for v in e.summary.value
    }
    assert found == {(1, "reward/mean"): 0.5, (2, "reward/mean"): 0.75}


def tf_records(data):
    """TFRecord framing: length (8 bytes), its checksum (4), the payload, its checksum (4)."""
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        yield data[at + 12 : at + 12 + size]
        at += 16 + size
