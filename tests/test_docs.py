"""README, docs, CI and the configurations agree with the code wherever that can be checked."""

import ast
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from builders import tiny_params, tiny_spec
from chat_tokenizers import qwen3_tokenizer

import jaxrl_async
from jaxrl_async.algorithms.objective import make_recipe
from jaxrl_async.command.convert import main as convert
from jaxrl_async.config.field_help import help_of_fields
from jaxrl_async.config.load import load
from jaxrl_async.config.schema import (
    AlgorithmSection,
    Config,
    DataSection,
    JsonlSection,
    TrainerSection,
)
from jaxrl_async.data.addition import addition_tokenizer
from jaxrl_async.data.preferences import read_preferences
from jaxrl_async.data.records import read_records
from jaxrl_async.data.tokenizer import chat_tokenizer
from jaxrl_async.model.policy import Policy
from jaxrl_async.tasks.task_source import worked_messages
from jaxrl_async.trainer.optimizer import check_optimizer

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
CONFIGS = sorted(ROOT.glob("configs/**/*.yaml"))
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))


def blocks(language: str, text: str = README) -> list[str]:
    """Return the page's code blocks in that language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


def test_every_folder_of_the_package_says_what_it_holds():
    folders = {path.parent for path in (ROOT / "jaxrl_async").rglob("*.py")}
    texts = {f: ast.get_docstring(ast.parse((f / "__init__.py").read_text())) for f in folders}
    assert not [str(folder) for folder, text in texts.items() if not text]


def test_the_files_that_tell_the_story_exist():
    page = (ROOT / "docs/how_it_works.md").read_text("utf-8")
    story = re.findall(r"^\d\. `(\S+)`", page, re.MULTILINE)
    assert len(story) == 5
    assert all((ROOT / path).is_file() for path in story)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((.+?)\)", page.read_text("utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert page.parent.name != "docs" or not path.startswith("../"), f"{link}: not in the site"
        assert "://" in link or target.exists(), link
        assert "://" in link or not anchor or anchor in anchors(target), link


def test_the_index_and_the_sites_menu_lead_to_every_page_and_readme_to_the_index():
    index = (ROOT / "docs/index.md").read_text("utf-8")
    menu = (ROOT / "zensical.toml").read_text("utf-8")
    pages = {p.name for p in PAGES if p.parent.name == "docs"} - {"index.md"}
    assert {p for p in pages if f"({p})" not in index} == set()
    assert {p for p in pages if f'"{p}"' not in menu} == set()
    assert "(docs/index.md)" in README and len(README.splitlines()) <= 160


GENERATED = {
    "settings.md": "jaxrl_async.config.settings_reference",
    "api.md": "jaxrl_async.api.api_reference",
}


@pytest.mark.full
@pytest.mark.parametrize("page", GENERATED)
def test_a_generated_page_is_what_is_generated(page):
    text = importlib.import_module(GENERATED[page]).markdown()
    assert f"python -m {GENERATED[page]} > docs/{page}" in text
    assert (ROOT / "docs" / page).read_text("utf-8") == text, f"run the command in docs/{page}"


def test_the_changelog_has_a_section_for_each_version_up_to_this_one():
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    named = re.findall(r"^## (.+)$", text, re.MULTILINE)
    versions = [re.fullmatch(r"(\d+)\.(\d+)\.(\d+) \(\d{4}-\d\d-\d\d\)", n) for n in named[1:]]
    assert named[0] == "Unreleased" and versions and all(versions)
    numbers = [tuple(map(int, v.groups())) for v in versions]
    assert numbers == sorted(numbers, reverse=True)
    major, minor, patch = numbers[0]
    released, next_one = f"{major}.{minor}.{patch}", f"{major}.{minor + 1}.0.dev0"
    assert jaxrl_async.__version__ in (released, next_one)
    for older, newer in zip(versions[1:], versions[:-1], strict=True):
        section = text.split(f"## {newer[0]}")[1].split("\n## ")[0]
        assert f"### Upgrading from {'.'.join(older.groups())}" in section


def test_settings_that_the_table_of_names_tells_are_there():
    page = (ROOT / "docs/coming_from.md").read_text("utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    named = [n for row in rows[2:] for n in re.findall(r"`([a-z_.]+)", row[-1]) if "." in n]
    known = {one.path for one in help_of_fields()}
    assert len(named) > 6 and [name for name in named if name not in known] == []


@pytest.mark.exhaustive
def test_the_site_is_built_without_a_warning(tmp_path):
    menu = (ROOT / "zensical.toml").read_text("utf-8")
    (tmp_path / "zensical.toml").write_text(menu, encoding="utf-8")
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    command = [Path(sys.executable).parent / "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "max_staleness" in (tmp_path / "site/settings/index.html").read_text("utf-8")


def test_what_examples_in_python_import_is_there():
    code = [c for page in PAGES for c in blocks("python", page.read_text("utf-8"))]
    for notebook in NOTEBOOKS:
        cells = json.loads(notebook.read_text("utf-8"))["cells"]
        lines = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
        code += [c for c in lines if not c.startswith(("%", "!"))]
    imports = [
        node
        for text in code
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxrl_async")
    ]
    assert len(imports) > 5
    for node in imports:
        for name in node.names:
            assert hasattr(importlib.import_module(node.module), name.name), ast.unparse(node)


def test_the_glossary_is_short_and_names_files_that_exist():
    text = (ROOT / "docs/glossary.md").read_text("utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    assert 10 <= len(rows) <= 20
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    for row in rows:
        paths = re.findall(r"`(jaxrl_async/\S+)`", row[2])
        assert paths and all((ROOT / path).is_file() for path in paths), row[0]


def test_the_first_command_installs_and_runs_the_main_job():
    first = blocks("bash")[0].strip()
    assert first == (
        "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e . "
        "&& .venv/bin/python -m jaxrl_async.train configs/addition.yaml"
    )


def test_ci_runs_the_second_command_of_readme_and_prints_its_result_last():
    second = blocks("bash")[1].strip()
    assert second.startswith(".venv/bin/pip install -c constraints.txt -e '.[dev]' && ")
    script = [
        line
        for line in (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    assert script[-1] == 'eval "${command//.venv/$venv}" || again_alone $?'
    find = next(line for line in script if line.startswith("command="))
    found = subprocess.run(
        ["bash", "-c", f'{find}; printf %s "$command"'], cwd=ROOT, capture_output=True, text=True
    )
    assert found.stdout == second


EXAMPLE_FIRST = (
    "agents", "algorithms", "clients", "coming_from", "constraints", "datasets", "devices",
    "endpoint", "engines", "environments", "evaluation", "failures", "functions", "games", "index",
    "monitoring", "own_model", "plans", "python", "real_model", "releasing", "resume", "rewards",
    "sandboxes", "security", "slices", "speed", "troubleshooting",
)  # fmt: skip
"""Pages that begin with an example."""


@pytest.mark.parametrize("page", EXAMPLE_FIRST)
def test_a_page_begins_with_what_it_answers_and_an_example(page):
    text = (ROOT / f"docs/{page}.md").read_text("utf-8")
    title, first, *_ = text.split("\n\n")
    assert title.startswith("# ") and not first.startswith(("#", "`", "|", "-"))
    assert "\n```" in "".join(text.split("\n## ")[:2]), "no example before the second heading"


CONSTRAINTS = sorted(path.name for path in ROOT.glob("constraints*.txt"))


def test_each_python_that_is_tested_has_its_constraints():
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    minors = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', pyproject)
    assert minors[0] == "3.11", "which is that of constraints.txt"
    assert ["constraints.txt", *(f"constraints-{m}.txt" for m in minors[1:])] == [
        "constraints.txt", *(name for name in CONSTRAINTS if name != "constraints.txt")
    ]  # fmt: skip


@pytest.mark.parametrize("file", CONSTRAINTS)
def test_the_main_job_names_every_dependency_in_the_constraints(file):
    names = {
        re.sub(r"[-_.]+", "-", line.split("==")[0]).lower()
        for line in (ROOT / file).read_text(encoding="utf-8").splitlines()
        if "==" in line
    }
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needed = re.findall(r'"([A-Za-z0-9_-]+)(?:\[\w+\])?[>=]=[\d.]+(?:,<[\d.]+)?"', pyproject)
    assert {"jax", "flax", "torch"} <= set(needed)
    assert [n for n in needed if re.sub(r"[-_.]+", "-", n).lower() not in names] == []


@pytest.mark.parametrize("file", CONSTRAINTS)
def test_constraints_are_names_and_versions_only(file):
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    odd = [x for x in lines if not re.fullmatch(r"#.*|[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", x)]
    assert odd == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_a_configuration_loads_and_starts_with_its_command(path):
    first = path.read_text(encoding="utf-8").splitlines()[0]
    name = path.relative_to(ROOT).as_posix()
    job, options = "train", " "
    if "plans" in name:
        job, options = "plan", r" --topology \S+(?: --sampler-topology \S+)? "
    match = re.match(
        rf"# python -m jaxrl_async\.{job} {re.escape(name)}((?: \S+=\S+)*){options} +\S", first
    )
    assert match, "the first line is '# COMMAND     what to expect'"
    config = load(path, match[1].split())
    assert config.run.name == path.stem


BESIDE = {
    "sampler.engine=jetstream": ["eval.temperature=1"],
    "remote.transfer=folder": ["mesh.samplers_in=external", "remote.folder=weights"],
    "sampler.engine=": ["sampler.engine_urls=[http://127.0.0.1:1]", "mesh.samplers_in=external"],
    "sampler.engine_": ["sampler.engine=vllm", "mesh.samplers_in=external"],
    "remote.": ["mesh.samplers_in=external"],
    **{start: ["data.addition=null", "data.jsonl.path=mine.jsonl", "warm_start.steps=0",
               "reward.function=mine.py:judged"]
       for start in ("data.jsonl.", "data.chat_", "data.keep_thinking", "data.system_prompt")},
    "algorithm.signal_": ["algorithm.dynamic_sampling=true"],
    "trainer.rounding": ["model.param_dtype=bfloat16"],
    "checkpoint.dir": ["warm_start.steps=0"],
    "run.resume_or_start": ["run.overwrite=false"],
    "model.architecture.family=deepseek": ["model.architecture.experts=4"],
    "teacher.source=teachers": ["teachers={a: {path: runs/addition/policy}}"],
    "teacher.top_k_of": ["teacher={source: self, form: loss, top_k: 8}"],
    "teacher.form": ["teacher.source=self"],
    "teacher.rewards": ["teacher={source: self, form: loss}"],
    "teacher.": ["teacher.source=self"],
    "pairs.choose": ["pairs.loss=dpo"],
    "model.lora.": ["model.lora.rank=4"],
    "reward.judge.": ["reward.judge={model: m, rubric: Good?}"],
    "reward.process.": ["reward.process.function=mine.py:steps"],
    "algorithm.pivots.": ["algorithm.pivots.continuations=2"],
}  # fmt: skip
"""What a setting needs to be read, by how it begins."""


PROSE = ("metrics.md", "settings.md", "api.md", "coming_from.md")
"""Pages with sentences that end behind a setting's value, or with other libraries' settings."""


@pytest.mark.full
def test_overrides_in_readme_and_docs_are_valid():
    sections = "|".join(Config.model_fields)
    override = rf"(?<![\w.])((?:{sections})\.[\w.]+=(?:\{{.*\}}|[^\s`\"]+))"
    pages = [page.read_text("utf-8") for page in PAGES if page.name not in PROSE]
    words = {word for page in pages for word in re.findall(override, page)}
    assert len(words) > 20
    for word in sorted(words):
        base = "configs/dpo.yaml" if word.startswith("preference.") else "configs/addition.yaml"
        beside = next((words for start, words in BESIDE.items() if word.startswith(start)), [])
        load(ROOT / base, [*beside, word])


def in_a_folder_with_policies(tmp_path, monkeypatch):
    tokenizer = addition_tokenizer()
    spec = tiny_spec(tokenizer.vocab_size)
    policy = Policy(spec, tiny_params(spec), tokenizer)
    policy.save_pretrained(tmp_path / "runs/addition/policy")
    tokenizer = chat_tokenizer()
    spec = tiny_spec(tokenizer.vocab_size)
    Policy(spec, tiny_params(spec), tokenizer).save_pretrained(tmp_path / "Qwen3-0.6B")
    monkeypatch.chdir(tmp_path)


PYTHON_PAGE = (ROOT / "docs/python.md").read_text("utf-8")


@pytest.mark.full
def test_the_evaluation_in_docs_runs(tmp_path, monkeypatch, capsys):
    in_a_folder_with_policies(tmp_path, monkeypatch)
    (example,) = blocks("python", (ROOT / "docs/evaluation.md").read_text("utf-8"))
    assert "range(10, 99)" in example
    names: dict = {}
    exec(example.replace("range(10, 99)", "range(10, 12)"), names)
    assert len(names["found"].answers) == 2 * 4 and "pass@4" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_readmes_lines_of_python_train_and_answer(tmp_path, monkeypatch, capsys):
    in_a_folder_with_policies(tmp_path, monkeypatch)
    example = next(block for block in blocks("python") if "jr.train" in block)
    assert example == blocks("python", PYTHON_PAGE)[0]
    for whole, small in (("steps=50", "steps=1, groups_per_step=2"), ("range(50)", "range(4)")):
        assert whole in example
        example = example.replace(whole, small)
    names: dict = {}
    exec(example, names)
    assert names["run"].curve("eval/reward") and names["run"].report.is_file()


@pytest.mark.exhaustive
def test_the_asker_in_docs_answers(tmp_path, monkeypatch, capsys):
    in_a_folder_with_policies(tmp_path, monkeypatch)
    exec(next(block for block in blocks("python", PYTHON_PAGE) if "jr.Asker" in block), {})
    assert capsys.readouterr().out


def test_the_loss_and_the_optimizer_in_docs_are_accepted_as_a_users_own(tmp_path):
    loss, optimizer = blocks("python", (ROOT / "docs/functions.md").read_text("utf-8"))
    file = tmp_path / "my_file.py"
    file.write_text(loss, encoding="utf-8")
    make_recipe(AlgorithmSection(loss={f"{file}:my_loss": {"strength": 0.5}}))
    (other := tmp_path / "my_optimizer.py").write_text(optimizer, encoding="utf-8")
    check_optimizer(TrainerSection(optimizer={f"{other}:lion": {"b1": 0.95}}))


REWARDS_SAY = {
    "right": [
        ("4", "4", {"correct": 1.0}),
        (" 4\n", "4", {"correct": 1.0}),
        ("44", "4", {"correct": 0.0}),
    ],
    "tagged": [
        ("so <answer> 4 </answer>", "4", {"correct": 1.0, "form": 0.1}),
        ("<answer>5</answer>", "4", {"correct": 0.0, "form": 0.1}),
        ("4", "4", {"correct": 0.0, "form": 0.0}),
    ],
    "fields": [
        ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}', {"correct": 1.0, "share": 0.5}),
        ('{"a": 1, "b": 3}', '{"b": 2, "a": 1}', {"correct": 0.0, "share": 0.25}),
        ("[1]", '{"a": 1}', {"correct": 0.0, "share": 0.0}),
        ("a: 1", '{"a": 1}', {"correct": 0.0, "share": 0.0}),
    ],
}
"""Answer, reference and parts of the rewards in docs/rewards.md."""


def test_the_rewards_in_docs_score_as_they_say():
    page = (ROOT / "docs/rewards.md").read_text("utf-8")
    assert len(re.findall(r"^### \d\. ", page, re.MULTILINE)) == 6
    names: dict = {}
    for block in blocks("python", page):
        exec(block, names)
    for name, cases in REWARDS_SAY.items():
        for completion, answer, parts in cases:
            assert names[name](completion, answer) == parts, (name, completion)
    assert names["short_and_right"]("2+2=", "4", "4") == {"correct": 1.0, "short": -0.001}
    assert names["accuracy"](["it is 4", "5"], ["4", "4"]) == [1.0, 0.0]
    assert names["reasoned"]("", ["so", "therefore 4"]) == [0.0, 1.0]


def test_each_record_of_the_page_on_datasets_is_read(tmp_path):
    tokenizer, found = qwen3_tokenizer(), []
    for number, text in enumerate(blocks("json", (ROOT / "docs/datasets.md").read_text("utf-8"))):
        record = json.loads(text)
        (path := tmp_path / f"{number}.jsonl").write_text(json.dumps(record) + "\n", "utf-8")
        data = DataSection(max_prompt_tokens=1000, jsonl=JsonlSection(path=str(path)))
        if "prompt" in record:
            (pair,) = read_preferences(path, data, tokenizer, max_tokens=1000)
            found.append(len(pair.answers))
        elif "worked" in record:
            found.append(len(worked_messages(record)))
        else:
            (read,) = read_records(path, data, tokenizer)
            found.append(read.reference or read.columns)
    assert found == ["3 * 6 = 18\n#### 18", "6", "price(milk)", 2, 1, 2]


def our_side() -> list[str]:
    """Return the scripts of docs/coming_from.md for this package.

    One that imports nothing continues the beginning of the one above it.
    """
    page = (ROOT / "docs/coming_from.md").read_text("utf-8")
    scripts: list[str] = []
    for block in (block for block in blocks("python", page) if "jr.train(" in block):
        begins = "import jaxrl_async" in block
        scripts.append(block if begins else scripts[-1].partition("run = ")[0] + block)
    return scripts


def test_each_library_has_a_script_on_both_sides():
    page = (ROOT / "docs/coming_from.md").read_text("utf-8")
    sections = dict(re.findall(r"^## (\w[\w-]*)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    for name in ("TRL", "verl", "Tunix", "verifiers", "PRIME-RL", "SkyRL"):
        languages = re.findall(r"^```(\w+)$", sections[name], re.MULTILINE)
        assert len(languages) >= 2, name
        assert "Here" in sections[name], name


def test_commands_that_replace_another_librarys_are_valid():
    text = re.sub(r"\\\n\s*", " ", (ROOT / "docs/coming_from.md").read_text("utf-8"))
    found = 0
    for line in text.splitlines():
        words = shlex.split(line) if line.startswith("jaxrl-async ") else []
        settings = [word for word in words[3:] if not word.startswith("--")]
        if words[1:3] == ["train", "recipe:gsm8k"]:
            load(ROOT / "configs/gsm8k.yaml", settings)
            found += 1
        elif words[1:2] == ["train"]:
            load({}, settings)
            found += 1
        elif words[1:2] == ["convert"]:
            assert convert(words[2 : words.index("--out")]) == 0
            found += 1
    assert found == 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(4))
def test_our_side_of_a_script_trains(number, tmp_path, monkeypatch, capsys):
    in_a_folder_with_policies(tmp_path, monkeypatch)
    scripts = our_side()
    assert len(scripts) == 4
    script = scripts[number].replace("Qwen/Qwen3-0.6B", "Qwen3-0.6B")
    for whole, small in (
        ("range(1000)", "range(20)"), ("range(100)", "range(20)"), ("steps=100", "steps=1"),
        ('"max_steps": 100', '"max_steps": 1'), ("groups_per_step=64", "groups_per_step=2"),
        ("groups_per_step=8", "groups_per_step=2"), ("max_new_tokens=64", "max_new_tokens=8"),
        ('"max_completion_length": 64', '"max_completion_length": 8'),
        ('"per_device_train_batch_size": 64', '"per_device_train_batch_size": 16'),
    ):  # fmt: skip
        script = script.replace(whole, small)
    names: dict = {}
    exec(script, names)
    assert names["run"].curve("reward/mean") and names["run"].report.is_file()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_a_notebook_is_kept_with_the_small_outputs_of_a_whole_run(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    cells = [c for c in cells if c["cell_type"] == "code"]
    assert [c["execution_count"] for c in cells] == list(range(1, len(cells) + 1))
    outputs = [o for c in cells for o in c["outputs"]]
    assert outputs and not [o for o in outputs if o["output_type"] == "error"]
    assert len(json.dumps(outputs)) < 60_000
    named = re.findall(r"/(?:tmp|home|root|work|usr|var|Users)/\S*|\S*pypi\S*", json.dumps(cells))
    assert named == [], "a machine's path or a package registry"


@pytest.mark.exhaustive
@pytest.mark.full
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_a_notebook_runs(path):
    done = subprocess.run(
        [sys.executable, ROOT / "notebooks/execute.py", path],
        capture_output=True,
        text=True,
        timeout=900,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "JAXRL_NOTEBOOK": "quick",
        },
    )
    assert done.returncode == 0, done.stderr
