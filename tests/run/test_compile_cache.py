"""What a run has compiled serves every later one, wherever its folder lies."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

PROGRAM = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from jaxrl_async.run.builders.devices import keep_compiled_programs
keep_compiled_programs(Path(sys.argv[1]))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.jit(lambda x: jnp.linalg.norm(jnp.sin(x) @ x.T))(jnp.ones((8, 8))).block_until_ready()
"""


def programs_kept_in(folder: Path) -> set[str]:
    """Compile the program in a process of its own; return the names of what the folder holds."""
    ours = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES")
    environment = {k: v for k, v in os.environ.items() if k not in ours}
    subprocess.run([sys.executable, "-c", PROGRAM, folder], check=True, env=environment)
    return {file.name for file in folder.glob("*-cache")}


@pytest.mark.exhaustive
def test_what_was_compiled_for_one_folder_is_found_in_a_copy_of_it(tmp_path: Path) -> None:
    first = programs_kept_in(tmp_path / "first")
    assert any("lambda" in name for name in first)
    shutil.copytree(tmp_path / "first", tmp_path / "moved")
    assert programs_kept_in(tmp_path / "moved") == first, "nothing is compiled again"
