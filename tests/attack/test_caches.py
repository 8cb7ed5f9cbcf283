"""What is executed from a cache is what this user's processes wrote there: kernels and programs
that are planted, damaged or cut are made again, and never end the process."""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from other_users import NOBODY, as_root, one_who_is_nobody

from jaxrl_async import private_folder as folders
from jaxrl_async.cpu import kernel_library
from jaxrl_async.cpu.compiler import NotBuiltError, compiler_here
from jaxrl_async.private_folder import (
    NotPrivateError,
    check_own_file,
    made_private,
    private_folder,
    readable_folders,
    write_whole,
)
from jaxrl_async.run.builders import devices
from jaxrl_async.run.builders.program_cache import VerifiedPrograms, keep_used, usable_folder

SOURCE = """
#include <cstdlib>
extern "C" {
int jaxrl_async_product() { return 41 + 1; }
int jaxrl_async_rotate() { return 0; }
int jaxrl_async_attend() { return 0; }
int jaxrl_async_attend_new() { return 0; }
}
"""
PLANTED = """
#include <cstdio>
__attribute__((constructor)) static void runs() {
    if (FILE *f = std::fopen("MARK", "w")) std::fclose(f);
}
"""


def has_compiler() -> bool:
    try:
        compiler_here()
    except NotBuiltError:
        return False
    return True


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give this test a folder of caches, and a small source in the place of the kernels'."""
    return small_kernels(tmp_path, monkeypatch)


def small_kernels(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which the kernels of a small source are kept, below base."""
    if not has_compiler():
        pytest.skip("no compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "cache"))
    source = base / "kernels.cc"
    source.write_text(SOURCE)
    monkeypatch.setattr(kernel_library, "__file__", str(base / "library.py"))
    kernels = kernel_library.CpuKernels(files=("kernels.cc",), names=kernel_library.SAMPLING.names)
    monkeypatch.setattr(kernel_library, "SAMPLING", kernels)
    return base / "cache" / "jaxrl_async" / "kernels"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give this test a folder that all users can look into, with one for temporary files in it
    (tmp) and root's home (home), which the environment names."""
    with tempfile.TemporaryDirectory(prefix="machine-") as made:
        base = Path(made)
        base.chmod(0o755)
        (base / "home").mkdir(mode=0o755)
        (base / "tmp").mkdir()
        (base / "tmp").chmod(0o1777)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", str(base / "home"))
        monkeypatch.setattr(tempfile, "tempdir", str(base / "tmp"))
        forget_spares()
        yield base
        forget_spares()


def forget_spares() -> None:
    """Have this process look for spare folders as a new one does."""
    folders._fallback.cache_clear()
    folders._warn_once.cache_clear()


@pytest.fixture
def no_compile_cache() -> Iterator[None]:
    """Give JAX its cache of compiled programs back afterwards."""
    before = jax.config.jax_compilation_cache_dir
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)


def loaded() -> int:
    """Load the library as a new process does, build it if need be, and call it."""
    kernel_library._load.cache_clear()
    return int(kernel_library._load(kernel_library.SAMPLING).jaxrl_async_product())


def the_file(folder: Path) -> Path:
    (file,) = folder.glob("*.so")
    return file


def planted(tmp_path: Path) -> tuple[bytes, Path]:
    """Return a library that marks that it was loaded, and the mark."""
    mark, source, made = tmp_path / "executed", tmp_path / "plant.cc", tmp_path / "plant.so"
    source.write_text(PLANTED.replace("MARK", str(mark)))
    subprocess.run([compiler_here(), "-shared", "-fPIC", source, "-o", made], check=True)
    return made.read_bytes(), mark


def test_a_kernel_is_built_once_with_its_sum_and_is_this_users_alone(
    caches: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert loaded() == 42
    file = the_file(caches)
    assert caches.stat().st_mode & 0o777 == 0o700 and file.stat().st_mode & 0o777 == 0o600
    said = subprocess.run(["sha256sum", file], capture_output=True, text=True, check=True).stdout
    assert Path(f"{file}.sha256").read_text() == said.split()[0]
    before = file.stat().st_ino
    assert loaded() == 42
    assert file.stat().st_ino == before and not caplog.records


@pytest.mark.full
@pytest.mark.parametrize("size", [0, 4, 4096, -1])
def test_a_cut_kernel_is_built_again(
    caches: Path, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It was a bus error at every start."""
    assert loaded() == 42
    file = the_file(caches)
    os.truncate(file, size if size >= 0 else file.stat().st_size - 1)
    assert loaded() == 42
    assert "are rebuilt: it is damaged" in caplog.text


def test_a_library_that_is_loaded_does_not_see_what_becomes_of_its_file(caches: Path) -> None:
    assert loaded() == 42
    kernel_library._load.cache_clear()
    kernels = kernel_library._load(kernel_library.SAMPLING)
    os.truncate(the_file(caches), 0)
    assert kernels.jaxrl_async_product() == kernels.jaxrl_async_rotate() + 42


def test_a_changed_bit_and_a_lost_sum_are_seen(caches: Path) -> None:
    assert loaded() == 42
    file = the_file(caches)
    good = file.read_bytes()
    bad = bytearray(good)
    bad[len(bad) // 2] ^= 1
    file.write_bytes(bad)
    assert loaded() == 42 and file.read_bytes() == good
    Path(f"{file}.sha256").unlink()
    assert loaded() == 42 and Path(f"{file}.sha256").exists()


def test_a_planted_library_is_not_loaded(caches: Path, tmp_path: Path) -> None:
    content, mark = planted(tmp_path)
    assert loaded() == 42
    file = the_file(caches)
    file.write_bytes(content)
    assert loaded() == 42 and not mark.exists()
    elsewhere = tmp_path / "plant.so"
    file.unlink()
    file.symlink_to(elsewhere)
    assert loaded() == 42 and not mark.exists() and not file.is_symlink()
    file.unlink()
    os.mkfifo(file)
    assert loaded() == 42 and file.is_file()


@as_root
def test_another_users_library_is_not_loaded_though_its_sum_is_right(
    caches: Path, tmp_path: Path
) -> None:
    content, mark = planted(tmp_path)
    assert loaded() == 42
    file = the_file(caches)
    write_whole(Path(f"{file}.sha256"), kernel_library._sum(content))
    write_whole(file, content)
    os.chown(file, NOBODY, NOBODY)
    assert loaded() == 42 and not mark.exists()


@as_root
def test_another_users_folder_is_not_used(
    caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    content, mark = planted(tmp_path)
    assert loaded() == 42
    file = the_file(caches)
    file.write_bytes(content)
    Path(f"{file}.sha256").write_bytes(kernel_library._sum(content))
    for one in (caches, file, Path(f"{file}.sha256")):
        os.chown(one, NOBODY, NOBODY)
    caches.chmod(0o777)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    forget_spares()
    assert loaded() == 42 and not mark.exists()
    assert "is not a folder of this user" in caplog.text
    forget_spares()
    assert the_file(tmp_path / "tmp" / f"jaxrl_async-{os.geteuid()}" / "kernels").exists()


def test_a_kernel_that_lacks_a_function_is_built_again_and_then_given_up(
    caches: Path, tmp_path: Path
) -> None:
    assert loaded() == 42
    file = the_file(caches)
    content, _ = planted(tmp_path)  # a library without kernels, whose sum is right
    write_whole(Path(f"{file}.sha256"), kernel_library._sum(content))
    write_whole(file, content)
    assert loaded() == 42
    (tmp_path / "kernels.cc").write_text("int nothing;")
    with pytest.raises(NotBuiltError, match="cannot be used: it lacks product, rotate"):
        loaded()


@pytest.mark.full
def test_processes_that_build_at_once_all_get_a_sound_library(caches: Path) -> None:
    compiler, found, errors = compiler_here(), [], []
    path = made_private(caches) / "all.so"
    source = Path(kernel_library.__file__).with_name("kernels.cc")

    def build() -> None:
        try:
            for _ in range(3):
                kernel_library._compile(compiler, source, path)
            found.append(kernel_library._valid_content(path))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(set(found)) == 1 and len(found) == 3


# ---- folders and files


def test_a_folder_that_others_can_change_is_closed_to_them(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    assert made_private(folder).stat().st_mode & 0o777 == 0o700
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(NotPrivateError):
        made_private(link)


def test_a_file_that_others_can_change_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_whole(file, b"content")
    check_own_file(file.stat(), file)
    for mode in (0o620, 0o602):
        file.chmod(mode)
        with pytest.raises(NotPrivateError, match="can be changed by other users"):
            check_own_file(file.stat(), file)


def test_a_file_is_replaced_whole_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    write_whole(file, b"first")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(file, b"second")
    assert file.read_bytes() == b"first" and list(tmp_path.iterdir()) == [file]


def test_the_private_folder_is_below_the_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert private_folder("some") == tmp_path / "jaxrl_async" / "some"


@as_root
@pytest.mark.parametrize("home", ["/", "home", "home/absent"])
def test_a_home_that_cannot_be_written_to_has_a_spare(
    machine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, home: str
) -> None:
    """HOME=/ is that of a container whose user has no name."""
    monkeypatch.setenv("HOME", str(machine / home))
    with one_who_is_nobody():
        assert private_folder("some") == machine / "tmp" / f"jaxrl_async-{NOBODY}" / "some"
        assert readable_folders("some") == [private_folder("some")]
    assert "Permission denied" in caplog.text and "set XDG_CACHE_HOME" in caplog.text


def test_without_a_home_there_is_a_spare(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    assert private_folder("some") == machine / "tmp" / f"jaxrl_async-{os.geteuid()}" / "some"
    assert readable_folders("some") == [private_folder("some")]


def test_a_file_system_that_refuses_modes_or_cannot_be_written_to_has_a_spare(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_home, chmod = machine / "home" / ".cache" / "jaxrl_async" / "some", Path.chmod
    in_home.mkdir(parents=True)
    in_home.chmod(0o777)

    def refused(path: Path, mode: int) -> None:
        if path == in_home:
            raise PermissionError(1, "Operation not permitted", str(path))
        chmod(path, mode)

    spare = machine / "tmp" / f"jaxrl_async-{os.geteuid()}" / "some"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "chmod", refused)
        assert private_folder("some") == spare
    in_home.chmod(0o700)
    assert private_folder("some") == in_home
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode, **more: path != in_home and access(path, mode, **more)
    )
    assert private_folder("some") == spare
    assert readable_folders("some") == [in_home, spare], "what it has can still be read"


@pytest.mark.parametrize("kind", ["file", "dangling", "link"])
def test_what_is_no_folder_is_not_used(machine: Path, kind: str) -> None:
    def put(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "file":
            path.touch()
        else:
            path.symlink_to(machine / ("absent" if kind == "dangling" else "home"))

    mine = machine / "tmp" / f"jaxrl_async-{os.geteuid()}"
    put(machine / "home" / ".cache" / "jaxrl_async" / "some")
    assert private_folder("some") == mine / "some"
    shutil.rmtree(mine)
    put(mine)
    forget_spares()
    made = private_folder("some")
    assert made.parent == machine / "tmp" and made != mine
    assert made.stat().st_mode & 0o777 == 0o700 and readable_folders("some") == []


@as_root
@pytest.mark.parametrize("mode", [0o755, 0o775])
def test_kernels_that_root_keeps_for_all_are_used(
    machine: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """They are in an image, or on a disk that is read alone; not so if others can write there."""
    folder = small_kernels(machine, monkeypatch)
    assert loaded() == 42
    content = the_file(folder).read_bytes()
    for path in (folder, *folder.iterdir()):
        path.chmod(mode if path == folder else 0o644)
    built: list[Path] = []

    def build(compiler: str, source: Path, path: Path) -> None:
        built.append(path)
        write_whole(kernel_library._sum_of(path), kernel_library._sum(content))
        write_whole(path, content)

    monkeypatch.setattr(kernel_library, "_compile", build)
    with one_who_is_nobody():
        assert loaded() == 42
        assert loaded() == 42
    spare = machine / "tmp" / f"jaxrl_async-{NOBODY}" / "kernels"
    assert [path.parent for path in built] == ([] if mode == 0o755 else [spare])


# ---- programs that JAX keeps


class Kept:
    """JAX's own cache: it writes an entry once."""

    def __init__(self, folder: Path) -> None:
        self._path = folder

    def get(self, key: str) -> bytes | None:
        file = self._path / f"{key}-cache"
        return file.read_bytes() if file.exists() else None

    def put(self, key: str, value: bytes) -> None:
        file = self._path / f"{key}-cache"
        if not file.exists():
            file.write_bytes(value)


@pytest.fixture
def programs(tmp_path: Path) -> VerifiedPrograms:
    return VerifiedPrograms(Kept(tmp_path), str(tmp_path))


def test_an_entry_comes_back_and_a_damaged_one_is_made_again(
    programs: VerifiedPrograms, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert programs.get("a") is None
    programs.put("a", b"program a")
    assert programs.get("a") == b"program a"
    file = tmp_path / "a-cache"
    for damaged in (b"program b", b"program", b"", b"program a "):
        file.write_bytes(damaged)
        assert programs.get("a") is None and not file.exists()
        programs.put("a", b"program a")
        assert programs.get("a") == b"program a"
    warned = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 1, "the first says it"


def test_programs_that_were_not_used_for_longest_make_room(
    programs: VerifiedPrograms, tmp_path: Path
) -> None:
    """Each has an entry of 100 bytes and a mark of 64."""
    (tmp_path / "notes.txt").write_bytes(bytes(1000))
    for age, key in ((30, "a"), (20, "b"), (10, "c")):
        before = set(tmp_path.iterdir())
        programs.put(key, key.encode() * 100)
        for file in set(tmp_path.iterdir()) - before:
            os.utime(file, (time.time() - age,) * 2)
    keep_used(tmp_path, 3 * 164)
    assert programs.get("a") == b"a" * 100, "all have room, and this one is used"
    keep_used(tmp_path, 2 * 164)
    assert [programs.get(key) for key in "abc"] == [b"a" * 100, None, b"c" * 100]
    assert len(list(tmp_path.glob("*.sum"))) == 2 and (tmp_path / "notes.txt").exists()
    keep_used(tmp_path, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_processes_that_make_room_at_once_remove_no_more_than_one_would(
    programs: VerifiedPrograms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for age, key in ((30, "a"), (20, "b"), (10, "c")):
        before = set(tmp_path.iterdir())
        programs.put(key, key.encode() * 100)
        for file in set(tmp_path.iterdir()) - before:
            os.utime(file, (time.time() - age,) * 2)
    unlink = Path.unlink

    def after_another(path: Path, **how: bool) -> None:
        unlink(path, **how)  # it has listed the same files
        unlink(path, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", after_another)
        keep_used(tmp_path, 2 * 164)
    assert [programs.get(key) for key in "abc"] == [None, b"b" * 100, b"c" * 100]


def test_an_entry_goes_before_its_mark_though_that_is_older(
    programs: VerifiedPrograms, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An entry that is left without a mark is warned of as damaged, or another user's."""
    programs.put("a", b"a" * 100)
    (mark,) = tmp_path.glob("*.sum")
    os.utime(mark, (mark.stat().st_mtime - 1,) * 2)
    keep_used(tmp_path, 163)
    assert mark.exists() and not (tmp_path / "a-cache").exists()
    assert programs.get("a") is None and not caplog.records


def test_an_entry_under_another_key_does_not_count(
    programs: VerifiedPrograms, tmp_path: Path
) -> None:
    programs.put("a", b"program a")
    shutil.copy(tmp_path / "a-cache", tmp_path / "b-cache")
    assert programs.get("b") is None and programs.get("a") == b"program a"


def test_two_processes_that_keep_the_same_program_at_once_leave_a_sound_one(
    tmp_path: Path,
) -> None:
    """Their entries differ: each holds how long its own compilation took."""
    one, two = (VerifiedPrograms(Kept(tmp_path), str(tmp_path)) for _ in range(2))
    one.put("a", b"in 3 s")
    two.put("a", b"in 4 s")
    assert one.get("a") == two.get("a") == b"in 3 s"


@as_root
def test_what_another_user_has_planted_is_not_executed(
    programs: VerifiedPrograms, tmp_path: Path
) -> None:
    programs.put("a", b"program a")
    (mark,) = tmp_path.glob("*.sum")
    os.chown(mark, NOBODY, NOBODY)
    assert programs.get("a") is None
    programs.put("a", b"program a")
    (mark,) = tmp_path.glob("*.sum")
    assert mark.stat().st_uid == 0 and programs.get("a") == b"program a"
    mark.chmod(0o666)
    assert programs.get("a") is None


def test_a_renamed_mark_is_no_mark(programs: VerifiedPrograms, tmp_path: Path) -> None:
    """Who may rename files here can give an own mark of this user's another name."""
    programs.put("a", b"program a")
    (mark,) = tmp_path.glob("*.sum")
    other = VerifiedPrograms(Kept(tmp_path), str(tmp_path))
    (tmp_path / "b-cache").write_bytes(b"planted")
    from jaxrl_async.run.builders import program_cache

    mark.rename(tmp_path / f"{program_cache._sum('b', b'planted')}.sum")
    assert other.get("b") is None


@as_root
def test_another_users_folder_of_programs_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mine = usable_folder(tmp_path / "runs" / ".jax_cache")
    assert mine == tmp_path / "runs" / ".jax_cache" and mine.stat().st_mode & 0o777 == 0o700
    mine.chmod(0o777)
    assert usable_folder(mine).stat().st_mode & 0o777 == 0o755
    os.chown(mine, NOBODY, NOBODY)
    assert usable_folder(mine) == tmp_path / "cache" / "jaxrl_async" / "programs"
    assert "belongs to another user" in caplog.text


@as_root
def test_no_folder_of_programs_ends_a_run(
    machine: Path,
    no_compile_cache: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(devices, "verify_compiled_programs", lambda: None)
    cache = machine / ".jax_cache"
    cache.mkdir(mode=0o755)
    os.chown(cache, NOBODY - 1, NOBODY - 1)
    with one_who_is_nobody():
        devices.keep_compiled_programs(cache)
        spare = machine / "tmp" / f"jaxrl_async-{NOBODY}" / "programs"
        assert devices.compile_cache_folder() == str(spare)
        shutil.rmtree(spare.parent)
        forget_spares()
    (machine / "tmp").chmod(0o755)
    with one_who_is_nobody():
        devices.keep_compiled_programs(cache)
        assert devices.compile_cache_folder() == ""
    assert "compiled programs are not kept" in caplog.text
    assert "Set JAX_COMPILATION_CACHE_DIR to a folder that can be written to" in caplog.text


@pytest.mark.parametrize("kind", ["file", "dangling"])
def test_what_is_no_folder_of_programs_has_a_spare(machine: Path, kind: str) -> None:
    cache = machine / ".jax_cache"
    if kind == "file":
        cache.touch()
    else:
        cache.symlink_to(machine / "absent")
    assert usable_folder(cache) == machine / "home" / ".cache" / "jaxrl_async" / "programs"


def test_a_folder_of_programs_whose_modes_cannot_be_changed_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(path: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    tmp_path.chmod(0o777)
    monkeypatch.setattr(Path, "chmod", refused)
    assert usable_folder(tmp_path) == tmp_path and not caplog.records


def test_a_team_hears_that_its_folder_of_programs_is_closed_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o2775)
    assert usable_folder(tmp_path) == tmp_path
    assert tmp_path.stat().st_mode & 0o7777 == 0o2755
    assert "(mode 2755, it was 2775)" in caplog.text
    caplog.clear()
    assert usable_folder(tmp_path) == tmp_path and not caplog.records


PROGRAM = """
import collections, sys
from pathlib import Path
import jax, jax.numpy as jnp
from jax._src import monitoring
from jaxrl_async.run.builders.devices import keep_compiled_programs
keep_compiled_programs(Path(sys.argv[1]))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
events = collections.Counter()
monitoring.register_event_listener(lambda name, **_: events.update([name.rpartition("/")[2]]))
jax.jit(lambda x: jnp.sin(x) @ x.T)(jnp.ones((8, 8))).block_until_ready()
print(events["cache_hits"], events["cache_misses"])
"""


@pytest.mark.full
@pytest.mark.exhaustive
def test_jax_compiles_damaged_programs_again(tmp_path: Path) -> None:
    def run() -> tuple[int, int]:
        ours = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES")
        environment = {k: v for k, v in os.environ.items() if k not in ours}
        words = [sys.executable, "-c", PROGRAM, tmp_path / ".jax_cache"]
        done = subprocess.run(words, check=True, env=environment, capture_output=True, text=True)
        hits, misses = map(int, done.stdout.split())
        return hits, misses

    hits, misses = run()
    assert hits == 0 and misses >= 1
    assert run() == (misses, 0)
    for file in (tmp_path / ".jax_cache").glob("*-cache"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    assert run() == (0, misses)
    assert run() == (misses, 0)
