"""The page in a real browser: Debian's Chromium, driven by Playwright."""

import importlib
import json
import math
import re
import shutil
import threading
from pathlib import Path

import pytest

from jaxrl_async.metrics.trace_file import RecordedSpan, SpanRecorder, TraceFile
from jaxrl_async.view.__main__ import made_server
from jaxrl_async.view.report import write_report

pytestmark = [pytest.mark.full, pytest.mark.exhaustive]
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


@pytest.fixture
def page(tmp_path, request):
    """A browser's page, and the folder whose runs it shows."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if CHROMIUM is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    for name, seed in (("grpo-0", 0), ("grpo-1", 1), ("dapo", 2)):
        write_run(tmp_path / name, seed, 120)
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


def test_curves_are_drawn_followed_and_compared(page):
    shown, root = page
    shown.wait_for_selector(".chart canvas")
    sees(shown.locator("#runs li")).to_have_count(3)
    sees(shown.locator(".chart").nth(2)).to_be_attached()
    first = shown.locator(".chart").first
    sees(first).to_contain_text("dapo")
    sees(first).to_contain_text("grpo-1")
    shown.check("#bands")
    sees(shown.locator(".chart").first).to_contain_text("(2 seeds)")
    shown.fill("#search", "idle trainer")
    sees(shown.locator(".chart")).to_have_count(1)
    shown.fill("#search", "")
    with (root / "dapo" / "metrics.jsonl").open("a") as file:  # the run goes on
        file.write(json.dumps({"step": 120, "entropy_is_new": 1.0, "policy/entropy": 0.5}) + "\n")
    sees(shown.locator("#curves")).to_contain_text("Entropy", timeout=20_000)


def test_a_drag_looks_closer_at_all_charts_and_a_double_click_goes_back(page):
    shown, _ = page
    shown.wait_for_selector(".chart canvas")
    box = shown.locator(".u-over").first.bounding_box()
    asked: list[str] = []
    shown.on("request", lambda r: asked.append(r.url) if "/api/curves" in r.url else None)
    shown.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 40)
    shown.mouse.down()
    shown.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 40, steps=5)
    shown.mouse.up()
    shown.wait_for_timeout(500)
    closer = [url for url in asked if "first=" in url]
    assert len(closer) == 3, "one question for each run"
    first = int(closer[0].partition("first=")[2].partition("&")[0])
    assert 20 <= first <= 40
    shown.click("#whole")
    shown.wait_for_timeout(500)
    assert "first=" not in asked[-1]


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
    for tab in ("curves", "samples", "busy", "evals", "ages", "metrics", "identity"):
        shown.click(f"[data-tab={tab}]")
        shown.wait_for_timeout(300)
        assert shown.evaluate("document.documentElement.scrollWidth") <= 390, tab
    shown.click("[data-tab=ages]")
    shown.wait_for_selector(".bar meter")


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
    shown.select_option("[name=color]", "")
    sees(tokens.first).not_to_have_attribute("style", re.compile("."))
    seen[""] = tokens.evaluate_all(colored)
    inks = [("--c1" in c, "--c2" in c, c == "") for c in seen["advantage"]]
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
    shown.fill("[name=least]", "")
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
    path, wrong, asked = write_report(root), [], []
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        options = {"viewport": {"width": 1280, "height": 760}} | getattr(request, "param", {})
        shown = browser.new_context(offline=True, **options).new_page()
        shown.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
        shown.on("pageerror", lambda error: wrong.append(str(error)))
        shown.on("request", lambda r: asked.append(r.url))
        shown.goto(path.as_uri())
        yield shown
        browser.close()
    assert wrong == []
    assert asked == [path.as_uri()], "nothing else is loaded"


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
    report.wait_for_selector(".chart canvas")
    drawn = "[...document.querySelectorAll('.chart canvas')].map((c) => c.toDataURL())"
    before = report.evaluate(drawn)
    box = report.locator(".u-over").first.bounding_box()
    report.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 40)
    report.mouse.down()
    report.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 40, steps=5)
    report.mouse.up()
    report.mouse.move(1, 1)
    report.wait_for_timeout(500)
    after = report.evaluate(drawn)
    changed = [one != other for one, other in zip(before, after, strict=True)]
    assert changed == [True] * (len(changed) - 1) + [False], "the last is of the warm start"
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
    for tab in ("curves", "samples", "busy", "evals", "ages", "metrics", "identity"):
        report.click(f"[data-tab={tab}]")
        report.wait_for_selector(f"#{tab} > *")
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
    sees(shown.locator("#curves")).to_contain_text("Evaluations by name", timeout=60_000)
    drawn = []
    for name in ("grpo-0", "grpo-1"):
        for run in ("grpo-0", "grpo-1", "dapo"):
            shown.set_checked(f"#runs li:has-text('{run}') input", run == name)
        shown.wait_for_timeout(1500)
        chart = shown.locator(".chart", has_text="math").first.locator("canvas")
        drawn.append(chart.evaluate("(c) => c.toDataURL()"))
    assert drawn[0] != drawn[1], "only the first has error bars"
    shown.click("[data-tab=evals]")
    shown.set_checked("#runs li:has-text('grpo-0') input", True)
    sees(shown.locator("#evals")).to_contain_text("pass@4")
    row = shown.locator("#evals tr", has_text="pass@4").locator("td").all_inner_texts()
    assert row[:5] == ["math", "pass@4", "110", "0.7333", "0.6353 to 0.8313"]
    row = shown.locator("#evals tr", has_text="reward").locator("td").all_inner_texts()
    assert row[4:] == ["0.304 to 0.696", "0.25", "0.1275 to 0.3725"]


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
    said = shown.evaluate("async (t) => (await import('/charts.js')).labelsOf(t)", ticks)
    assert said == labels
