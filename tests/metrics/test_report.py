"""The report: one page, from the run folder alone, that no sample can break."""

import math
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.errors import DataError
from jaxrl_async.metrics.charts import (
    Chart,
    accuracy_points,
    chart_svg,
    histogram_svg,
    number,
    thinned,
    ticks,
)
from jaxrl_async.metrics.recorder import Recorder
from jaxrl_async.metrics.report import SECTIONS, lag_mean, lag_table, main, page, write_report

CHART = Chart("Reward", "reward", (("reward/mean", "mean"), ("reward/std", "std")))
VOID = {"meta", "br", "th", "tr", "td"}


class Balance(HTMLParser):
    """Checks that every element is closed, and collects the text."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.text.append(data)


def parse(text):
    parser = Balance()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


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


def test_the_page_holds_numbers_curves_histogram_samples_and_config(tmp_path):
    recorder = Recorder(tmp_path, tensorboard=False)
    for line in run_lines():
        recorder.log(line["step"], {k: v for k, v in line.items() if k != "step"})
    recorder.samples(
        30, [{"prompt": "12+9=", "completion": "21", "reward": 1.0, "reference": "21"}]
    )
    recorder.close()
    (tmp_path / "config.yaml").write_text("run: {name: demo}\n")
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    parser = parse(path.read_text("utf-8"))
    text = " ".join(parser.text)
    for word in (
        "held-out accuracy",
        "0.600",
        "Idle share",
        "12+9=",
        "reference: 21",
        "{name: demo}",
    ):
        assert word in text, word
    assert "lag 1: 25.0% of the tokens, 3,000" in text
    assert "step 30: mean 1 reward" in text
    assert "stale" in text


def test_the_held_out_reward_is_on_top_where_there_is_no_accuracy():
    lines = [{"step": s, "eval/reward": -0.25 * s, "reward/short": 1.0} for s in (0, 3)]
    text = " ".join(parse(page("demo", lines, [], "")).text)
    assert "held-out reward" in text and "-0.750" in text and "held-out accuracy" not in text


def test_the_page_loads_nothing_from_anywhere():
    parser = parse(page("demo", run_lines(), [], ""))
    assert not [a for _, attrs in parser.tags for a in attrs if a in ("src", "href")]
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in parser.tags}


@pytest.mark.parametrize(
    "evil", ["<script>alert(1)</script>", '"><b>', "</pre></td>", "&amp;", "<!--"]
)
def test_no_text_of_a_run_becomes_markup(evil):
    sample = {"step": 1, "prompt": evil, "completion": evil, "reward": evil, "note": evil}
    parser = parse(page(evil, run_lines(), [sample], evil))
    assert "script" not in {tag for tag, _ in parser.tags}
    assert "".join(parser.text).count(evil) >= 6


def test_an_empty_run_still_has_a_page(tmp_path):
    text = write_report(tmp_path).read_text("utf-8")
    assert "No step has been recorded yet" in text
    parse(text)


def test_values_that_are_not_finite_are_left_out_of_the_curves():
    lines = [{"step": 1, "reward/mean": math.nan}, {"step": 2, "reward/mean": 0.5}]
    svg = chart_svg(CHART, lines)
    assert "step 2: mean 0.5" in svg and "step 1:" not in svg and "nan" not in svg
    assert chart_svg(CHART, lines[:1]) == ""
    assert "never finite" in page("x", lines[:1], [], "")


@pytest.mark.parametrize(
    "values", [[0.0], [0.0, 0.0], [-3.0, 5.0], [1e-9, 2e-9], [1e12, 1e13], [7.0] * 3]
)
def test_every_curve_stays_inside_its_chart(values):
    svg = chart_svg(CHART, [{"step": i, "reward/mean": v} for i, v in enumerate(values)])
    figure = ElementTree.fromstring(svg)
    for circle in figure.iter("circle"):
        assert 54 <= float(circle.attrib["cx"]) <= 448 + 0.1
        assert 12 - 0.1 <= float(circle.attrib["cy"]) <= 190 + 0.1


def test_the_histogram_shows_each_lags_share_of_all_tokens():
    figure = ElementTree.fromstring(histogram_svg(run_lines()))
    heights = [float(r.attrib["height"]) for r in figure.iter("rect")]
    assert len(heights) == 2 and heights[0] == pytest.approx(3 * heights[1], rel=0.01)


def test_the_table_by_age_shows_tokens_shares_and_what_was_measured():
    text = " ".join(parse(lag_table(run_lines())).text)
    assert "9,000 75.0% 0.5" in text and "3,000 25.0% 0.5167 12" in text
    assert "kl" not in text and "reward length" in text
    assert lag_table([{"step": 1, "reward/mean": 1.0}]) == ""
    assert "by age" in page("x", run_lines(), [], "")


def test_means_by_age_weigh_each_step_by_its_tokens():
    lines = [
        {"step": 1, "staleness/tokens_lag_2": 10.0, "staleness/lag_2_reward": 1.0},
        {"step": 2, "staleness/tokens_lag_2": 30.0, "staleness/lag_2_reward": 0.0},
        {"step": 3, "staleness/tokens_lag_0": 30.0, "staleness/lag_0_reward": 7.0},
    ]
    assert lag_mean(lines, 2, "reward") == 0.25
    assert lag_mean(lines, 2, "length") is None


def test_groups_dropped_are_counted_with_their_tokens_and_a_share_is_no_reason():
    text = " ".join(parse(page("x", run_lines(), [], "")).text)
    assert "Those of which something was drawn had 1,200 tokens." in text
    table = text[text.index("Those of which") :]
    assert "stale 30" in table and "share 4" not in table


def test_long_runs_are_thinned_with_both_ends_kept():
    points = [(i, float(i)) for i in range(10_000)]
    kept = thinned(points, 300)
    assert len(kept) == 300 and kept[0] == points[0] and kept[-1] == points[-1]
    assert thinned(points[:5], 300) == points[:5]


@given(
    st.floats(-1e6, 1e6).filter(lambda v: v == 0 or abs(v) > 1e-6),
    st.floats(1e-4, 1e6),
)
def test_ticks_enclose_the_range_evenly_and_are_few(low, size):
    found = ticks(low, low + size)
    assert found[0] <= low + 1e-6 * size + 1e-9 * abs(low)
    assert found[-1] >= low + size - 1e-6 * size - 1e-9 * abs(low)
    assert 2 <= len(found) <= 8


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (12345.6, "12,346"),
        (1e-7, "1e-07"),
        (math.nan, "nan"),
        (999.96, "1000"),
    ],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_every_charted_key_is_declared():
    lines = [
        {"step": 1, **{key: 1.0 for _, charts in SECTIONS for c in charts for key, _ in c.curves}}
    ]
    assert page("x", lines, [], "").count("<figure>") == sum(len(c) for _, c in SECTIONS)


def test_the_command_says_where_the_report_is(tmp_path, capsys):
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")


def test_the_command_refuses_a_folder_that_is_not_there(tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 1
    assert "no such run folder" in capsys.readouterr().err
    assert main([]) == 2
    with pytest.raises(DataError):
        write_report(tmp_path / "none")


def test_an_evaluation_in_which_all_answers_were_cut_off_counts_in_the_curve_of_accuracy():
    lines = [{"step": 0, "eval/reward": 1.0}, {"step": 1}, {"step": 2, "eval/accuracy": 0.5}]
    assert accuracy_points(lines) == [(0, 0.0), (2, 0.5)]
    assert accuracy_points(lines[:2]) == []
