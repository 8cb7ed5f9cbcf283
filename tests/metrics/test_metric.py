"""The table of metrics: complete, documented, and honest about what depends on time."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_async.metrics.metric import (
    METRICS,
    Last,
    Max,
    Mean,
    Min,
    Sum,
    comparable,
    markdown,
    merge,
    metric_of,
)

ROOT = Path(__file__).parents[2]


def test_docs_page_is_what_the_table_says():
    assert (ROOT / "docs" / "metrics.md").read_text("utf-8") == markdown()


def test_the_page_has_every_key_and_of_a_standard_error_its_means():
    keys = {m.key.removesuffix("_stderr") for m in METRICS}
    rows = [line for line in markdown().splitlines() if line.startswith("| `")]
    assert sorted(row.split("`")[1] for row in rows) == sorted(keys)


def test_each_key_is_declared_once_with_unit_and_help():
    assert len({m.key for m in METRICS}) == len(METRICS)
    for m in METRICS:
        whole = re.sub("^task/<task>/(?=.*/)", "", m.key)  # another metric, of one task
        named = re.sub("/<(name|task)>/", "/", whole)  # a name from the configuration
        assert named.count("/") == 1 and m.unit and m.help.endswith(".")


def test_an_undeclared_key_is_refused_by_name():
    with pytest.raises(AssertionError, match="train/lose"):
        metric_of("train/lose")


def test_an_exact_key_wins_over_a_family():
    assert metric_of("reward/mean").key == "reward/mean"
    assert metric_of("reward/format_ok").key == "reward/<part>"
    assert metric_of("staleness/dropped_length_mean").kind is Mean
    assert metric_of("staleness/dropped_stale").kind is Sum
    assert metric_of("staleness/tokens_lag_12").kind is Sum


def test_a_family_matches_no_other_namespace():
    with pytest.raises(AssertionError):
        metric_of("reward/a/b")
    assert metric_of("reward/réponse").key == "reward/<part>"
    with pytest.raises(AssertionError):
        metric_of("xreward/a")


def test_a_merged_mean_weighs_by_count():
    parts = [{"reward/mean": Mean(6.0, 3)}, {"reward/mean": Mean(0.0, 1)}]
    assert merge(parts) == {"reward/mean": 1.5}


def test_each_reduction_merges_by_its_name():
    parts = [
        {"train/tokens": Sum(2), "policy/ratio_max": Max(2), "policy/ratio_min": Min(2)},
        {"train/tokens": Sum(5), "policy/ratio_max": Max(5), "policy/ratio_min": Min(5)},
    ]
    assert merge(parts) == {"train/tokens": 7, "policy/ratio_max": 5, "policy/ratio_min": 2}
    assert merge([{"train/grad_norm": Last(1.0)}, {"train/grad_norm": Last(0.5)}]) == {
        "train/grad_norm": 0.5
    }


def test_a_mean_of_nothing_is_not_a_number():
    assert math.isnan(Mean(0.0, 0.0).value)


def test_merging_the_wrong_kind_is_refused():
    with pytest.raises(AssertionError, match="reward/mean"):
        merge([{"reward/mean": Sum(1.0)}])


def test_comparable_keeps_learning_and_drops_what_wall_time_decides():
    line = {"step": 3, "reward/mean": 0.5, "time/step_s": 1.0, "sampler/idle_share": 0.2}
    assert comparable(line) == {"step": 3, "reward/mean": 0.5}


def test_every_key_of_seconds_rates_or_shares_of_time_is_timing():
    for m in METRICS:
        if m.unit in ("s", "tokens/s") or m.key.split("/")[0] in ("time", "throughput", "sampler"):
            assert m.timing, m.key


@pytest.mark.full
def test_metrics_import_without_jax():
    code = (
        "import sys\n"
        "from jaxrl_async.metrics import metric, recorder, console\n"
        "from jaxrl_async.view import report\n"
        "assert 'jax' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
