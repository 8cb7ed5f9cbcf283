"""The code of a user's own decoder: a class in a file, known by its name and a hash of the text.

A class is run only if its file was named on this machine (model.decoder, Policy.from_pretrained, or
the run that a sampler joined). The code named in a model's directory is compared with those.
"""

import hashlib
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_async.config.userfile import is_own, load_attribute
from jaxrl_async.errors import CheckpointError, ConfigError

OWN_TYPE = "jaxrl_async_own"
"""model_type in config.json, unknown to transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCode:
    """A user's class; equal if name and text are, for any path of the file."""

    name: str
    sha256: str  # of the file, hexadecimal
    file: str = field(default="", compare=False)  # path, for other processes on the machine


class _Loaded(NamedTuple):
    cls: Any
    text: bytes


_loaded: dict[OwnCode, _Loaded] = {}
_lock = threading.Lock()


def load_code(named: str, where: str = "model.decoder") -> OwnCode:
    """Load the class FILE.py:CLASS. Raises ConfigError, which begins with `where`."""
    if not is_own(named):
        raise ConfigError(f"{where} = {named!r}: must be FILE.py:CLASS, a file and a class in it.")
    file, _, name = named.rpartition(":")
    path = Path(file).resolve()
    with _lock:
        # The file is run before it is read, so a missing file gives load_attribute's message.
        cls = load_attribute(f"{path}:{name}", where, "class", lambda v: isinstance(v, type))
        text = path.read_bytes()
        code = OwnCode(name=name, sha256=hashlib.sha256(text).hexdigest(), file=str(path))
        _loaded.setdefault(code, _Loaded(cls, text))
    return code


def is_loaded(code: OwnCode) -> bool:
    """Return whether a file with this class and text was named in this process."""
    return code in _loaded


def class_of(code: OwnCode) -> Any:
    """Return the class. If another process of the run named it, it is loaded from the same path.

    Raises ConfigError if the file is missing or has another text.
    """
    if code in _loaded:
        return _loaded[code].cls
    path = Path(code.file)
    if not code.file or not path.is_file():
        raise ConfigError(
            f"the model's layers are {code.name} of {code.file or 'a file'}, which is not on this "
            "machine. Copy it from the machine that started the run to the same path."
        )
    if (here := hashlib.sha256(path.read_bytes()).hexdigest()) != code.sha256:
        raise ConfigError(
            f"{path} is not the file that the run was started with (sha256 {here[:12]}, not "
            f"{code.sha256[:12]}), so {code.name} may differ. Copy the run's file."
        )
    load_code(f"{path}:{code.name}", "the run's model.decoder")
    return class_of(code)


def text_of(code: OwnCode) -> bytes:
    """Return the text of the file at the time the class was loaded."""
    class_of(code)
    return _loaded[code].text


def check_trusted(code: OwnCode, where: str) -> None:
    """Raise CheckpointError unless a file with this class and text was named in this process.

    where: the config.json that names it.
    """
    if code in _loaded:
        return
    copy = Path(where).parent / Path(code.file).name
    others = [c.file for c in _loaded if c.name == code.name]
    if others:
        raise CheckpointError(
            f"{where}: the weights belong to another version of {code.name} (sha256 "
            f"{code.sha256[:12]}) than the file {others[0]}. Restore the file; the version that "
            f"the weights were saved with is {copy}."
        )
    raise CheckpointError(
        f"{where}: the layers are a user-defined class, and code in a model's directory is never "
        f"run without permission. Read {copy}; if you trust it, name it: "
        f"model.decoder={copy}:{code.name} in a run, --decoder {copy}:{code.name} in a "
        'command, Policy.from_pretrained(..., decoder="...") in Python.'
    )


def save_code(code: OwnCode, folder: Path) -> None:
    """Write a copy of the file into a directory."""
    (folder / Path(code.file).name).write_bytes(text_of(code))


def check_unchanged(code: OwnCode | None, folder: Path, *, resumed: bool) -> None:
    """Keep a copy of a run's own decoder in `folder`; in a resumed run, compare with the copy.
    Raises ConfigError if the text has changed."""
    if code is None:
        return
    kept = folder / Path(code.file).name
    if resumed and kept.is_file():
        if kept.read_bytes() != text_of(code):
            raise ConfigError(
                f"model.decoder: {code.file} has changed since the run began. Restore its text "
                f"(the run's copy is {kept}), or start a new run."
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_code(code, folder)
