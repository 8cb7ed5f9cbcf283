"""Alerts of a run: each rule on a run that shows it, and none on a healthy one."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_async.metrics.metric import metric_of
from jaxrl_async.metrics.symptoms import ALERT_RULES, DOCS, IN_A_ROW, SYMPTOMS
from jaxrl_async.view.queries import alerts, documentation, last_stretch, page_address
from jaxrl_async.view.watched import WatchedRun

ROOT = Path(__file__).parents[2]
HEALTHY = {
    "train/grad_norm": 0.3,
    "train/skipped": 0.0,
    "policy/entropy": 0.5,
    "policy/kl_reference": 0.01,
    "policy/k3_behavior": 0.001,
    "policy/clip_share": 0.05,
    "offpolicy/ess_share": 0.95,
    "rollout/truncated_share": 0.1,
    "reward/mean": 0.5,
    "reward/std": 0.4,
    "reward/zero_variance_share": 0.3,
    "mismatch/mean": 1e-5,
}
ILL = {
    "no gradient": {"train/grad_norm": 0.0},
    "collapsed entropy": {"policy/entropy": 1e-9},
    "truncated answers": {"rollout/truncated_share": 1.0},
    "equal rewards": {"reward/std": 0.0},
    "little signal": {"reward/zero_variance_share": 0.9},
    "far from the reference": {"policy/kl_reference": 0.5},
    "far from the sampler's policy": {"policy/k3_behavior": 0.1},
    "clipped ratios": {"policy/clip_share": 0.2},
    "data too old": {"offpolicy/ess_share": 0.5},
    "many truncated answers": {"rollout/truncated_share": 0.5},
    "mismatch": {"mismatch/mean": 0.01},
    "skipped update": {"train/skipped": 1.0},
}


def run_of(folder, updates):
    lines = [{"step": step, **values} for step, values in enumerate(updates, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return WatchedRun(folder, "run")


def titles(folder, updates):
    return [
        (a["title"], a["first"], a["last"], a["lasts"]) for a in alerts(run_of(folder, updates))
    ]


def test_each_rule_is_tried():
    assert set(ILL) == {rule.title for rule in ALERT_RULES} and set(SYMPTOMS) <= set(ILL)


@pytest.mark.full
@pytest.mark.parametrize("title", ILL)
def test_a_rule_is_shown_by_its_updates_alone(tmp_path, title):
    assert titles(tmp_path, [HEALTHY] * 40) == []
    ill = HEALTHY | ILL[title]
    rule = next(rule for rule in ALERT_RULES if rule.title == title)
    few = [HEALTHY] * 5 + [ill] * (rule.in_a_row - 1)
    assert titles(tmp_path, few) == []
    found = titles(tmp_path, [*few, ill])
    assert found == [(title, 6, 5 + rule.in_a_row, True)]
    assert titles(tmp_path, [*few, ill, HEALTHY]) == [(title, 6, 5 + rule.in_a_row, False)]
    (alert,) = alerts(run_of(tmp_path, [*few, ill]))
    count = "1 update " if rule.in_a_row == 1 else f"{rule.in_a_row} updates "
    assert alert["says"].startswith(count) and alert["keys"]
    assert set(alert["keys"]) <= set(HEALTHY)


def test_an_alert_that_a_stronger_one_explains_is_left_out(tmp_path):
    ill = HEALTHY | ILL["no gradient"] | ILL["equal rewards"] | ILL["little signal"]
    assert [t for t, *_ in titles(tmp_path, [ill] * 12)] == ["no gradient"]
    late = [HEALTHY | ILL["no gradient"]] * 12 + [HEALTHY | ILL["equal rewards"]] * 12
    assert titles(tmp_path, late) == [
        ("equal rewards", 13, 24, True),
        ("no gradient", 1, 12, False),
    ]


def test_what_is_no_update_counts_for_nothing(tmp_path):
    ill = HEALTHY | ILL["mismatch"]
    evaluation = {"eval/reward": 0.5, "mismatch/mean": 0.0}
    assert [a[1:] for a in titles(tmp_path, [ill] * 5 + [evaluation] + [ill] * 5)] == [
        (1, 11, True)
    ]


@given(st.lists(st.booleans(), max_size=50), st.integers(1, 6))
def test_the_last_stretch_is_that_of_a_regular_expression(shown, in_a_row):
    text = "".join("x" if one else "." for one in shown)
    found = [m for m in re.finditer("x+", text) if len(m[0]) >= in_a_row]
    wanted = (found[-1].start(), found[-1].end() - 1) if found else None
    assert last_stretch(shown, in_a_row) == wanted


def test_metrics_and_sections_of_the_rules_exist():
    text = (ROOT / DOCS).read_text("utf-8")
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
    for rule in ALERT_RULES:
        assert rule.section in anchors, rule.title
        assert rule.keys and all(metric_of(key) for key in rule.keys)
        assert rule.behind in ("", *ILL) and rule.in_a_row in (1, IN_A_ROW)
    assert documentation() == "" or documentation().startswith("https://")


@pytest.mark.parametrize(
    ("index", "address"),
    [
        ("", ""),
        ("https://h/o/r/blob/HEAD/docs/index.md", "https://h/o/r/blob/HEAD/docs/a.md#b-c"),
        ("https://h/o/r/tree/main/docs/", "https://h/o/r/tree/main/docs/a.md#b-c"),
        ("https://h/site/", "https://h/site/a/#b-c"),
        ("https://h/site", "https://h/site/a/#b-c"),
    ],
)
def test_a_section_has_its_address_in_a_repository_and_on_a_site(index, address):
    assert page_address(index, "docs/a.md#b-c") == address


@pytest.mark.full
def test_the_packages_own_documentation_leads_to_a_page_that_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    urls = project["urls"]
    for rule in ALERT_RULES:
        address = page_address(urls["Documentation"], f"{DOCS}#{rule.section}")
        assert address == f"{urls['Repository']}/blob/HEAD/{DOCS}#{rule.section}"
