"""Control which environment variables other programs see: programs that a run starts, and programs
that read its process (/proc/PID/environ).

    this process's environment ──without_secrets──> the command that plays an agent program
                               └─hide_secrets─────> what its own memory shows to other processes
"""

import ctypes
import logging
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase

log = logging.getLogger(__name__)

OWN_VARIABLES = "JAXRL_ASYNC_"
"""Prefix of the names of the run's own variables, which other programs do not see."""
SHOWN = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "PWD", "TMPDIR", "TEMP", "TMP", "TZ"),
    *("LANG", "LANGUAGE", "LC_*", "NO_COLOR", "LD_LIBRARY_PATH", "HOSTNAME", "CI", "DISPLAY"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONUTF8"),
    *("PYTHONIOENCODING", "PYTHONHASHSEED", "VIRTUAL_ENV", "PYENV_ROOT", "PYENV_VERSION"),
    *("CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CONDA_EXE", "CONDA_PYTHON_EXE", "MAMBA_ROOT_PREFIX"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_CONFIG_DIRS", "XDG_DATA_HOME", "XDG_DATA_DIRS"),
    *("XDG_STATE_HOME", "XDG_RUNTIME_DIR"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("NODE_EXTRA_CA_CERTS", "PIP_CERT", "NO_PROXY", "no_proxy"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_ASSETS_CACHE", "HF_DATASETS_CACHE", "HUGGINGFACE_HUB_CACHE"),
    *("TRANSFORMERS_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"),
    *("TORCH_HOME", "PIP_CACHE_DIR", "UV_CACHE_DIR", "NLTK_DATA", "PLAYWRIGHT_BROWSERS_PATH"),
    *("JAVA_HOME", "GOPATH", "GOROOT", "CARGO_HOME", "RUSTUP_HOME", "NODE_PATH", "NVM_DIR"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "NVIDIA_VISIBLE_DEVICES"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS"),
)
"""Variables that a command needs to find its programs, files, language, certificates, caches and
devices. Variables that lead to keys (KUBECONFIG, DOCKER_CONFIG, SSH_AUTH_SOCK) are excluded."""
ADDRESSES = (
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "FTP_PROXY", "DOCKER_HOST", "HF_ENDPOINT"),
    *("http_proxy", "https_proxy", "all_proxy", "ftp_proxy"),
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX", "GOPROXY"),
)
"""Variables that a command also sees if their values hold neither a user (a@b) nor a query (?a)."""
USUAL = (
    *("_", "SHLVL", "OLDPWD", "LS_COLORS", "LESS*", "PS1", "MAIL", "EDITOR", "VISUAL", "PAGER"),
    *("COLORTERM", "TERM_*", "HIST*", "WINDOWID", "XDG_S*", "DBUS_*", "DESKTOP_SESSION"),
    *("GLIBC_TUNABLES", "JAX_*", "XLA_*", "TF_CPP_*", "MALLOC_*", "LD_PRELOAD"),
)
"""Variables that are nearly always set, or belong to the run: hiding them is not reported."""
SECRET_NAME = re.compile(
    r"(KEY|TOKEN|SECRET|CREDENTIAL|COOKIE|AUTH|DSN|PAT)(S?\d*$|_)|PASS(WORD|WD|PHRASE)", re.I
)
"""Names of variables whose values are treated as secrets."""
SECRET_VALUE = re.compile(r"://[^/\s@]+@|-----BEGIN [A-Z ]*PRIVATE KEY")
"""Values that are treated as secrets: addresses that contain a password, and private keys."""
KEY_SETTINGS = ("key_variable", "key_env")
"""Suffixes of the names of settings that name an environment variable with a key."""
VLLM_KEY = "VLLM_API_KEY"
SET_DUMPABLE = 4  # from linux/prctl.h
ENV_START, ENV_END = 47, 48
"""Indices of two addresses in /proc/self/stat, counted from the field after the program's name."""


def without_secrets(
    environ: Mapping[str, str], secrets: Collection[str] = (), also: Iterable[str] = ()
) -> dict[str, str]:
    """Return the variables that a program may see: SHOWN, `also`, and ADDRESSES without a password,
    but neither the run's own variables nor the secrets.

    Args:
        environ: all variables.
        secrets: names of variables that hold keys of the run.
        also: names of further variables; NAME* matches all names with this prefix.
    """
    shown = (*SHOWN, *also)
    return {
        name: value
        for name, value in environ.items()
        if (_matches_any(name, shown) or (name in ADDRESSES and not set("@?") & set(value)))
        and not is_private(name, secrets)
    }


def unseen(
    environ: Mapping[str, str], seen: Collection[str], secrets: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the names of hidden variables that a program may miss: all that are not `seen`, except
    the run's own variables and those in USUAL."""
    hidden = (n for n in environ if n not in seen and not is_private(n, secrets))
    return tuple(sorted(name for name in hidden if not _matches_any(name, USUAL)))


def _matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_private(name: str, secrets: Collection[str] = ()) -> bool:
    """Return whether a variable is one of the run's own, or one of its secrets."""
    return name.startswith(OWN_VARIABLES) or name in secrets


def hide_secrets(secrets: Collection[str] = ()) -> tuple[str, ...]:
    """Hide secret variables of this process from other processes. This process and those that it
    starts keep them.

    The values in the environment that the process started with are overwritten, since
    /proc/PID/environ shows them, to root as well. If there was such a value, the process's memory
    is also closed to other processes of the same user (PR_SET_DUMPABLE): no core dump and no
    debugger, except for root. Does nothing if the system is not Linux.

    Args:
        secrets: names of variables that hold keys, in addition to those that look like secrets.

    Returns the names of the hidden variables.
    """
    hidden = tuple(
        name
        for name, value in os.environ.items()
        if value
        and (is_private(name, secrets) or SECRET_NAME.search(name) or SECRET_VALUE.search(value))
    )
    if sys.platform != "linux" or not hidden:
        return ()
    for name in hidden:
        os.environ[name] = os.environ.pop(name)  # moves it: the first copy is overwritten
    with suppress(OSError, ValueError, IndexError):
        _overwrite({os.fsencode(name) for name in hidden})
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(SET_DUMPABLE, 0, 0, 0, 0)
    log.debug("hidden from other processes: %s", ", ".join(hidden))
    return hidden


def _overwrite(names: Collection[bytes]) -> None:
    """Overwrite the values of variables in the environment that this process started with."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[ENV_START]), int(fields[ENV_END])
    address = start
    for entry in ctypes.string_at(start, end - start).split(b"\0") if 0 < start < end else ():
        name, _, value = entry.partition(b"=")
        if name in names:
            ctypes.memset(address + len(name) + 1, 0, len(value))
        address += len(entry) + 1


def key_variables(settings: object) -> set[str]:
    """Return the environment variables that settings (nested, as plain data) name for keys, and
    the key variable of a vLLM server. A task's commands do not see them."""
    named = {VLLM_KEY}
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            if name.endswith(KEY_SETTINGS) and isinstance(value, str):
                named.add(value)
            named |= key_variables(value)
    elif isinstance(settings, list | tuple):
        named = named.union(*(key_variables(value) for value in settings))
    return named
