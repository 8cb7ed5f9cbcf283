"""What the code itself shows: nothing that it reads can run code."""

import ast
from pathlib import Path

import pytest

import jaxrl_async

PACKAGE = Path(jaxrl_async.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "torch"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
SAFE_YAML = {"SafeLoader", "SafeDumper", "safe_load", "safe_dump", "dump", "Node", "ScalarNode",
             "SequenceNode", "MappingNode", "YAMLError", "MarkedYAMLError"}  # fmt: skip


def unsafe(source):
    """Names of what could run code that is read from a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            own = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in own or [alias.name for alias in node.names]:
                if name.partition(".")[0] in UNSAFE_MODULES:
                    yield name
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in UNSAFE_CALLS:
                yield node.func.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "yaml" and node.attr not in SAFE_YAML:
                yield f"yaml.{node.attr}"
            if node.value.id == "np" and node.attr in ("load", "fromregex", "genfromtxt"):
                yield f"np.{node.attr}"
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                yield f"{node.arg}=True"
            else:
                yield f"{node.arg}=False"


def allowed(found):
    """np.load is safe exactly with allow_pickle=False; nothing foreign is run without
    trust_remote_code."""
    found = [name for name in found if name != "trust_remote_code=False"]
    return found in ([], ["np.load", "allow_pickle=False"], ["allow_pickle=False", "np.load"])


@pytest.mark.full
@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_no_pickle_is_loaded_and_no_text_is_run(file):
    assert allowed(list(unsafe(file.read_text("utf-8"))))


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from torch import load", "import joblib.numpy_pickle", "eval(x)",
     "yaml.load(x)", "yaml.UnsafeLoader", "np.load(x)", "np.load(x, allow_pickle=True)",
     "AutoTokenizer.from_pretrained(x, trust_remote_code=True)"],
)  # fmt: skip
def test_what_would_be_unsafe_is_found(source):
    assert not allowed(list(unsafe(source)))
