"""The newest weights as Hugging Face directories, for engines that read them from files.

    write(7) -> DIR/7/model.safetensors     a server reads it      settle(user, 7): remove older

Several servers share one folder. Each version is written once, and kept while any of them may read
it.
"""

import shutil
import threading
from pathlib import Path

import jax

from jaxrl_async.model.hf import save_params
from jaxrl_async.model.spec import ModelSpec, Params

READABLE = 0o644
"""Mode of the files; a server may run as another user."""


class WeightFolder:
    """Writes versions of the weights, and removes those no longer needed. Thread safe."""

    def __init__(self, root: Path, spec: ModelSpec) -> None:
        """root: a folder used only by this run; it is emptied here."""
        self._root, self._spec = root.resolve(), spec
        self._lock = threading.Lock()
        self._used: dict[str, set[int]] = {}  # versions that each user may read
        shutil.rmtree(self._root, ignore_errors=True)
        self._root.mkdir(parents=True)

    def path(self, version: int) -> Path:
        """Return the directory of a version."""
        return self._root / str(version)

    def write(self, version: int, params: Params, user: str) -> Path:
        """Write a version if it does not exist, and keep it for this user; return its directory.
        Waits for the arrays. Raises OSError."""
        with self._lock:
            self._used.setdefault(user, set()).add(version)
            path = self.path(version)
            if not path.is_dir():
                part = path.with_suffix(".part")
                shutil.rmtree(part, ignore_errors=True)
                save_params(part, self._spec, jax.tree.map(jax.device_get, params))
                for file in part.iterdir():
                    file.chmod(READABLE)
                part.rename(path)
            return path

    def settle(self, user: str, version: int | None) -> None:
        """Record that this user reads only this version from now on (None: nothing), and remove
        all versions that no user needs."""
        with self._lock:
            self._used[user] = set() if version is None else {version}
            needed = {str(v) for versions in self._used.values() for v in versions}
            if not needed:
                shutil.rmtree(self._root, ignore_errors=True)
                return
            for old in self._root.iterdir():
                if old.name not in needed:
                    shutil.rmtree(old, ignore_errors=True)
