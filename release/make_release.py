"""Make a release: build the archives, check them, sum and sign them, and try them from an index.

python release/make_release.py                 a release of this checkout, in dist/
python release/make_release.py --tag           the same, and its tag in git
python release/make_release.py --rehearse      of any checkout; what is missing is printed

docs/releasing.md has the steps before and after. Needs the extra [release], and git.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from archives import CHECKSUMS, archives_in, sdist_faults, wheel_faults, write_checksums
from local_index import served, without_proxy

ROOT = Path(__file__).parent.parent
NAME = "jaxrl_async"
WHEEL = re.compile(r"releases/download/v([\d.]+)")
"""Version of the wheel that a notebook falls back to."""
TRIAL_TOOLS = ("pytest", "pytest-timeout", "pytest-asyncio", "pytest-xdist", "hypothesis")
TRIAL_TESTS = ("tests/buffer", "tests/algorithms", "tests/launch/test_docker.py")
"""Tests that are run in the unpacked source archive: quick ones that need no further package."""
FEW_STEPS = (
    "run.steps=2",
    "trainer.warmup_steps=1",
    "warm_start.steps=2",
    "sampler.slots=4",
    "data.addition.eval_size=8",
    "algorithm.groups_per_step=2",
    "algorithm.group_size=2",
)
"""Settings with which README's command takes half a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a checkout says of the release that it is."""

    version: str
    changelog: str
    citation: str
    wheels_named: Mapping[str, str]  # by notebook: version of the wheel that its first cell names
    changed: str = ""  # what `git status --porcelain` prints
    tags: Sequence[str] = ()
    origin: str = ""  # address of the remote; "": there is none
    repository: str = ""  # pyproject.toml, project.urls


def faults_of(state: State) -> list[str]:
    """Return what keeps a checkout from being a release, a sentence each."""
    version = state.version
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        return [f"{NAME}/__init__.py has version {version}: write the release's, as 1.2.3."]
    faults = []
    headings = re.findall(r"^## (.+)$", state.changelog, re.MULTILINE)
    dated = re.fullmatch(rf"{re.escape(version)} \((\d{{4}}-\d\d-\d\d)\)", "".join(headings[1:2]))
    if headings[:1] != ["Unreleased"] or dated is None:
        faults.append(f"CHANGELOG.md: after Unreleased, begin a section '{version} (YYYY-MM-DD)'.")
    elif f"date-released: {dated[1]}" not in state.citation:
        faults.append(f"CITATION.cff: date-released must be {dated[1]}, as in CHANGELOG.md.")
    if not re.search(rf"^version: {re.escape(version)}$", state.citation, re.MULTILINE):
        faults.append(f"CITATION.cff: version must be {version}.")
    faults += [
        f"notebooks/{name}: the first cell names the wheel of {named}; write {version}."
        for name, named in state.wheels_named.items()
        if named != version
    ]
    if state.changed:
        faults.append(f"There are changes that are not committed:\n{state.changed.rstrip()}")
    if f"v{version}" in state.tags:
        faults.append(f"The tag v{version} exists: this version has been released.")
    if _plain(state.origin) != _plain(state.repository):
        faults.append(
            f"git's origin is {state.origin or 'missing'}, and pyproject.toml says "
            f"{state.repository}: one of them is not where the release will be."
        )
    return faults


def _plain(address: str) -> str:
    """Return an address of git without what differs between its spellings."""
    address = re.sub(r"^(?:\w+://(?:[^@/]+@)?|git@)", "", address).replace(":", "/", 1)
    return address.removesuffix("/").removesuffix(".git").lower()


def state_of(root: Path) -> State:
    """Read a checkout. Raises CalledProcessError where git fails."""
    remotes = git(root, "remote").split()
    package = (root / NAME / "__init__.py").read_text("utf-8")
    return State(
        version="".join(re.findall(r'^__version__ = "(.+)"$', package, re.MULTILINE)),
        changelog=(root / "CHANGELOG.md").read_text("utf-8"),
        citation=(root / "CITATION.cff").read_text("utf-8"),
        wheels_named={
            path.name: "".join(WHEEL.findall(path.read_text("utf-8"))[:1])
            for path in sorted(root.glob("notebooks/*.ipynb"))
        },
        changed=git(root, "status", "--porcelain"),
        tags=git(root, "tag").split(),
        origin=git(root, "remote", "get-url", "origin").strip() if "origin" in remotes else "",
        repository=urls_of(root)["Repository"],
    )


def urls_of(root: Path) -> dict[str, str]:
    """Return the project's addresses by name."""
    return dict(tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["urls"])


def git(root: Path, *words: str) -> str:
    """Run git in a checkout and return what it prints. Raises CalledProcessError."""
    done = subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout


def tracked_files(root: Path) -> list[str]:
    """Return the files of a checkout that git tracks and that exist."""
    names = git(root, "ls-files", "-z").split("\0")
    return [name for name in names if name and os.path.lexists(root / name)]


def build(root: Path, out: Path) -> list[str]:
    """Build the source archive, and the wheel from it; return what is wrong with them.

    Only tracked files are used. `out` is emptied of earlier archives. Raises CalledProcessError.
    """
    tracked = tracked_files(root)
    out.mkdir(parents=True, exist_ok=True)
    for old in [*archives_in(out), *out.glob(f"{CHECKSUMS}*")]:
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="jaxrl-release-") as scratch:
        for name in tracked:
            (copy := Path(scratch, name)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy, follow_symlinks=False)
        run(sys.executable, "-m", "build", "--outdir", str(out.resolve()), scratch)
    *_, wheel = out.glob("*.whl")
    *_, sdist = out.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    return [
        *wheel_faults(wheel, tracked, list(urls_of(root).values())),
        *sdist_faults(sdist, tracked),
    ]


def sign(told: Path, key: str) -> Path:
    """Sign a file with a key of gpg; return the signature. Raises CalledProcessError."""
    signature = told.with_name(f"{told.name}.asc")
    words = ["--batch", "--yes", "--local-user", key, "--armor", "--detach-sign"]
    run("gpg", *words, "--output", str(signature), str(told))
    return signature


def sign_as_account(told: Path) -> Path:
    """Sign a file as an account that sigstore knows, without a key; return the signature.

    sigstore reads SIGSTORE_IDENTITY_TOKEN, or asks to log in with a browser. Raises SystemExit.
    """
    if importlib.util.find_spec("sigstore") is None:
        raise SystemExit("make_release.py: --sigstore needs its package: pip install sigstore")
    bundle = told.with_name(f"{told.name}.sigstore.json")
    words = [sys.executable, "-m", "sigstore", "sign", "--bundle", str(bundle), str(told)]
    print("+", *words, flush=True)
    if subprocess.run(words).returncode:  # its output is shown: it asks to open an address
        raise SystemExit(
            f"make_release.py: {told} is not signed: sigstore failed (see above). It needs the "
            "internet, and a login or SIGSTORE_IDENTITY_TOKEN. Without --sigstore it is not asked."
        )
    return bundle


def trial(root: Path, out: Path, version: str) -> None:
    """Install the package by name from an index of `out` in a new environment, run README's
    command, and tests of the source archive. Raises CalledProcessError."""
    minor = sys.version_info.minor
    constraints = root / ("constraints.txt" if minor == 11 else f"constraints-3.{minor}.txt")
    with tempfile.TemporaryDirectory(prefix="jaxrl-trial-") as scratch, served(out) as address:
        environment = {**without_proxy(os.environ), "JAX_PLATFORMS": "cpu"}
        environment.pop("PYTHONPATH", None)
        run(sys.executable, "-m", "venv", f"{scratch}/venv")
        bin_ = Path(scratch, "venv", "bin")
        pip = [
            str(bin_ / "python"),
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "--quiet",
        ]
        pip += ["--extra-index-url", address]
        pip += ["-c", str(constraints), f"{NAME}=={version}", *TRIAL_TOOLS]
        run(*pip, env=environment)
        told = run(str(bin_ / "jaxrl-async"), "--version", env=environment, cwd=scratch)
        if version not in told:
            raise SystemExit(f"make_release.py: {NAME}=={version} says that it is {told.strip()}.")
        command = readme_command((root / "README.md").read_text("utf-8"))
        run(str(bin_ / command[0]), *command[1:], *FEW_STEPS, env=environment, cwd=scratch)
        *_, sdist = out.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
        unpacked = Path(scratch, sdist.name.removesuffix(".tar.gz"))
        pytest = [str(bin_ / "python"), "-m", "pytest", "-q", "-n0", *TRIAL_TESTS]
        run(*pytest, env=environment, cwd=unpacked)


def readme_command(page: str) -> list[str]:
    """Return the command that README runs after it has installed the package by name."""
    found = re.search(rf"^pip install {NAME} && (.+)$", page, re.MULTILINE)
    if found is None:
        raise SystemExit(f"make_release.py: README.md has no line 'pip install {NAME} && COMMAND'.")
    return found[1].split()


def run(*words: str, env: Mapping[str, str] | None = None, cwd: str | Path | None = None) -> str:
    """Print a command, run it and return its output, which is shown where it fails. Raises
    CalledProcessError."""
    print("+", *words, flush=True)
    done = subprocess.run(words, env=env, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
        done.check_returncode()
    return done.stdout


def main(words: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="folder of the archives (default: dist)"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="make archives of any checkout, without a tag"
    )
    parser.add_argument(
        "--build-only", action="store_true", help="leave out the trial, which installs JAX"
    )
    parser.add_argument(
        "--gpg-key", help="sign the checksums with this key (default: git's user.signingkey)"
    )
    parser.add_argument(
        "--sigstore", action="store_true", help="sign the checksums with a login, by sigstore"
    )
    parser.add_argument("--tag", action="store_true", help="tag the commit vVERSION at the end")
    args = parser.parse_args(words)
    if args.tag and (args.rehearse or args.build_only):
        parser.error("--tag needs the whole check: leave out --rehearse and --build-only")
    state = state_of(ROOT)
    if faults := faults_of(state):
        print("This is no release yet:", *faults, sep="\n  ", file=sys.stderr)
        if not args.rehearse:
            return 2
    try:
        if faults := build(ROOT, args.out):
            print("The archives are wrong:", *faults, sep="\n  ", file=sys.stderr)
            return 1
        told = write_checksums(args.out)
        signing = subprocess.run(
            ["git", "config", "user.signingkey"], capture_output=True, text=True
        )
        key = args.gpg_key or signing.stdout.strip()
        if args.sigstore:
            sign_as_account(told)
        if key:
            sign(told, key)
        elif not args.sigstore:
            print("not signed: there is no key (--gpg-key, --sigstore, or git's user.signingkey)")
        if not args.build_only:
            trial(ROOT, args.out, state.version)
        if args.tag:
            signed = ("--local-user", key) if key else ("--annotate",)
            tag = f"v{state.version}"
            git(ROOT, "tag", *signed, "--message", f"{NAME} {state.version}", tag)
            print(f"tagged {tag}; git push origin {tag} sends it")
    except subprocess.CalledProcessError as error:
        print(f"make_release.py: {error}", file=sys.stderr)
        return 1
    print(*(str(path) for path in [*archives_in(args.out), told]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
