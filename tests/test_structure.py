"""What CONTRIBUTING says of names, of the core and its wings, and of words."""

import ast
import functools
import importlib
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

import jaxrl_async
from jaxrl_async.config.field_help import help_of_fields, setting_names

PACKAGE = Path(jaxrl_async.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted(PACKAGE.rglob("*.py"))
WINGS = {
    "adapters",
    "cpu",
    "endpoint",
    "evals",
    "games",
    "interop",
    "judge",
    "launch",
    "mirror",
    "plan",
    "remote",
    "sandbox",
    "teachers",
    "view",
}
TESTS = sorted((ROOT / "tests").rglob("*.py"))
ENTRIES = ("command", "api", "testing", "sample.py", "serve.py", "audit.py", "__init__.py")
"""Parts above the wings, which may name them."""
MOST_IMPORTED = 300
"""Files that the main job imports at most."""


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Return the syntax trees of all files of the package."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def test_no_file_name_stands_twice():
    where = defaultdict(list)
    for path in FILES:
        if path.name not in ("__init__.py", "__main__.py"):
            where[path.name].append(path.relative_to(PACKAGE).as_posix())
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


@pytest.mark.full
def test_no_public_class_name_stands_twice():
    where = defaultdict(list)
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(path.relative_to(PACKAGE).as_posix())
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


def test_each_wing_says_that_it_is_one():
    said = {p.parent.name for p in PACKAGE.glob("*/__init__.py") if '"""Wing: ' in p.read_text()}
    assert said == WINGS


def named_modules(tree: ast.Module) -> set[str]:
    """Return the modules of wings that a module names in texts, as importlib takes them."""
    texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    names = {t.partition(":")[0].removeprefix("jaxrl_async.") for t in texts if isinstance(t, str)}
    dotted = {name for name in names if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", name)}
    dotted -= set(setting_names())
    return {n for n in dotted if PACKAGE.joinpath(*n.split(".")).with_suffix(".py").is_file()}


@pytest.mark.full
def test_one_file_of_the_core_names_the_wings():
    """And one the built-in tasks, of which some are games. Imports are .importlinter's."""
    naming = {
        path.relative_to(PACKAGE).as_posix()
        for path, tree in trees().items()
        if part_of(path) not in {*WINGS, *ENTRIES}
        and any(name.partition(".")[0] in WINGS for name in named_modules(tree))
    }
    assert naming == {"run/features.py", "tasks/named_tasks.py"}


def test_the_objects_that_features_takes_from_wings_by_name_exist():
    source = (PACKAGE / "run/features.py").read_text("utf-8")
    named = re.findall(r'\("([a-z_.]+)", "(\w+)"\)', source)
    assert len(named) >= 15, "run/features.py names objects of wings in another form"
    for module, name in named:
        wing = importlib.import_module(f"jaxrl_async.{module}")
        assert hasattr(wing, name), f"run/features.py: {module} has no {name}"


def constructed(tree: ast.Module, name: str) -> bool:
    """Return whether a module calls a class by this name."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
        for node in ast.walk(tree)
    )


@pytest.mark.full
@pytest.mark.parametrize("name", ["Sampler", "WeightChannel", "Learner"])
def test_builders_alone_make_the_parts_of_a_run(name):
    """And what serves or asks a policy without a run."""
    makes = {
        path.relative_to(PACKAGE).as_posix()
        for path, tree in trees().items()
        if constructed(tree, name) and part_of(path) not in (*WINGS, "testing")
    }
    allowed = {"api/asker.py", "serve.py"} if name == "Sampler" else set()
    assert all(path.startswith("run/builders/") for path in makes - allowed), makes


@pytest.mark.full
def test_the_main_job_imports_few_files_and_no_wing_that_it_does_not_use(tmp_path):
    code = (
        "import sys\n"
        "from jaxrl_async.train_command import main\n"
        f"main(['configs/addition.yaml', 'run.dir={tmp_path}', 'run.steps=1', "
        "'warm_start.steps=1', 'trainer.warmup_steps=0', 'data.addition.eval_size=8'])\n"
        "print('loaded', *(m for m in sys.modules if m.split('.')[0] == 'jaxrl_async'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = done.stdout.rpartition("loaded ")[2].split()
    assert len(loaded) <= MOST_IMPORTED
    used = {name.split(".")[1] for name in loaded if "." in name} & WINGS
    assert used == {"view", "cpu"}, "the report, and kernels on a CPU"


# ---- words

HOME_MADE = re.compile(
    r"\b(?:(?:goes|going|went|gone) on|nobody|whoever|learnt|(?:drawn|made) anew|what of"
    r"|for want of|(?:is|are|was|were) told|page of runs|beside)\b",
    re.IGNORECASE,
)
"""Words that this project's own English had in place of the field's: continues, no one, trained or
learned, sampled again, which part, without, gets an error or is logged, dashboard, alongside."""


def marks_in(tree: ast.Module) -> set[str]:
    """Return the names of pytest's marks that a module of tests uses."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark"
    }


@pytest.mark.full
def test_marks_say_only_when_a_test_runs():
    """The marks of CONTRIBUTING, and pytest's and its plugins' own."""
    of_pytest = {"parametrize", "skipif", "xfail", "filterwarnings", "timeout", "asyncio"}
    of_pytest |= {"usefixtures"}
    used = {mark for path in TESTS for mark in marks_in(ast.parse(path.read_text("utf-8")))}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    declared = settings["tool"]["pytest"]["ini_options"]["markers"]
    assert {text.partition(":")[0] for text in declared} == used - of_pytest
    assert used - of_pytest == {"full", "exhaustive", "large"}


LEXICON = {
    "beside": "alongside, asynchronous",
    "desk": "service",
    "drew": "sampled",
    "elders": "opponents",
    "heard": "last seen",
    "learnt": "trained",
    "lent": "leased",
    "nobody": "no one",
    "ours": "native",
    "outsider": "external agent",
    "seam": "protocol",
    "sight": "view",
    "spoken": "text",
    "strand": "branch",
    "tethered": "ends with its parent",
    "told": "reported",
    "urgency": "priority",
    "voice": "player",
    "whereabouts": "locations",
    "wish": "sampling request",
}
"""Words that name no file, setting or public class, and the field's words for what they meant."""
ONE_MEANING = {
    "route": {"model", "sampler"},  # of a token to its experts; requests are dispatched
    "seat": {"config", "games", "run", "tasks"},  # of a player in a game
    "session": {"config", "endpoint", "errors.py", "remote", "tasks", "testing"},  # of an agent,
    # or of two processes, which a connection carries
}
"""Words with one meaning each, and the parts of the package whose classes and files use them."""


def parts_of(name: str) -> set[str]:
    """Return the words of a name in snake case or camel case, without a plural's s."""
    words = re.findall(r"[A-Z]?[a-z]+", name)
    return {word.lower() for word in words} | {word.lower().removesuffix("s") for word in words}


def public_names() -> list[tuple[str, str]]:
    """Return the names of files, settings, public classes and the API, each with its part."""
    found = [(setting, "config") for setting in setting_names()]
    found += [(name, "api") for name in jaxrl_async.__all__]
    for path, tree in trees().items():
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        names = [path.stem, *(name for name in classes if not name.startswith("_"))]
        found += [(name, part_of(path)) for name in names]
    return found


@pytest.mark.full
def test_names_are_of_the_fields_words_with_one_meaning_each():
    found = {
        f"{part}: {name}: {', '.join(sorted(refused))}"
        for name, part in public_names()
        if (
            refused := set(parts_of(name) & LEXICON.keys())
            | {w for w in parts_of(name) & ONE_MEANING.keys() if part not in ONE_MEANING[w]}
        )
    }
    assert not found, f"say {LEXICON} instead, and see ONE_MEANING: {sorted(found)}"


@pytest.mark.full
def test_no_identifier_has_a_home_made_word():
    """Variables, arguments and fields, too; a saved record keeps the names it was written with."""
    refused = LEXICON.keys() - {"ours"}  # "ours" and "theirs" are two sides of a comparison
    found = set()
    for path, tree in trees().items():
        for node in ast.walk(tree):
            name = getattr(node, "id", None) or getattr(node, "arg", None)
            name = name or getattr(node, "attr", None) or getattr(node, "name", None)
            if isinstance(name, str) and parts_of(name) & refused:
                found.add((path.relative_to(PACKAGE).as_posix(), name))
    saved = {("rollout/call_log.py", "voice"), ("rollout/episode.py", "voice")}
    assert found - saved == set()


def test_settings_carry_their_unit():
    """A time in seconds ends in _s and a size in MiB in _mib, and nothing else does."""
    units = {"_s": r"\bseconds\b", "_mib": r"\bMiB\b"}
    for one in help_of_fields():
        if one.default is None:
            continue
        for ending, unit in units.items():
            if one.path.endswith(ending):
                assert re.search(unit, one.about), f"{one.path} is of another unit"
            else:
                assert not re.search(f", {unit}", one.about), f"{one.path} ends in {ending}"


@pytest.mark.full
def test_docstrings_of_functions_begin_with_a_verb():
    """In the imperative. Properties are named by nouns, and so are their docstrings."""
    found = []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            is_property = any("property" in ast.unparse(one) for one in node.decorator_list)
            if is_property or node.name == "__init__":
                continue
            first = (ast.get_docstring(node) or "Do").split()[0].strip(",.:")
            if re.fullmatch(r"Whether|The|An?|This|It|[A-Z][a-z]+[^s]s", first):
                found.append(f"{path.relative_to(ROOT)}: {node.name}: {first}")
    assert not found, "\n".join(found)


def prose_of(path: Path) -> list[tuple[int, str]]:
    """Return the lines of a module that people read: docstrings and comments."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    numbers = {n for n, line in enumerate(lines, 1) if re.search(r"(^|\s)#(?!!)", line)}
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for part in body if isinstance(body, list) else ():
            value = getattr(part, "value", None)
            if isinstance(part, ast.Expr) and isinstance(value, ast.Constant):
                numbers |= set(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    return [(n, lines[n - 1]) for n in sorted(numbers)]


@pytest.mark.full
def test_prose_speaks_in_the_fields_words():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}: {line.strip()}"
        for path in FILES
        for number, line in prose_of(path)
        if (match := HOME_MADE.search(line))
    ]
    assert not found, "\n".join(found)
