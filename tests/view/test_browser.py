"""The page in a real browser: Debian's Chromium, driven by Playwright."""

import importlib
import json
import math
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from jaxrl_async.metrics.trace_file import RecordedSpan, SpanRecorder, TraceFile
from jaxrl_async.view.__main__ import made_server
from jaxrl_async.view.report import write_report

pytestmark = [pytest.mark.full, pytest.mark.exhaustive]
TABS = ("table", "curves", "samples", "busy", "evals", "ages", "metrics", "identity", "log")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def write_run(root: Path, seed: int, steps: int, name: str = "metrics.jsonl") -> None:
    root.mkdir(parents=True, exist_ok=True)
    with (root / name).open("w") as file:
        for step in range(steps):
            wave = math.sin(step * (seed + 1.7)) * 0.03
            line = {"reward/mean": 0.95 - 0.5 * math.exp(-step / 25) + wave, "train/loss": wave}
            line |= {"staleness/tokens_lag_0": 40.0, "staleness/tokens_lag_1": 88.0}
            line |= {"rollout/lengths_to_16": 3.0, "rollout/lengths_to_8": 5.0}
            line |= {"sampler/idle_share": 0.1 + abs(wave), "trainer/idle_share": 0.2 - wave}
            line |= {"train/tokens": 100.0 * (seed + 1), "time/elapsed_s": 60.0 * (step + 1)}
            file.write(json.dumps({"step": step, **line}) + "\n")
    with (root / "samples.jsonl").open("w") as file:
        for step in range(0, steps, 10):
            for member in range(2):
                tokens = list("7+5=12 #132")
                logprob = [-(i * 7 % 5) / 2 for i in range(len(tokens))]
                sample = {
                    "step": step, "group": step, "prompt": "47+85=", "reward": float(member),
                    "completion": "<img src=x onerror=document.title='hit'>", "stop": "eos",
                    "tokens": {"text": tokens, "logprob": logprob, "left_out": 0,
                               "version": [step] * 5 + [step + 1] * 6,
                               "advantage": [-1.5] * 5 + [0.0] * 3 + [1.5] * 3,
                               "difference": [1e-6] * 10 + [-0.2]},
                }  # fmt: skip
                if member:
                    del sample["tokens"]
                file.write(json.dumps(sample) + "\n")


def write_spans(root: Path, steps: int) -> None:
    """A trainer's thread, the answers' scorer beside it, and a sampler in a process of its own."""
    trainer, sampler = SpanRecorder(), SpanRecorder()
    for step in range(steps):
        for name, begin, end in (
            ("step", 0.0, 1.0), ("wait for groups", 0.0, 0.25), ("learn", 0.25, 0.9),
        ):  # fmt: skip
            args = {"version": step + 1}
            trainer.add(RecordedSpan(name, step + begin, step + end, "", args))
        for late in (0.0, 0.05):
            trainer.add(RecordedSpan("score", step + late, step + late + 0.1, "scorer", {}))
        for block in range(10):
            start = step + block / 10
            sampler.add(RecordedSpan("block", start, start + 0.09, "", {}))
    for name, recorder in (("trainer", trainer), ("sampler", sampler)):
        for thread in recorder._threads:
            thread.name = name
    (root / "samplers").mkdir()
    TraceFile(root / "trace.json", "trainer 0").add(trainer.take())
    TraceFile(root / "samplers" / "0.trace.json", "sampler 0").add(sampler.take())


def write_facts(root: Path, seed: int) -> None:
    """Write what a run says of itself: configuration, start and log."""
    rate, loss = ("1.0e-4", "ppo_clip") if seed < 2 else ("3.0e-4", "dapo")
    (root / "config.yaml").write_text(
        f"run:\n  name: {root.name}\n  steps: 120\nalgorithm:\n  learning_rate: {rate}\n"
        f"  loss: {loss}\n  seed: {seed}\nmetrics:\n  tags:\n  - sweep\n  - {loss}\n"
    )
    start = {"started": 1_700_000_000 + 60 * seed, "host": f"host-{seed}", "command": "jaxrl <b>"}
    (root / "starts.jsonl").write_text(json.dumps(start) + "\n")
    lines = [f"2026-01-01 00:00:{n:02}Z INFO    step {n}" for n in range(60)]
    lines[7] = "2026-01-01 00:00:07Z WARNING <img src=x onerror=document.title='hit'>"
    (root / "run.log").write_text("\n".join(lines) + "\n")


def lines_of(shown, chart: int = 0):
    """Return what a chart draws: the label, the first and last x, and the color of each line."""
    script = """(n) => document.querySelectorAll(".chart")[n].card.plot.spec.lines
        .map((l) => [l.label, l.xs[0], l.xs.at(-1), l.color])"""
    return shown.evaluate(script, chart)


ENDS = "document.querySelector('.chart').card.plot.spec.lines.map((l) => l.xs.at(-1))"
"""The last x of each line of the first chart."""


def wait_for_lines(shown, count: int, chart: int = 0) -> None:
    """Wait until a chart draws so many lines."""
    shown.wait_for_function(
        "([n, k]) => document.querySelectorAll('.chart')[n]?.card.plot.spec?.lines.length === k",
        arg=[chart, count],
        timeout=30_000,
    )


@pytest.fixture
def page(tmp_path, request):
    """A browser's page, and the folder whose runs it shows."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if CHROMIUM is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    for name, seed in (("grpo-0", 0), ("grpo-1", 1), ("dapo", 2)):
        write_run(tmp_path / name, seed, 120)
        write_facts(tmp_path / name, seed)
    write_spans(tmp_path / "grpo-0", 40)
    wrong: list[str] = []
    with made_server([tmp_path], "127.0.0.1", 0) as server, playwright.sync_playwright() as play:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        options = {"viewport": {"width": 1280, "height": 760}} | getattr(request, "param", {})
        context = browser.new_context(**options)
        shown = context.new_page()
        shown.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
        shown.on("pageerror", lambda error: wrong.append(str(error)))
        shown.goto(server.address)
        yield shown, tmp_path
        browser.close()
        server.shutdown()
        thread.join()
    assert wrong == []


def test_a_view_whose_answer_failed_is_fetched_again(page):
    shown, _ = page
    wait_for_lines(shown, 3)
    context, address = shown.context, shown.url
    other = context.new_page()
    failed = []
    other.route("**/api/curves*", lambda route: route.abort() if not failed else route.fallback())
    other.on("requestfailed", lambda request: failed.append(request.url))
    other.goto(address)
    wait_for_lines(other, 3)  # no file has changed since
    assert failed


def test_curves_are_drawn_followed_and_compared(page):
    shown, root = page
    shown.wait_for_selector(".chart canvas")
    sees(shown.locator("#runs li")).to_have_count(3)
    sees(shown.locator(".chart").nth(2)).to_be_attached()
    wait_for_lines(shown, 3)
    assert {label for label, *_ in lines_of(shown)} == {"dapo", "grpo-0", "grpo-1"}
    assert len({color for *_, color in lines_of(shown)}) == 3
    shown.select_option("#group", "seed")
    wait_for_lines(shown, 2)
    assert {label for label, *_ in lines_of(shown)} == {"dapo", "grpo (2 runs)"}
    shown.fill("#search", "idle trainer")
    sees(shown.locator(".chart")).to_have_count(1)
    shown.fill("#search", "")
    with (root / "dapo" / "metrics.jsonl").open("a") as file:  # the run goes on
        file.write(json.dumps({"step": 120, "entropy_is_new": 1.0, "policy/entropy": 0.5}) + "\n")
    sees(shown.locator("#curves")).to_contain_text("Entropy", timeout=20_000)


def test_a_drag_looks_closer_at_all_charts_and_a_double_click_goes_back(page):
    shown, _ = page
    wait_for_lines(shown, 3)
    box = shown.locator(".stage .over").first.bounding_box()
    requested: list[str] = []
    shown.on("request", lambda r: requested.append(r.url) if "/api/curves" in r.url else None)
    shown.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 40)
    shown.mouse.down()
    shown.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 40, steps=5)
    shown.mouse.up()
    shown.wait_for_timeout(500)
    (closer,) = [url for url in requested if "first=" in url]
    assert closer.count("run=") == 3, "one question for all runs"
    first = int(closer.partition("first=")[2].partition("&")[0])
    assert 10 <= first <= 40 and "from=" in shown.url
    requested.clear()
    shown.locator(".stage .over").first.dblclick()
    shown.wait_for_timeout(500)
    assert "from=" not in shown.url and all("first=" not in url for url in requested)


def test_the_x_axis_is_steps_tokens_or_time(page):
    shown, _ = page
    wait_for_lines(shown, 3)
    spec = "() => document.querySelector('.chart').card.plot.spec"
    shown.select_option("#axis", "tokens")
    shown.wait_for_function(f"{spec}.axis === 'tokens'")
    ends = {label: (x, y) for label, x, y, _ in lines_of(shown)}
    assert ends == {"grpo-0": (100, 12_000), "grpo-1": (200, 24_000), "dapo": (300, 36_000)}
    shown.select_option("#axis", "time")
    shown.wait_for_function(f"{spec}.axis === 'time'")
    assert {(x, y) for _, x, y, _ in lines_of(shown)} == {(60, 7200)}
    shown.evaluate("location.hash = '#curves?x=tokens&from=6000&to=12000'")
    shown.wait_for_function(f"{spec}.range !== null")
    for label, first, last, _ in lines_of(shown):
        step = {"grpo-0": 100, "grpo-1": 200, "dapo": 300}[label]
        assert 6000 - 2 * step <= first <= 6000 + step and 12_000 - step <= last, label


def test_the_pointer_names_the_nearest_run_on_all_charts(page):
    shown, _ = page
    wait_for_lines(shown, 3)
    box = shown.locator(".stage .over").first.bounding_box()
    shown.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 40)
    tip = shown.locator(".tip.pointed")
    sees(tip).to_contain_text("step")
    assert tip.locator(".row").count() == 3
    shown.hover("#runs li >> nth=0")
    sees(tip).to_be_hidden()


def test_the_pointer_names_no_run_that_ended_before_it(page):
    shown, root = page
    write_run(root / "dapo", 2, 40)
    wait_for_lines(shown, 3)
    shown.wait_for_function(f"() => ({ENDS}).sort().join() === '119,119,39'")
    box = shown.locator(".stage .over").first.bounding_box()
    shown.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 40)
    sees(shown.locator(".tip.pointed .name")).to_have_count(2)
    sees(shown.locator(".tip.pointed")).not_to_contain_text("dapo")


def test_runs_are_filtered_sorted_grouped_and_the_address_keeps_it(page):
    shown, _ = page
    shown.click("[data-tab=table]")
    names = shown.locator("#table td.name")
    sees(names).to_have_text(["dapo", "grpo-1", "grpo-0"])  # the newest first
    sees(shown.locator("#table th")).to_contain_text(["", "name", "state", "tags"])
    sees(shown.locator("#table")).to_contain_text("learning_rate")
    shown.get_by_role("button", name="learning_rate").click()
    sees(names).to_have_text(["dapo", "grpo-0", "grpo-1"])
    shown.fill("#filter", "learning_rate<2e-4 sweep")
    sees(names).to_have_text(["grpo-0", "grpo-1"])
    sees(shown.locator("#count")).to_have_text("2 of 2 drawn; 1 filtered out")
    shown.select_option("#group", "algorithm.loss")
    sees(shown.locator("#table .grouped")).to_contain_text("loss ppo_clip (2)")
    shown.uncheck("#table tr[data-run=grpo-1] input")
    shown.click("summary:has-text('Columns')")
    shown.check(".choices label:has-text('sampler/idle_share') input")
    sees(shown.locator("#table th").last).to_contain_text("sampler/idle_share")
    address, table = shown.url, shown.locator("#table table").inner_text()
    other = shown.context.new_page()
    other.goto(address)
    sees(other.locator("#table table")).to_have_text(re.compile("grpo-1"))
    other.wait_for_function("(text) => document.querySelector('#table table').innerText === text",
                            arg=table, timeout=30_000)  # fmt: skip
    other.click("[data-tab=curves]")
    wait_for_lines(other, 1)
    assert other.input_value("#filter") == "learning_rate<2e-4 sweep"
    other.fill("#filter", "state=finished")
    sees(other.locator("#count")).to_have_text("0 of 0 drawn; 3 filtered out")
    sees(other.locator("#curves")).to_contain_text("No run is chosen")
    other.close()


def test_a_run_that_begins_later_appears_and_keeps_the_others_colors(page):
    shown, root = page
    wait_for_lines(shown, 3)
    before = {label: color for label, _, _, color in lines_of(shown)}
    write_run(root / "alpha", 5, 30)
    (root / "alpha" / "starts.jsonl").write_text('{"started": 1800000000}\n')
    wait_for_lines(shown, 4)
    after = {label: color for label, _, _, color in lines_of(shown)}
    assert before.items() < after.items() and len(set(after.values())) == 4
    sees(shown.locator("#runs li").first).to_contain_text("alpha")


@pytest.mark.parametrize("index", ["", "https://host/owner/name/blob/HEAD/docs/index.md"])
def test_alerts_say_what_is_wrong_and_lead_to_the_charts(page, index, monkeypatch):
    monkeypatch.setattr("jaxrl_async.view.queries.documentation", lambda: index)
    shown, root = page
    with (root / "dapo" / "metrics.jsonl").open("a") as file:
        for step in range(120, 140):
            ill = {"train/grad_norm": 0.0, "reward/zero_variance_share": 1.0}
            file.write(json.dumps({"step": step, "reward/mean": 0.1, **ill}) + "\n")
    alerts = shown.locator(".alerts")
    sees(alerts.locator("summary")).to_have_text("1 alert: no gradient", timeout=60_000)
    alerts.locator("summary").click()
    sees(alerts).to_contain_text("dapo: no gradient (steps 120 to 139)")
    page_of_help = "docs/troubleshooting.md#no-gradient"
    if index:
        link = alerts.get_by_role("link", name="help")
        sees(link).to_have_attribute("href", f"https://host/owner/name/blob/HEAD/{page_of_help}")
    else:
        sees(alerts).to_contain_text(page_of_help)
    alerts.get_by_role("link", name="charts").click()
    sees(shown.locator(".chart")).to_have_count(2)
    sees(shown.locator("#count")).to_contain_text("1 of 3 drawn")
    shown.click("[data-tab=table]")
    sees(shown.locator("tr[data-run=dapo] td.warn")).to_have_text("1")


def test_the_log_follows_its_run_and_is_searched(page):
    shown, root = page
    shown.click("[data-tab=log]")
    log = shown.locator("pre.log")
    sees(log).to_contain_text("step 59")
    sees(log.locator(".warning")).to_contain_text("onerror")
    with (root / "dapo" / "run.log").open("a") as file:
        file.write("2026-01-01 00:02:00Z ERROR   ended by OSError\n")
    sees(log.locator(".error")).to_contain_text("OSError")
    shown.fill("#lines input", "WARNING")
    sees(log.locator("span")).to_have_count(1)
    shown.reload()
    sees(shown.locator("pre.log span")).to_have_count(1)
    assert shown.title() != "hit" and shown.locator("img").count() == 0


def test_configurations_are_compared_and_say_how_a_run_was_started(page):
    shown, _ = page
    shown.click("[data-tab=identity]")
    place = shown.locator("#identity")
    sees(place).to_contain_text("Settings that differ")
    row = place.locator("tr", has_text="algorithm.learning_rate").locator("td").all_inner_texts()
    assert sorted(row[1:]) == ["0.0001", "0.0001", "0.0003"]
    sees(place).to_contain_text("1 setting is equal")
    sees(place).to_contain_text("jaxrl <b>")
    sees(place).to_contain_text("host-2")


def test_values_and_pictures_of_a_chart_are_saved(page, tmp_path):
    shown, _ = page
    wait_for_lines(shown, 3)
    chart = shown.locator(".chart").first
    with shown.expect_download() as saved:
        chart.get_by_role("button", name="CSV").click()
    lines = saved.value.path().read_text().splitlines()
    assert lines[0] == "run,step,tokens,time,reward/mean" and len(lines) == 1 + 3 * 120
    with shown.expect_download() as saved:
        chart.get_by_role("button", name="PNG").click()
    data = saved.value.path().read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 3000
    assert saved.value.suggested_filename == "Reward.png"
    shown.click("[data-tab=table]")
    sees(shown.locator("#table td.name")).to_have_count(3)
    with shown.expect_download() as saved:
        shown.locator("#table").get_by_role("button", name="CSV").click()
    table = saved.value.path().read_text().splitlines()
    assert table[0].startswith("run,state,tags,started") and len(table) == 4
    chart = shown.evaluate(
        "(async () => (await import('/elements.js')).csvOf([['=1', 2, 'a,b']]))()"
    )
    assert chart == '\'=1,2,"a,b"\n'


def test_samples_are_sorted_paged_and_linked(page):
    shown, _ = page
    shown.goto(shown.url.partition("#")[0] + "#samples?run=grpo-0")
    sees(shown.locator("#samples")).to_contain_text("24 samples")
    sees(shown.locator("#samples")).to_contain_text("page 1 of 2")
    shown.get_by_role("button", name="next").click()
    sees(shown.locator(".sample")).to_have_count(4)
    shown.select_option("[name=order]", "reward")
    sees(shown.locator(".sample .reward").first).to_have_text("reward 1")
    shown.select_option("[name=order]", "advantage")
    sees(shown.locator(".sample").first).to_contain_text("step 110")
    shown.locator(".sample .facts a").first.click()
    sees(shown.locator("#samples > .hint")).to_have_text("1 sample")
    number = shown.input_value("[name=sample]")
    shown.reload()
    sees(shown.locator("#samples > .hint")).to_have_text("1 sample")
    assert shown.locator(".sample .facts a").inner_text() == f"#{number}"


def test_a_damaged_sample_hides_no_other(page):
    shown, root = page
    damaged = {"step": 121, "tokens": {"text": ["a"], "logprob": ["b"], "version": None}}
    with (root / "grpo-0" / "samples.jsonl").open("a") as file:
        file.write(json.dumps(damaged) + "\n")
    shown.goto(shown.url.partition("#")[0] + "#samples?run=grpo-0")
    sees(shown.locator("#samples")).to_contain_text("25 samples")
    sees(shown.locator(".sample").first).to_contain_text("is damaged")
    sees(shown.locator(".sample")).to_have_count(20)


def in_page(shown, module: str, name: str, *given):
    """Return what a function of one of the page's scripts returns."""
    script = "async ([m, n, given]) => (await import(`/${m}.js`))[n](...given)"
    return shown.evaluate(script, [module, name, list(given)])


def test_formulas_of_charts_agree_with_numpy(page):
    shown, _ = page
    random = np.random.default_rng(3)
    values = random.normal(size=40)
    weights = 0.9 ** np.arange(40)[::-1]
    wanted = [np.average(values[: n + 1], weights=weights[-n - 1 :]) for n in range(40)]
    assert in_page(shown, "charts", "smoothed", values.tolist(), 0.9) == pytest.approx(wanted)
    steps = np.unique(random.integers(0, 500, 40))
    totals = np.cumsum(random.uniform(1, 9, len(steps)))
    for step in (-3, 0, 77, 250.5, 499, 900):
        got = in_page(shown, "charts", "onAxis", [steps.tolist(), totals.tolist()], step)
        assert got == pytest.approx(np.interp(step, steps, totals))
    for value in (-1.0, *totals[:3], 50.5, 1e9):
        got = in_page(shown, "plot", "placeOf", totals.tolist(), value)
        assert got == np.searchsorted(totals, value)
        near = in_page(shown, "plot", "nearestOf", totals.tolist(), value)
        assert near == int(np.abs(totals - value).argmin())
    curves = []
    for _ in range(3):
        own = np.unique(random.integers(0, 60, 12))
        curves.append((own, random.normal(size=len(own))))
    band = in_page(shown, "charts", "banded", [[s.tolist(), v.tolist()] for s, v in curves])
    union = np.unique(np.concatenate([own for own, _ in curves]))
    assert band["steps"] == union.tolist()
    for place, step in enumerate(union):
        at = [np.interp(step, s, v) for s, v in curves if s[0] <= step <= s[-1]]
        got = [band[name][place] for name in ("mean", "least", "largest")]
        assert got == pytest.approx([np.mean(at), min(at), max(at)])
    times = [1.0] * 9 + [1.5] * 9 + [2.0] * 9 + [600.0]  # the last one compiles
    low, high = in_page(shown, "plot", "rangeOf", times, {"zero": True, "cut": True})
    assert low == 0 and 2.0 + 3 * 1.0 <= high < 6
    assert in_page(shown, "plot", "rangeOf", times, {"zero": True})[1] > 600
    low, high = in_page(shown, "plot", "rangeOf", [-1.0, 0.0, 0.01, 100.0], {"log": True})
    assert 0 < low < 0.01 and high > 100
    assert in_page(shown, "plot", "rangeOf", [2.0, 2.0], {}) == pytest.approx([1.8, 2.2])
    ends = in_page(shown, "charts", "stepsWithin", [[1, 5, 9, 20], [10, 50, 90, 200]], [55, 85])
    assert ends == [5, 20], "one point on each side"
    durations = {0.5: "0.5 s", 59: "59 s", 60: "1 min", 3700: "1 h 1 min", 90_000: "1 d 1 h"}
    for seconds, text in durations.items():
        assert in_page(shown, "numbers", "durationOf", seconds) == text


FILTERS = {
    "": "abc",
    "A": "a",
    "loss=x": "ab",
    "loss!=x": "c",
    "rate>=0.002": "bc",
    "rate<2e-3": "a",
    "reward/mean>0.5 b": "b",
    "rate=0.0020": "b",
    "nothing=1": "",
    "alerts=0": "abc",
}


def test_a_filter_selects_by_words_and_conditions(page):
    shown, _ = page
    script = """async (filter) => {
      const { model, filtered } = await import("/run_model.js");
      const names = ["algorithm.loss", "algorithm.rate"];
      const values = { a: ["x", "0.001"], b: ["x", "0.002"], c: [null, "0.01"] };
      const rows = {}, rewards = { a: 0.1, b: 0.6, c: 0.9 };
      for (const name in values) {
        rows[name] = { alerts: [], newest: { "reward/mean": rewards[name] } };
      }
      Object.assign(model, { settings: { names, values }, rows });
      const runs = Object.keys(values).map((name) => ({ name, state: "done", tags: [], host: "" }));
      return filtered(runs, filter).map((run) => run.name).join("");
    }"""
    found = {filter: shown.evaluate(script, filter) for filter in FILTERS}
    assert found == FILTERS


def test_a_page_opened_before_the_first_run_shows_it_when_it_begins(tmp_path):
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if CHROMIUM is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    with made_server([tmp_path], "127.0.0.1", 0) as server, playwright.sync_playwright() as play:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        shown = browser.new_page()
        shown.goto(server.address)
        sees(shown.locator("#curves")).to_contain_text("No run has begun in")
        write_run(tmp_path / "first" / "warm_start", 0, 5)
        (tmp_path / "first" / "config.yaml").write_text("run: {name: first}\n")
        sees(shown.locator("#curves")).to_contain_text("Warm start, by update")
        write_run(tmp_path / "first", 0, 5)
        sees(shown.locator(".chart h3").first).to_contain_text("Reward")
        assert shown.title() == "first"
        browser.close()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("page", [{"color_scheme": "dark"}], indirect=True)
def test_samples_are_filtered_and_what_a_policy_wrote_stays_text(page):
    shown, _ = page
    shown.click("[data-tab=samples]")
    shown.wait_for_selector(".sample")
    shown.select_option("[name=run]", "grpo-0")
    sees(shown.locator("#samples")).to_contain_text("24 samples")
    assert shown.locator(".group").first.locator(".sample").count() == 2, "side by side"
    assert shown.locator(".token").first.get_attribute("title").startswith("log-prob")
    shown.fill("[name=least]", "1")
    shown.fill("[name=last]", "30")
    sees(shown.locator("#samples > .hint")).to_have_text("4 samples")
    assert "onerror" in shown.locator(".completion").first.inner_text()
    assert shown.title() != "hit", "no text of a sample is run"


@pytest.mark.parametrize("page", [{"viewport": {"width": 390, "height": 800}}], indirect=True)
def test_on_a_phone_nothing_is_wider_than_the_screen(page):
    shown, _ = page
    shown.wait_for_selector(".chart canvas")
    for tab in TABS:
        shown.click(f"[data-tab={tab}]")
        shown.wait_for_timeout(300)
        assert shown.evaluate("document.documentElement.scrollWidth") <= 390, tab
    shown.click("[data-tab=ages]")
    shown.wait_for_selector(".bar meter")


PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
SMALL = """() => [...document.querySelectorAll("button, input, select, summary, a")]
  .filter((one) => {
    const { width, height } =
      (one.closest("label:has([type=checkbox])") ?? one).getBoundingClientRect();
    return one.checkVisibility() && one.type !== "range" && width && Math.min(width, height) < 20;
  }).map((one) => one.outerHTML.slice(0, 80))"""
"""The controls that a finger misses."""
TAB_SHOWN = """() => {
  const box = document.querySelector("#tabs [aria-current]").getBoundingClientRect();
  return box.left >= 0 && box.right <= innerWidth;
}"""


@pytest.mark.parametrize("page", [PHONE], indirect=True)
def test_on_a_phone_many_runs_fit_and_every_control_can_be_hit(page):
    shown, root = page
    for number in range(53):
        shutil.copytree(root / f"grpo-{number % 2}", root / f"sweep-of-rates-and-seeds-{number}")
    shown.reload()
    sees(shown.locator("#count")).to_contain_text("10 of 56 drawn")
    sees(shown.locator("#runs")).not_to_be_visible()  # folded: the view comes first
    for tab in TABS:
        shown.click(f"[data-tab={tab}]")
        shown.wait_for_selector(f"#{'lines' if tab == 'log' else tab} > *")
        shown.wait_for_timeout(300)
        assert shown.evaluate("document.documentElement.scrollWidth") <= 390, tab
        assert shown.evaluate(SMALL) == [], tab
        assert shown.evaluate(TAB_SHOWN), tab
    shown.click("#which summary")
    sees(shown.locator("#runs")).to_be_visible()
    assert shown.evaluate(SMALL) == []


FAINT = """() => {
  const context = Object.assign(document.createElement("canvas"), { width: 1, height: 1 })
    .getContext("2d", { willReadFrequently: true });
  const paint = (color) => { context.fillStyle = color; context.fillRect(0, 0, 1, 1); };
  const light = () => {
    const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map((part) => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const faint = [];
  for (const one of document.querySelectorAll("body *")) {
    const texts = [...one.childNodes].filter((node) => node.nodeType === 3 && node.data.trim());
    const isField = one.matches("input[placeholder]");
    if (!(texts.length || isField) || !one.checkVisibility()) continue;
    const under = [];
    for (let at = one; at; at = at.parentElement) {
      under.unshift(getComputedStyle(at).backgroundColor);
    }
    under.forEach(paint);
    const ground = light();
    paint(getComputedStyle(one, isField ? "::placeholder" : null).color);
    const [low, high] = [ground, light()].sort((a, b) => a - b);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < 4.5) faint.push(`${contrast.toFixed(2)} ${one.outerHTML.slice(0, 90)}`);
  }
  return faint;
}"""
"""The texts whose contrast with what is under them is less than 4.5 (WCAG 2.2, AA)."""


@pytest.mark.parametrize(
    "page", [{"color_scheme": "light"}, {"color_scheme": "dark"}], indirect=True
)
def test_every_text_is_readable_on_its_background(page):
    shown, root = page
    write_conversations(root / "grpo-0")
    with (root / "dapo" / "metrics.jsonl").open("a") as file:
        for step in range(120, 140):
            file.write(json.dumps({"step": step, "train/grad_norm": 0.0}) + "\n")
    sees(shown.locator(".alerts summary")).to_contain_text("no gradient")
    shown.click(".alerts summary")
    for tab in TABS:
        shown.click(f"[data-tab={tab}]")
        shown.wait_for_selector(f"#{'lines' if tab == 'log' else tab} > *")
        shown.wait_for_timeout(300)
        assert shown.evaluate(FAINT) == [], tab
    shown.click("[data-tab=samples]")
    shown.select_option("[name=run]", "grpo-0")
    sees(shown.locator(".turn").first).to_be_visible()
    for color in ("logprob", "version", "age", "advantage", "difference"):
        shown.select_option("[name=color]", color)
        sees(shown.locator(".legend")).not_to_have_text("")
        shown.wait_for_timeout(200)
        assert shown.evaluate(FAINT) == [], color
    white = "(color) => import('/colors.js').then((colors) => colors.textOn(color))"
    for color, text in (("#1a7f37", "#fff"), ("#56d364", "#000"), ("oklch(0.55 0.14 60)", "#fff")):
        assert shown.evaluate(white, color) == text


def test_a_kind_of_span_has_one_color_in_all_runs_and_only_waits_are_grey(page):
    shown, root = page
    names = [f"kind {letter}" for letter in "abcdefghi"]
    for run, order in (("grpo-1", names), ("dapo", names[::-1])):
        recorder = SpanRecorder()
        for start, name in enumerate([*order, "wait for groups"]):
            recorder.add(RecordedSpan(name, start, start + 1, "", {}))
        TraceFile(root / run / "trace.json", "trainer 0").add(recorder.take())
    shown.click("[data-tab=busy]")
    colors = {}
    for run in ("grpo-1", "dapo"):
        keys = shown.locator("#busy > div", has_text=run).locator(".key")
        sees(keys).to_have_count(10)
        colors[run] = keys.evaluate_all(
            "(all) => Object.fromEntries(all.map((key) => [key.textContent, "
            "key.firstChild.style.getPropertyValue('--c')]))"
        )
    assert colors["grpo-1"] == colors["dapo"]
    assert len(set(colors["dapo"].values())) == 10


def test_lanes_show_who_was_busy_in_the_window_that_is_chosen(page):
    shown, _ = page
    shown.click("[data-tab=busy]")
    place = shown.locator("#busy > div", has_text="grpo-0")
    canvas = place.locator("canvas")
    labelled(canvas, r"scorer 15 %")
    labelled(canvas, r"75 %")  # a wait is not busy
    sees(place).to_contain_text("40 s of 40 s, from 0 s: steps 1 to 40")
    sees(place).to_contain_text("600 spans in samplers/0.trace.json, trace.json")
    sees(shown.locator("#busy > div", has_text="dapo")).to_contain_text("metrics.spans=true")
    sees(place.locator(".key")).to_have_count(5)
    keys = place.locator(".key").all_inner_texts()
    assert set(keys) == {"step", "wait for groups", "learn", "score", "block"}
    place.locator("[name=first]").fill("11")
    place.locator("[name=last]").fill("12")
    place.get_by_role("button", name="show").click()
    sees(place).to_contain_text("2 s of 40 s, from 10 s: steps 11 to 12")
    canvas.focus()
    shown.keyboard.press("ArrowRight")
    sees(place).to_contain_text("2 s of 40 s, from 11 s")
    shown.keyboard.press("-")
    sees(place).to_contain_text("4 s of 40 s, from 10 s")
    box = canvas.bounding_box()
    left, wide = box["x"] + 190, box["width"] - 194
    shown.mouse.move(left + 0.005 * wide, box["y"] + 40)  # inside, whatever a pixel is rounded to
    shown.mouse.down()
    shown.mouse.move(left + 0.245 * wide, box["y"] + 40, steps=4)
    shown.mouse.up()
    sees(place).to_contain_text(re.compile(r"9[5-7]\d ms of 40 s, from 10 s: step 11"))
    shown.mouse.move(left + 0.6 * wide, box["y"] + 45, steps=3)
    sees(place.locator(".tip")).to_contain_text("learn: 650 ms from 10.3 s")
    place.locator("summary").click()
    sees(place.locator("td", has_text="trainer 0: scorer")).to_be_visible()
    window = place.locator("p.hint").first
    before = window.inner_text()
    shown.mouse.move(5, 5)
    shown.mouse.down()  # elsewhere
    shown.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    shown.mouse.up()
    shown.wait_for_timeout(300)
    assert window.inner_text() == before
    canvas.dblclick()
    sees(place).to_contain_text("40 s of 40 s")
    pixels = "(c) => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
    assert canvas.evaluate(pixels) > 20, "something is drawn"


def test_tokens_are_coloured_by_what_is_chosen(page):
    shown, _ = page
    shown.click("[data-tab=samples]")
    shown.select_option("[name=run]", "grpo-0")
    tokens = shown.locator(".sample").first.locator(".token")
    colored = "(all) => all.map((t) => t.style.background)"
    seen = {}
    inked = {"advantage": (0, "--c1"), "difference": (10, "--c1"), "version": (0, "--c3")}
    for name, (place, ink) in (*inked.items(), ("age", (10, "--c3"))):
        shown.select_option("[name=color]", name)
        sees(tokens.nth(place)).to_have_attribute("style", re.compile(ink))
        seen[name] = tokens.evaluate_all(colored)
    shown.select_option("[name=color]", "none")
    sees(tokens.first).not_to_have_attribute("style", re.compile("."))
    seen[""] = tokens.evaluate_all(colored)
    inks = [("--c1" in c, "--c0" in c, c == "") for c in seen["advantage"]]
    assert (
        inks == [(True, False, False)] * 5 + [(False, False, True)] * 3 + [(False, True, False)] * 3
    ), "negative, none, positive"
    assert seen["difference"][:10] == [""] * 10 and "--c1" in seen["difference"][10]
    assert seen["version"][0] and not seen["version"][10] and set(seen[""]) == {""}
    shown.fill("[name=least]", "1")  # the members whose tokens are not recorded
    shown.select_option("[name=color]", "advantage")
    sees(shown.locator("#samples > .hint")).to_have_text(
        "12 samples: of these the advantage was not recorded"
    )
    keys = shown.locator(".legend .key")
    sees(keys).to_have_count(0)
    shown.fill("[name=least]", "")
    sees(keys).to_have_text(["advantage: negative", "advantage: positive"])
    title = tokens.first.get_attribute("title")
    assert "advantage -1.5" in title and "sampler's 1.00e-6" in title


CONTEXTS = [
    {
        "parts": [
            [False, "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n6*7?<|im_end|>\n"],
            [True, 'I ask.<tool_call>{"name": "multiply"}</tool_call><|im_end|>'],
            [False, "\n<|im_start|>tool\n42<img src=x onerror=document.title='hit'><|im_end|>\n"],
            [True, "It is 42."],
        ]
    },
    {"after": 0, "shared": 1234, "parts": [[False, "<user>Sure?"], [True, "Yes."]]},
]


def write_conversations(root: Path) -> None:
    """Two episodes of a group that begin with the same words, one of two contexts."""
    other = [{"parts": [*CONTEXTS[0]["parts"][:2], [False, "\n<|im_start|>tool\nno answer"]]}]
    with (root / "samples.jsonl").open("a") as file:
        for contexts in (CONTEXTS, other):
            sample = {"step": 500, "group": 7, "prompt": "6*7?", "completion": "...", "reward": 1.0}
            file.write(json.dumps({**sample, "turns": 2, "contexts": contexts}) + "\n")


EVIL = "</script><img src=x onerror=\"document.title='hit'\">"


@pytest.fixture
def report(tmp_path, request):
    """A browser's page of a report, opened as a file, without a network."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if CHROMIUM is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    root = tmp_path / "demo"
    write_run(root, 0, 120)
    write_run(root / "warm_start", 1, 9)
    write_spans(root, 40)
    (root / "config.yaml").write_text(f"run: {EVIL}\n")
    write_conversations(root)
    evil = {"step": 119, "prompt": EVIL, "completion": EVIL, "reward": 0.5, "stop": EVIL}
    with (root / "samples.jsonl").open("a") as file:
        file.write(json.dumps(evil) + "\n")
    path, wrong, requested = write_report(root), [], []
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        options = {"viewport": {"width": 1280, "height": 760}} | getattr(request, "param", {})
        shown = browser.new_context(offline=True, **options).new_page()
        shown.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
        shown.on("pageerror", lambda error: wrong.append(str(error)))
        shown.on("request", lambda r: requested.append(r.url))
        shown.goto(path.as_uri())
        yield shown
        browser.close()
    assert wrong == []
    assert requested == [path.as_uri()], "nothing else is loaded"


def test_a_report_opened_as_a_file_shows_the_run_and_runs_no_text_of_a_sample(report):
    report.wait_for_selector(".chart canvas")
    sees(report.locator(".tile").first).to_contain_text("119")
    sees(report.locator("#curves")).to_contain_text("Warm start, by update")
    sees(report.locator("#state")).to_contain_text("as of")
    charts = report.locator(".chart").count()
    report.fill("#search", "idle trainer")
    sees(report.locator(".chart")).to_have_count(2)  # the run's, and its warm start's
    report.fill("#search", "")
    sees(report.locator(".chart")).to_have_count(charts)
    report.click("[data-tab=samples]")
    sees(report.locator("#samples")).to_contain_text("27 samples")
    sees(report.locator(".turn").first).to_contain_text("Be short.")
    sees(report.locator(".completion", has_text="</script>")).to_have_text(EVIL)
    report.fill("[name=least]", "1")
    report.fill("[name=last]", "30")
    sees(report.locator("#samples > .hint")).to_have_text("4 samples")
    report.click("[data-tab=busy]")
    sees(report.locator("#busy")).to_contain_text(
        "this report has the whole run and its last steps"
    )
    canvas = report.locator("#busy canvas")
    labelled(canvas, r"scorer 15 %")
    sees(report.locator("#busy")).to_contain_text("steps 1 to 40")
    canvas.focus()
    report.keyboard.press("+")
    sees(report.locator("#busy")).to_contain_text("20 s of 40 s, from 10 s")
    labelled(canvas, r"^[^%]*scorer[^%]*$")  # of this window it has no busy shares
    sees(report.locator("#busy")).not_to_contain_text("steps 1 to 40")
    report.keyboard.press("0")
    sees(report.locator("#busy")).to_contain_text("40 s of 40 s, from 0 s: steps 1 to 40")
    report.click("[data-tab=metrics]")
    sees(report.locator("#metrics")).to_contain_text("staleness/tokens_lag_0")
    report.click("[data-tab=identity]")
    sees(report.locator("#identity pre")).to_contain_text(EVIL)
    assert report.title() == "demo" and report.locator("img").count() == 0


def test_a_drag_in_a_report_looks_closer_at_all_charts_but_the_warm_starts(report):
    wait_for_lines(report, 1)
    box = report.locator(".stage .over").first.bounding_box()
    report.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 40)
    report.mouse.down()
    report.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 40, steps=5)
    report.mouse.up()
    report.mouse.move(1, 1)
    for chart in report.locator(".chart").all():
        chart.scroll_into_view_if_needed()
        report.wait_for_timeout(200)
    script = """[...document.querySelectorAll(".chart")]
        .map((c) => [c.card.warm, Boolean(c.card.plot.spec.range)])"""
    zoomed = report.evaluate(script)
    assert all(closer != warm for warm, closer in zoomed), "steps are zoomed, updates are not"
    assert {warm for warm, _ in zoomed} == {True, False}
    report.click("[data-tab=ages]")
    sees(report.locator(".bar meter")).to_have_count(4)
    sees(report.locator("#ages")).to_contain_text("5 to 8600 (63 %)9 to 16360 (38 %)")


def test_conversations_are_shown_by_role_with_their_branches(page):
    shown, root = page
    write_conversations(root / "grpo-0")
    shown.click("[data-tab=samples]")
    shown.select_option("[name=run]", "grpo-0")
    shown.fill("[name=first]", "500")
    sees(shown.locator("#samples > .hint")).to_have_text("2 samples", timeout=20_000)
    first, second = shown.locator(".sample").all()
    roles = first.locator(".context").first.locator(".role").all_inner_texts()
    assert roles == ["system", "user", "policy", "tool", "policy"]
    assert first.locator(".call").inner_text().startswith("<tool_call>")
    branch = first.locator(".context.branch")
    assert "continues from the first 1,234 tokens of context 1" in branch.inner_text()
    assert branch.locator(".role").all_inner_texts() == ["user", "policy"]
    assert "begins as the group's first sample: 2 parts" in second.inner_text()
    assert second.locator(".context > .turn .role").all_inner_texts() == ["tool"]
    assert shown.locator(".sample img").count() == 0 and shown.title() != "hit"


@pytest.mark.parametrize(
    "report",
    [{"viewport": {"width": 390, "height": 800}, "color_scheme": "dark"}],
    indirect=True,
)
def test_on_a_phone_nothing_of_a_report_is_wider_than_the_screen(report):
    report.wait_for_selector(".chart canvas")
    for tab in TABS:
        report.click(f"[data-tab={tab}]")
        report.wait_for_selector(f"#{'lines' if tab == 'log' else tab} > *")
        assert report.evaluate("document.documentElement.scrollWidth") <= 390, tab


def test_evaluations_have_intervals_in_charts_and_in_a_table(page):
    """The bars are drawn: without standard errors the chart's pixels are others."""
    shown, root = page
    for name, errors in (("grpo-0", True), ("grpo-1", False)):
        lines = []
        for step in range(0, 120, 10):
            line = {"step": step, "eval/math/pass_at_4": step / 150, "eval/math/reward": 0.5}
            if errors:
                line |= {"eval/math/pass_at_4_stderr": 0.05, "eval/math/reward_stderr": 0.1}
                line |= {"eval/math/reward_change": 0.25, "eval/math/reward_change_stderr": 0.0625}
            lines.append(json.dumps(line) + "\n")
        (root / name / "metrics.jsonl").write_text("".join(lines))
    with (root / "dapo" / "metrics.jsonl").open("a") as file:
        line = {"step": 120, "eval/math/reward": 0.5, "eval/math/reward_stderr": 0.1}
        file.write(json.dumps(line) + "\n")
    sees(shown.locator("#curves")).to_contain_text("Evaluations by name", timeout=60_000)
    drawn = []
    for name in ("grpo-0", "grpo-1"):
        for run in ("grpo-0", "grpo-1", "dapo"):
            shown.set_checked(f"#runs li:has-text('{run}') input", run == name)
        shown.wait_for_timeout(1500)
        chart = shown.locator(".chart", has_text="math").first.locator(".stage canvas").first
        drawn.append(chart.evaluate("(c) => c.toDataURL()"))
    assert drawn[0] != drawn[1], "only the first has error bars"
    shown.click("[data-tab=evals]")
    shown.set_checked("#runs li:has-text('grpo-0') input", True)
    sees(shown.locator("#evals")).to_contain_text("pass@4")
    last = shown.locator("#evals > .wide tr")
    row = last.filter(has_text="pass@4").locator("td").all_inner_texts()
    assert row[1:6] == ["math", "pass@4", "110", "0.7333", "0.6353 to 0.8313"]
    row = last.filter(has_text="grpo-1").locator("td").all_inner_texts()
    assert row[2:5] == ["reward", "110", "0.5"] and not any(row[5:]), "listed without an error too"
    shown.set_checked("#runs li:has-text('grpo-1') input", False)
    sees(last).to_have_count(3)
    row = last.filter(has_text="reward").locator("td").all_inner_texts()
    assert row[5:] == ["0.304 to 0.696", "0.25", "0.1275 to 0.3725"]
    shown.set_checked("#runs li:has-text('dapo') input", True)
    shown.set_checked("#runs li:has-text('grpo-0') input", False)
    sees(shown.locator("#evals > .wide th")).to_have_count(6)  # without changes
    shown.set_checked("#runs li:has-text('dapo') input", False)
    shown.set_checked("#runs li:has-text('grpo-0') input", True)
    sees(shown.locator("#evals > .wide th")).to_have_count(8)
    shown.click("#evals summary")
    history = shown.locator("#evals details tr")
    sees(history).to_have_count(13)
    assert "0.5 (0.304 to 0.696)" in history.nth(1).inner_text()


def sees(locator):
    """Wait for what is expected of a part of the page, on a machine that does much else."""
    expect = importlib.import_module("playwright.sync_api").expect
    expect.set_options(timeout=30_000)
    return expect(locator)


def labelled(canvas, pattern: str) -> None:
    """Wait until lanes are drawn, which are labelled with their busy shares."""
    sees(canvas).to_have_attribute("aria-label", re.compile(pattern))


WATCHED = """
window.cut = [];
const write = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...more) {
  const box = this.measureText(text), { a, e } = this.getTransform();
  const left = a * (x - box.actualBoundingBoxLeft) + e;
  const right = a * (x + box.actualBoundingBoxRight) + e;
  if (left < -0.5 || right > this.canvas.width + 0.5) window.cut.push(text);
  (window.written ??= new Set()).add(text);
  return write.call(this, text, x, y, ...more);
};
"""
"""Notes each text that is written beyond the edge of its canvas."""


@pytest.mark.parametrize(
    "page", [{}, {"device_scale_factor": 2.5}, {"viewport": {"width": 390, "height": 800}}],
    indirect=True,
)  # fmt: skip
def test_no_label_of_an_axis_is_cut_and_no_two_are_the_same(page):
    shown, root = page
    lines = [
        {"step": 100_000 * step, "mismatch/max": 2e-6 * step, "mismatch/mean": 1e-6 * step,
         "train/learning_rate": 1e-5, "train/loss": -1e12 * step,
         "reward/mean": 1000 + step / 1000}
        for step in range(1, 6)
    ]  # fmt: skip
    for folder in root.iterdir():
        (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    shown.add_init_script(WATCHED)
    shown.reload()
    shown.wait_for_selector(".chart canvas")
    for chart in shown.locator(".chart").all():
        chart.scroll_into_view_if_needed()
    shown.wait_for_timeout(300)
    assert shown.evaluate("window.cut") == []
    written = set(shown.evaluate("[...window.written]"))
    assert {"2.50e-6", "7.50e-6", "1.00e-5", "-4.00e+12"} <= written
    between = {text for text in written if text.startswith("1,000.00")}
    assert len(between) >= 3, written  # not "1,000" at each line


@pytest.mark.parametrize(
    ("ticks", "labels"),
    [
        ([1170, 1172.5, 1175, 1177.5], ["1,170", "1,172.5", "1,175", "1,177.5"]),
        ([999.5, 1000, 1000.5], ["999.5", "1,000", "1,000.5"]),
        ([2000000, 2000002.5, 2000005], ["2.0000000e+6", "2.0000025e+6", "2.0000050e+6"]),
        ([1e-20, 1e-10, 0.3, 1000], ["1.00e-20", "1.00e-10", "0.3", "1,000"]),
        ([None, 5, None], ["", "5", ""]),
        ([0, 0.025, 0.05], ["0", "0.025", "0.05"]),
    ],
)
def test_labels_of_an_axis_say_their_ticks(page, ticks, labels):
    shown, _ = page
    said = shown.evaluate("async (t) => (await import('/numbers.js')).labelsOf(t)", ticks)
    assert said == labels
