"""The report: the page of runs as one file, from the run folder alone, that no sample can break."""

import json
import math
import re
from collections import Counter
from html.parser import HTMLParser

import pytest

from jaxrl_async.errors import DataError
from jaxrl_async.metrics.metric import metric_of
from jaxrl_async.metrics.recorder import Recorder
from jaxrl_async.view.queries import (
    age_mean,
    ages,
    charts_of_evaluations,
    dropped,
    evaluations,
    faults,
    tiles,
)
from jaxrl_async.view.report import ALL_POINTS, main, page, within, write_report
from jaxrl_async.view.sections import SECTIONS, WARM, WARM_CHARTS
from jaxrl_async.view.watched import WatchedRun

VOID = {"meta", "input"}
EVIL = ["</script><img src=x onerror=alert(1)>", "<!--<script>", '"><b>', "&amp;", "\u2028"]


class Balance(HTMLParser):
    """Checks that every element is closed, and keeps the elements and each script's text."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.scripts = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


def parse(text):
    parser = Balance()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


def data_of(path):
    """What the page reads."""
    return json.loads(parse(path.read_text("utf-8")).scripts[0])


def run_lines(steps=30):
    return [
        {
            "step": s,
            "reward/mean": s / steps,
            "reward/std": 0.4,
            "reward/format": 0.9,
            "rollout/length_mean": 20.0 + s,
            "sampler/idle_share": 0.1,
            "trainer/idle_share": 0.3,
            "staleness/tokens_lag_0": 300.0,
            "staleness/tokens_lag_1": 100.0,
            "staleness/lag_0_reward": 0.5,
            "staleness/lag_1_reward": s / steps,
            "staleness/lag_1_length": 12.0,
            "staleness/dropped_stale": 1.0,
            "staleness/dropped_share": 0.125,
            "staleness/wasted_tokens": 40.0,
            "throughput/generated_tokens_per_s": 2000.0 + s,
            "time/step_s": 1.5,
            **({"eval/accuracy": 0.3 + s / 100} if s % 10 == 0 else {}),
        }
        for s in range(1, steps + 1)
    ]


def recorded(root, lines=(), samples=()):
    """A run's folder, read once."""
    recorder = Recorder(root, tensorboard=False)
    for line in lines:
        recorder.log(line["step"], {k: v for k, v in line.items() if k != "step"})
    recorder.samples(30, list(samples))
    recorder.close()
    run = WatchedRun(root, "run")
    run.stamp()
    return run


def test_the_report_holds_curves_tiles_samples_metrics_and_config(tmp_path):
    sample = {"prompt": "12+9=", "completion": "21", "reward": 1.0, "reference": "21"}
    recorded(tmp_path, run_lines(), [sample])
    recorded(tmp_path / "warm_start", [{"step": 1, "train/loss": 2.0}])
    (tmp_path / "config.yaml").write_text("run: {name: demo}\n")
    (tmp_path / "policy").mkdir()
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html" and path.stat().st_size < 200_000
    data = data_of(path)
    answers = data["answers"]
    (listed,) = answers["/api/runs"]["runs"]
    assert (listed["name"], listed["state"]) == (tmp_path.name, "finished")
    assert data["curves"]["reward/std"] == [list(range(1, 31)), [0.4] * 30]
    assert data["curves"][f"{WARM}train/loss"] == [[1], [2.0]]
    assert data["samples"] == [{"step": 30, **sample}] and data["allSamples"] == 1
    assert "{name: demo}" in answers["/api/identity"]["config"]
    titles = [section["title"] for section in answers["/api/layout"]["sections"]]
    assert titles[0] == "Learning" and titles[-1] == "Warm start, by update"
    (reward,) = (row for row in answers["/api/extents"] if row["key"] == "reward/mean")
    assert reward["values"] == [pytest.approx(1 / 30), 1.0, pytest.approx(1 / 30), 1.0]
    assert reward["unit"] == metric_of("reward/mean").unit
    assert reward["about"] == metric_of("reward/mean").help
    named = {"ages", "alerts", "dropped", "evaluations", "faults", "lengths", "tiles"}
    assert named == set(answers["/api/summary"])
    assert data["numbers"] == [0]
    assert answers["/api/rows"][tmp_path.name]["newest"]["reward/mean"] == 1.0


def test_the_report_loads_nothing_and_runs_its_own_scripts_alone(tmp_path):
    recorded(tmp_path, run_lines())
    parser = parse(write_report(tmp_path).read_text("utf-8"))
    assert not [a for _, attrs in parser.tags for a in attrs if a in ("src", "href")]
    assert not {"link", "img", "iframe"} & {tag for tag, _ in parser.tags}
    (policy,) = (a["content"] for _, a in parser.tags if "http-equiv" in a)
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert len(parser.scripts) == 2 and not re.search(r"^(import|export) ", parser.scripts[1], re.M)


@pytest.mark.full
@pytest.mark.parametrize("evil", EVIL)
def test_no_text_of_a_run_becomes_markup(tmp_path, evil):
    sample = {"prompt": evil, "completion": evil, "reward": 1.0, evil: evil}
    recorded(tmp_path, run_lines(3), [sample])
    (tmp_path / "config.yaml").write_text(evil, "utf-8")
    path = write_report(tmp_path)
    plain = parse(path.read_text("utf-8"))
    assert len(plain.scripts) == 2 and "img" not in dict(plain.tags)
    data = json.loads(plain.scripts[0])
    assert data["samples"][0][evil] == evil == data["answers"]["/api/identity"]["config"]
    assert not set("<>&\u2028") & set(plain.scripts[0])


def test_an_empty_run_still_has_a_report(tmp_path):
    data = data_of(write_report(tmp_path))
    assert data["curves"] == {} and data["samples"] == []
    assert data["answers"]["/api/summary"]["tiles"] == [
        {"label": "steps", "value": "0", "note": ""}
    ]


def test_a_metric_that_was_never_finite_is_listed_and_has_no_curve(tmp_path):
    recorded(tmp_path, [{"step": 1, "reward/mean": math.nan, "reward/std": 1.0}])
    data = data_of(write_report(tmp_path))
    assert list(data["curves"]) == ["reward/std"]
    rows = {row["key"]: row["values"] for row in data["answers"]["/api/extents"]}
    assert rows == {"reward/mean": [], "reward/std": [1.0] * 4}


@pytest.mark.full
def test_the_report_of_a_long_run_is_bounded_and_says_what_it_leaves_out(
    tmp_path,
):
    keys = [key for _, charts in SECTIONS for c in charts for key, _ in c.curves]
    text = "".join(
        json.dumps({"step": s} | {k: math.sin(s * i) for i, k in enumerate(keys)}) + "\n"
        for s in range(2000)
    )
    (tmp_path / "metrics.jsonl").write_text(text)
    tokens = {"text": ["ab"] * 1024, "logprob": [-0.125] * 1024, "version": [3] * 1024}
    sample = {"prompt": "p" * 500, "completion": "c" * 2048, "reward": 1.0, "tokens": tokens}
    with (tmp_path / "samples.jsonl").open("w") as file:
        for step in range(400):
            file.write(json.dumps({"step": step, **sample}) + "\n")
    path = write_report(tmp_path)
    assert path.stat().st_size < 1_000_000
    data = data_of(path)
    assert data["thinned"] > 0 and sum(len(c[0]) for c in data["curves"].values()) <= ALL_POINTS
    assert data["allSamples"] == 400 and 40 < len(data["samples"]) < 400
    assert data["samples"][0]["step"] == 399, "the newest are kept"
    having = [i for i, s in enumerate(data["samples"]) if "tokens" in s]
    assert having == list(range(len(data["samples"]) - data["tokensLeftOut"])) and having


def test_a_sample_too_large_is_left_out_and_smaller_ones_are_not():
    samples = [{"prompt": "x" * 900}, {"prompt": "y", "tokens": [1] * 400}, {"prompt": "z"}]
    assert within(samples, 100, 500) == ([(1, {"prompt": "y"}), (2, {"prompt": "z"})], 1)
    assert within(samples, 2000, 4000) == (list(enumerate(samples)), 0)


def test_the_held_out_reward_is_on_top_where_there_is_no_accuracy(tmp_path):
    run = recorded(tmp_path, [{"step": s, "eval/reward": 0.5 - 0.25 * s} for s in (0, 3)])
    (tile,) = (t for t in tiles(run) if t["label"].startswith("held-out"))
    assert tile["label"] == "held-out reward" and tile["value"] == "-0.250"
    assert tile["note"] == "from 0.500 at step 0; best 0.500 at step 0"


def test_tiles_say_where_accuracy_began_and_medians_of_steps(tmp_path):
    run = recorded(tmp_path, run_lines())
    shown = {tile["label"]: (tile["value"], tile["note"]) for tile in tiles(run)}
    assert shown["held-out accuracy"] == ("0.600", "from 0.400 at step 10")
    assert shown["steps"] == ("30", "") and shown["time in steps"] == ("45 s", "")
    assert shown["sampler idle"] == ("10 %", "median of the steps")


def test_an_evaluation_of_which_all_answers_were_cut_off_has_an_accuracy_of_0(tmp_path):
    lines = [{"step": 0, "eval/reward": 1.0}, {"step": 2, "eval/accuracy": 0.5}]
    (tile,) = (t for t in tiles(recorded(tmp_path, lines)) if t["label"] == "held-out accuracy")
    assert (tile["value"], tile["note"]) == ("0.500", "from 0.000 at step 0")


def test_tokens_by_age_are_counted_and_means_weigh_each_step_by_its_tokens(tmp_path):
    lines = [
        {"step": 1, "staleness/tokens_lag_2": 10.0, "staleness/lag_2_reward": 1.0},
        {"step": 2, "staleness/tokens_lag_2": 30.0, "staleness/lag_2_reward": 0.0},
        {"step": 3, "staleness/tokens_lag_0": 30.0, "staleness/lag_0_reward": 7.0},
    ]
    run = recorded(tmp_path / "a", lines)
    assert age_mean(run, 2, "reward") == 0.25 and age_mean(run, 2, "length") is None
    first, second = ages(recorded(tmp_path / "b", run_lines()))
    assert first == {"age": 0, "tokens": 9000, "reward": 0.5, "length": None, "kl": None}
    assert second["tokens"] == 3000 and second["reward"] == pytest.approx(31 / 60)


def test_groups_dropped_are_counted_with_their_tokens_and_a_share_is_no_reason(tmp_path):
    lines = [{**line, "faults/late_calls": 2.0} for line in run_lines()]
    run = recorded(tmp_path, lines)
    assert dropped(run) == {"groups": {"stale": 30.0}, "tokens": 1200.0}
    assert faults(run) == {"late_calls": 60.0}


def test_every_charted_key_is_declared():
    charts = [c for _, charts in SECTIONS for c in charts] + list(WARM_CHARTS)
    for key in (key for chart in charts for key, _ in chart.curves):
        assert metric_of(key.removeprefix(WARM))


def test_the_command_says_where_the_report_is(tmp_path, capsys):
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")


def test_the_command_refuses_a_folder_that_is_not_there(tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 1
    assert "no such run folder" in capsys.readouterr().err
    assert main([]) == 2
    with pytest.raises(DataError):
        write_report(tmp_path / "none")


def test_no_two_modules_of_the_page_declare_one_name():
    """A report holds them all in one script, in which a second declaration ends everything."""
    script = parse(page({})).scripts[-1]
    begins = r"^(const|let|class|(?:async )?function\*?) ([^;{(]*)"
    names = [
        name
        for _, line in re.findall(begins, script, re.MULTILINE)
        for name in re.findall(r"(?:^|, )(\w+)(?= =|$)", line.strip())
    ]
    assert {"FONT", "BAR", "LANE_GAP", "shown"} <= set(names)
    assert not [name for name, times in Counter(names).items() if times > 1]


def test_an_evaluation_of_one_prompt_is_listed_without_an_interval(tmp_path):
    lines = [
        {"step": 0, "eval/reward": 0.5, "eval/length_mean": 4.0, "eval/m/accuracy": float("nan")},
        {"step": 2, "eval/reward": 1.0, "eval/length_mean": 5.0},
    ]
    (row,) = evaluations(recorded(tmp_path / "a", lines))
    assert (row["measure"], row["step"], row["value"], row["interval"]) == ("reward", 2, 1.0, None)
    assert row["history"] == [[0, 0.5, None], [2, 1.0, None]]


def test_evaluations_are_listed_with_intervals_and_drawn_by_name(tmp_path):
    lines = [
        {"step": 0, "eval/accuracy": 0.5, "eval/accuracy_stderr": 0.1, "eval/m/reward": 0.0},
        {
            "step": 4,
            "eval/accuracy": 0.75,
            "eval/accuracy_stderr": 0.05,
            "eval/m/reward": 1.0,
            "eval/m/reward_stderr": 0.25,
            "eval/m/reward_change": 1.0,
            "eval/m/reward_change_stderr": 0.5,
            "eval/m/pass_at_2": 0.5,
            "eval/m/length_mean": 7.0,
        },
    ]
    run = recorded(tmp_path / "a", lines)
    own, named = evaluations(run)
    assert (own["name"], own["measure"], own["step"], own["value"]) == ("eval", "accuracy", 4, 0.75)
    assert own["interval"] == pytest.approx([0.652, 0.848], abs=1e-4) and own["change"] is None
    (first, last) = own["history"]
    assert first[:2] == [0, 0.5] and last == [4, 0.75, own["interval"]]
    assert first[2] == pytest.approx([0.304, 0.696], abs=1e-4)
    assert (named["name"], named["measure"], named["change"]) == ("m", "reward", 1.0)
    assert named["interval"] == pytest.approx([0.51, 1.49], abs=1e-4)
    assert named["changeInterval"] == pytest.approx([0.02, 1.98], abs=1e-4)
    shares, reward = charts_of_evaluations(run.measured())
    assert shares.curves == (("eval/m/pass_at_2", "pass@2"),) and shares.title == "m"
    assert reward.curves == (("eval/m/reward", "mean"),)
    assert tiles(run)[1]["value"] == "0.750 ± 0.098"
