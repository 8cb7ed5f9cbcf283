"""What the archives hold, what a checkout lacks to be a release, and what README says there."""

import hashlib
import importlib.util
import io
import re
import subprocess
import tarfile
import tomllib
import zipfile
from dataclasses import replace
from importlib.metadata import metadata
from pathlib import Path

import archives
import make_release
import pytest
import yaml

import jaxrl_async

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
README = (ROOT / "README.md").read_text("utf-8")


@pytest.fixture(scope="module")
def setup():
    spec = importlib.util.spec_from_file_location("package_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- the description


@pytest.mark.parametrize(
    ("link", "leads"),
    [
        ("[a](docs/a.md)", "[a](https://github.com/o/r/blob/v1.2.3/docs/a.md)"),
        ("[a](docs/a.md#b)", "[a](https://github.com/o/r/blob/v1.2.3/docs/a.md#b)"),
        ("[a](#b)", "[a](https://github.com/o/r/blob/v1.2.3/README.md#b)"),
        ("![a](a.png)", "![a](https://raw.githubusercontent.com/o/r/v1.2.3/a.png)"),
        ("[a](https://host/b)", "[a](https://host/b)"),
        ("[a](mailto:a@b)", "[a](mailto:a@b)"),
        ("x[0](1)", "x[0](https://github.com/o/r/blob/v1.2.3/1)"),
        ("```python\nx[0](1)\n```", "```python\nx[0](1)\n```"),
    ],
)
def test_a_link_leads_to_the_files_of_the_version(setup, link, leads):
    assert setup.with_addresses(link, "https://github.com/o/r", "1.2.3") == leads


def test_between_two_releases_it_leads_to_the_newest_files(setup):
    page = setup.with_addresses("[a](b)", "https://github.com/o/r", "1.2.0.dev0")
    assert page == "[a](https://github.com/o/r/blob/HEAD/b)"


def test_the_package_is_described_by_readme_without_a_link_that_leads_nowhere(setup):
    page = setup.description()
    bare = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    assert page.count("\n") == README.count("\n") and REPOSITORY in page
    assert archives.RELATIVE.findall(bare) == [] and archives.RELATIVE.findall(README)


# ---- one address


def test_whatever_repeats_the_address_repeats_that_of_pyproject():
    assert all(url.startswith(REPOSITORY) for url in PROJECT["urls"].values())
    assert not REPOSITORY.endswith((".git", "/"))
    own = REPOSITORY.removeprefix("https://github.com/")
    address = rf"github(?:usercontent)?(?:\.com)?/([\w-]+/{own.rpartition('/')[2]})\b"
    files = [*ROOT.glob(".github/**/*.yml"), *ROOT.glob("notebooks/*.ipynb"), ROOT / "CITATION.cff"]
    assert len(files) >= 9
    for file in files:
        named = set(re.findall(address, file.read_text("utf-8")))
        assert named <= {own}, file.name
        assert named or file.suffix == ".yml", file.name
    assert f"repository-code: {REPOSITORY}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


def test_the_citation_is_of_the_newest_release():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    required = {"cff-version", "message", "title", "authors", "version", "date-released"}
    assert required <= citation.keys() and citation["cff-version"] == "1.2.0"
    assert all("name" in author or "family-names" in author for author in citation["authors"])
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    dated = re.search(r"^## (\d+\.\d+\.\d+) \((\S+)\)$", changelog, re.MULTILINE)
    assert (citation["version"], str(citation["date-released"])) == dated.groups()
    assert citation["license"] in PROJECT["license"]


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob(".github/ISSUE_TEMPLATE/*.yml")), ids=lambda p: p.name
)
def test_an_issue_form_is_one(path):
    form = yaml.safe_load(path.read_text("utf-8"))
    if path.name == "config.yml":
        assert form["contact_links"] and isinstance(form["blank_issues_enabled"], bool)
        return
    assert {"name", "description", "body"} <= form.keys()
    ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert ids and len(set(ids)) == len(ids)
    for part in form["body"]:
        assert part["type"] in ("markdown", "textarea", "input")
        wanted = "value" if part["type"] == "markdown" else "label"
        assert part["attributes"][wanted]
    for page in re.findall(r"/blob/HEAD/(\S+\.md)", path.read_text("utf-8")):
        assert (ROOT / page).is_file()


def test_a_python_is_named_only_where_jax_supports_it():
    """With constraints it is tested here: tests/test_docs.py."""
    ours = {c for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)}
    assert ours <= set(metadata("jax").get_all("Classifier"))


def test_the_versions_for_python_3_14_are_those_of_3_13():
    def versions(file: str) -> list[str]:
        return [x for x in (ROOT / file).read_text("utf-8").splitlines() if x[0] != "#"]

    assert versions("constraints-3.14.txt") == versions("constraints-3.13.txt")


# ---- the archives

TRACKED = ("jaxrl_async/a.py", "jaxrl_async/recipes", "configs/b/c.yaml", "tests/t.py", "LICENSE",
           "benchmarks/d.py", "jaxrl_async/view/u.LICENSE")  # fmt: skip
METADATA = """Metadata-Version: 2.4
Name: jaxrl_async
License-File: LICENSE
Project-URL: Repository, https://host/r
Description-Content-Type: text/markdown

# Ours

[a page](https://host/r/page)

```python
x[0](1)
```
"""
IN_WHEEL = {
    "jaxrl_async/a.py": "",
    "jaxrl_async/recipes/b/c.yaml": "",
    "jaxrl_async/view/u.LICENSE": "",
    "jaxrl_async-1.0.dist-info/METADATA": METADATA,
    "jaxrl_async-1.0.dist-info/licenses/LICENSE": "",
    "jaxrl_async-1.0.dist-info/RECORD": "",
}


def wheel_of(folder: Path, files: dict[str, str | None]) -> list[str]:
    with zipfile.ZipFile(path := folder / "jaxrl_async-1.0-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            if text is not None:
                archive.writestr(name, text)
    return archives.wheel_faults(path, TRACKED, ["https://host/r"])


def test_a_whole_wheel_has_no_fault(tmp_path):
    assert wheel_of(tmp_path, IN_WHEEL) == []


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("jaxrl_async/recipes/b/c.yaml", None, "lacks jaxrl_async/recipes/b/c.yaml"),
        ("jaxrl_async/a.py", None, "lacks jaxrl_async/a.py"),
        ("benchmarks/d.py", "", "does not track: benchmarks/d.py"),
        ("jaxrl_async/x.pyc", "", "does not track: jaxrl_async/x.pyc"),
        ("jaxrl_async-1.0.dist-info/METADATA", None, "has no METADATA"),
        ("jaxrl_async-1.0.dist-info/licenses/LICENSE", None, "licence file LICENSE"),
        ("METADATA", METADATA.replace("https://host/r/page", "docs/page.md"), "docs/page.md"),
        ("METADATA", METADATA + '<img src="a.png">', 'src="a.png"'),
        ("METADATA", METADATA.replace("Repository, https://host/r", "a, b"), "https://host/r."),
        ("METADATA", METADATA.replace("text/markdown", "text/plain"), "is Markdown"),
    ],
)
def test_a_wheel_is_refused_with_what_is_wrong(tmp_path, file, text, said):
    file = f"jaxrl_async-1.0.dist-info/{file}" if file == "METADATA" else file
    (fault,) = wheel_of(tmp_path, {**IN_WHEEL, file: text})
    assert said in fault


IN_SDIST = ("PKG-INFO", "setup.cfg", "jaxrl_async.egg-info/SOURCES.txt", "jaxrl_async/a.py",
            "jaxrl_async/recipes/b/c.yaml", "configs/b/c.yaml", "tests/t.py", "LICENSE",
            "jaxrl_async/view/u.LICENSE")  # fmt: skip


def sdist_of(folder: Path, names: tuple[str, ...], top: str = "jaxrl_async-1.0") -> list[str]:
    with tarfile.open(path := folder / "jaxrl_async-1.0.tar.gz", "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"{top}/{name}"), io.BytesIO())
    return archives.sdist_faults(path, TRACKED)


def test_a_source_archive_has_the_tests_and_no_benchmarks(tmp_path):
    assert sdist_of(tmp_path, IN_SDIST) == []
    (fault,) = sdist_of(tmp_path, tuple(n for n in IN_SDIST if n != "tests/t.py"))
    assert "lacks tests/t.py" in fault
    (fault,) = sdist_of(tmp_path, (*IN_SDIST, "benchmarks/d.py"))
    assert "does not track: benchmarks/d.py" in fault
    (fault,) = sdist_of(tmp_path, IN_SDIST, top="..")
    assert "outside of jaxrl_async-1.0/" in fault


def test_checksums_are_those_that_sha256sum_reads(tmp_path):
    (tmp_path / "a-1.0-py3-none-any.whl").write_bytes(b"one")
    (tmp_path / "a-1.0.tar.gz").write_bytes(b"two")
    told = archives.write_checksums(tmp_path)
    assert hashlib.sha256(b"one").hexdigest() in told.read_text()
    check = ["sha256sum", "--check", "--strict", told.name]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True).returncode == 0
    (tmp_path / "a-1.0.tar.gz").write_bytes(b"three")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True).returncode == 1


# ---- the state of a checkout

RELEASE = make_release.State(
    version="1.2.0",
    changelog="# C\n\n## Unreleased\n\n## 1.2.0 (2026-12-01)\n\n## 1.1.0 (2026-11-01)\n",
    citation="version: 1.2.0\ndate-released: 2026-12-01\n",
    wheels_named={"a.ipynb": "1.2.0"},
    tags=["v1.1.0"],
    origin="git@github.com:o/r.git",
    repository="https://github.com/o/r",
)


def with_state(**changes):
    return make_release.faults_of(replace(RELEASE, **changes))


@pytest.mark.parametrize(
    "origin",
    ["git@github.com:o/r.git", "https://github.com/o/r", "https://me:secret@github.com/O/r.git",
     "ssh://git@github.com/o/r"],
)  # fmt: skip
def test_a_checkout_that_is_a_release(origin):
    assert with_state(origin=origin) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": "1.2.0.dev0"}, "version 1.2.0.dev0"),
        ({"changelog": "## Unreleased\n## 1.1.0 (2026-11-01)\n"}, "'1.2.0 (YYYY-MM-DD)'"),
        ({"changelog": "## 1.2.0 (2026-12-01)\n"}, "after Unreleased"),
        ({"citation": "version: 1.2.0\ndate-released: 2026-11-01\n"}, "must be 2026-12-01"),
        ({"citation": "version: 1.1.0\ndate-released: 2026-12-01\n"}, "version must be 1.2.0"),
        ({"wheels_named": {"a.ipynb": "1.1.0"}}, "notebooks/a.ipynb"),
        ({"changed": " M a.py\n"}, "M a.py"),
        ({"tags": ["v1.2.0"]}, "v1.2.0 exists"),
        ({"origin": ""}, "origin is missing"),
        ({"origin": "https://github.com/other/r"}, "github.com/other/r"),
    ],
)
def test_what_keeps_it_from_being_one_is_told(changes, said):
    (fault,) = with_state(**changes)
    assert said in fault


def test_this_checkout_is_read():
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("no checkout of git")
    state = make_release.state_of(ROOT)
    assert state.version == jaxrl_async.__version__ and state.repository == REPOSITORY
    assert len(state.wheels_named) == 4 and all(state.wheels_named.values())


def test_notebooks_name_the_newest_wheel_or_the_next():
    """The next one until it is released: docs/releasing.md."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    base = jaxrl_async.__version__.partition(".dev")[0]
    for path in ROOT.glob("notebooks/*.ipynb"):
        text = path.read_text("utf-8")
        (tag,) = make_release.WHEEL.findall(text)
        assert f"/jaxrl_async-{tag}-py3-none-any.whl" in text
        assert tag in (base, citation["version"])


def test_readme_says_how_to_install_by_name():
    command = make_release.readme_command(README)
    assert command[0] == "jaxrl-async" and command[0] in PROJECT["scripts"]
    with pytest.raises(SystemExit, match="pip install jaxrl_async &&"):
        make_release.readme_command("nothing")


def test_a_tag_needs_the_whole_check(capsys):
    with pytest.raises(SystemExit):
        make_release.main(["--tag", "--rehearse"])
    assert "--tag needs the whole check" in capsys.readouterr().err
