"""The tables of other libraries' settings against the installed libraries, and a conversion of
TRL's own objects."""

import json
import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
pytestmark = pytest.mark.full


def told_by(library: str, folder: Path) -> dict:
    home = os.environ.get("JAXRL_PEERS")
    if not home:
        pytest.skip("JAXRL_PEERS is not set: no environments of peers (docs/agreement.md)")
    out = folder / "fields.json"
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
    words = [Path(home) / library / "bin/python", HERE / "worker_fields.py", library, ROOT, out]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        env={**environment, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("library", ["trl", "tunix"])
def test_the_kept_list_of_fields_is_the_librarys(library, tmp_path):
    """tests/config/test_peers.py compares the tables with this list."""
    kept = json.loads((ROOT / "tests/config/peer_fields.json").read_text(encoding="utf-8"))
    (ours,) = (fields for name, fields in kept.items() if name.lower().startswith(library))
    theirs = told_by(library, tmp_path)["fields"]
    names = {name for fields in theirs.values() for name in fields}
    assert names == set(ours)
    for fields in theirs.values():
        for name, default in fields.items():
            others = [f[name] for f in theirs.values() if name in f]
            assert ours[name] in (default, *others, str(default)), name


def test_trls_own_objects_are_converted(tmp_path):
    told = told_by("trl", tmp_path)["converted"]
    assert told["plain"]["run"]["steps"] == 10 and told["plain"]["run"]["name"] == "mine"
    assert told["plain"]["algorithm"]["groups_per_step"] == 1  # 8 sequences, 8 a prompt
    whole = told["whole"]
    # 4 * 4 sequences are sampled, 2 a prompt: 8 groups, the default here; 2 * 2 updates of them
    assert "groups_per_step" not in whole["algorithm"] and whole["algorithm"]["group_size"] == 2
    assert whole["algorithm"]["minibatches"] == 2 and whole["algorithm"]["epochs"] == 2
    assert whole["run"]["steps"] == 25 and whole["model"]["dtype"] == "float32"
    lora = {"rank": 4, "alpha": 16.0, "targets": ["q_proj", "v_proj"]}
    assert whole["model"]["lora"] == lora and whole["trainer"]["schedule"] == "linear"
