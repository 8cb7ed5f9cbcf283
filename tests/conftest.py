"""Forced host devices for every test: set before anything imports JAX."""

import atexit
import fcntl
import gc
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from compile_flags import QUICK_COMPILE
from hypothesis import HealthCheck, settings

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["PJRT_NPROC"] = "32"
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count=8 {QUICK_COMPILE}")
# What one test file, or a process that it starts, has compiled need not be compiled again.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder = tempfile.mkdtemp(prefix="jaxrl-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Where Python writes no bytecode down (images of containers often say so), each process that a
# test starts would compile this package's source again, and each worker every test.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# How slow a machine is says nothing of what is tested.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
# tests/contract/mutant.py: no example of one mutation is tried on the next one
settings.register_profile("mutant", settings.get_profile("patient"), database=None)
settings.register_profile(  # pytest -n0 -m '' --timeout=0 --hypothesis-profile=long -k fuzz
    "long",
    max_examples=20_000,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


MANY = 20
"""Exhaustive tests in a file that begins before the others although time is limited."""


ROOT = Path(__file__).parent.parent
NEEDS_BENCHMARKS = re.compile(r"""["/]benchmarks["/]|\benvironments\(\)""")
"""What a test file contains that uses benchmarks/, which the source archive does not have."""


SLOW_FILE = re.compile(r"^pytestmark = (\[\n    )?pytest\.mark\.(full|exhaustive)\b", re.MULTILINE)
"""What a test file contains whose tests all take long."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out test files that use benchmarks/ where it is missing; see the report's header. Where
    tests that take long are left out, do not import a file of such tests alone."""
    if not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text("utf-8")
    if not (ROOT / "benchmarks").is_dir() and NEEDS_BENCHMARKS.search(text):
        return True
    quick = config.getoption("markexpr") == "not full and not exhaustive"
    return True if quick and SLOW_FILE.search(text) else None


def pytest_report_header() -> str | None:
    if (ROOT / "benchmarks").is_dir():
        return None
    return "benchmarks/ is not here: test files that use it are left out"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--until",
        type=float,
        metavar="SECONDS",
        help="skip the tests that would begin after this time (date +%%s), and say so",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Two workers with a real model each would exhaust a small machine's memory: one waits, and
    its time limit has not begun."""
    if item.get_closest_marker("large") is None:
        return (yield)
    with (Path(tempfile.gettempdir()) / f"jaxrl-large-{os.getuid()}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("until")
    if until is not None and time.time() > until:
        pytest.skip(f"{item.path.name}: the time that --until allows was over")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with most full tests first, so that two workers end at about the same time. Where time
    is limited the order of the others changes each day, and from one Python to the next, so that
    none is always left out, and two Pythons do not leave out the same."""
    full = Counter(item.path for item in items if item.get_closest_marker("full"))
    places: dict[Path, float] = {item.path: -full[item.path] for item in items}
    if (until := config.getoption("until")) is not None:
        draw = random.Random(f"{until // 86_400} {sys.version_info.minor}")
        begin = Counter(
            i.path for i in items if full[i.path] and i.get_closest_marker("exhaustive")
        )
        places |= {path: draw.random() for path in sorted(places) if begin[path] < MANY}
    items.sort(key=lambda item: places[item.path])


def pytest_collection_finish() -> None:
    """What is alive by now lives to the end: collecting garbage need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """Python's collector looks at everything, as in a program that is no test."""
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.freeze()


MOST_MAPPINGS = 15_000
"""Memory mappings of a process after which its compiled programs are dropped; Linux has 65,530."""


@pytest.fixture(autouse=True, scope="module")
def many_programs_end_with_their_module() -> Iterator[None]:
    """Thousands of them in one process exhaust its memory mappings, and the compiler crashes."""
    yield
    drop_programs_if_many()


@pytest.fixture(autouse=True)
def many_programs_end_with_a_long_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module of sixty whole runs alone exhausts them."""
    yield
    if request.node.get_closest_marker("full"):
        drop_programs_if_many()


def drop_programs_if_many() -> None:
    maps = Path("/proc/self/maps")
    if not (jax := sys.modules.get("jax")) or not maps.exists():
        return
    if maps.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def resident_mib() -> Callable[[], float]:
    """Reads this process's resident memory, MiB."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("needs /proc to see memory")
    page = resource.getpagesize() / 2**20
    return lambda: int(statm.read_text(encoding="ascii").split()[1]) * page
