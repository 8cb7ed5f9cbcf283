"""Archives of a folder, installed by name from an index of this machine; and a signature."""

import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import archives
import local_index
import make_release
import pytest


@pytest.fixture
def keys() -> Iterator[str]:
    """A folder for gpg's keys; its path is short, as that of a socket must be."""
    with tempfile.TemporaryDirectory(prefix="k-") as folder:
        yield folder
        subprocess.run(["gpgconf", "--homedir", folder, "--kill", "all"], capture_output=True)


def tiny_wheel(folder: Path, name: str = "tiny_one", version: str = "1.0") -> Path:
    """A wheel with one module."""
    told = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": "WORD = 'here'\n",
        f"{told}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{told}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
        f"{told}/RECORD": "",
    }
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path := folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


def test_an_archives_project_is_its_normalized_name():
    assert local_index.project_of("Jaxrl_Async-1.0-py3-none-any.whl") == "jaxrl-async"
    assert local_index.project_of("a.b-1.0.tar.gz") == "a-b"


@pytest.mark.full
def test_the_pages_lead_to_the_archives_with_their_checksums(tmp_path):
    wheel = tiny_wheel(tmp_path)
    before = sorted(tmp_path.iterdir())
    with local_index.served(tmp_path) as address:
        front = urllib.request.urlopen(address, timeout=10).read().decode()
        page = urllib.request.urlopen(f"{address}tiny-one/", timeout=10).read().decode()
        got = urllib.request.urlopen(f"{address}../{wheel.name}", timeout=10).read()
    assert 'href="tiny-one/"' in front and address.startswith("http://127.0.0.1:")
    assert f'href="../../{wheel.name}#sha256={archives.checksum(wheel)}"' in page
    assert got == wheel.read_bytes()
    assert sorted(tmp_path.iterdir()) == before


def test_the_environment_keeps_the_hosts_that_need_no_proxy():
    after = local_index.without_proxy({"no_proxy": "host", "PATH": "p"})
    assert after == {"no_proxy": "host,127.0.0.1", "NO_PROXY": "127.0.0.1", "PATH": "p"}


def test_an_empty_folder_and_a_command_without_an_index_are_told(tmp_path, capsys):
    assert local_index.main([str(tmp_path), "true", "INDEX"]) == 2
    assert "has no wheel" in capsys.readouterr().err
    tiny_wheel(tmp_path)
    for words in ([], ["true"], ["INDEX"]):
        assert local_index.main([str(tmp_path), *words]) == 2
        assert "usage" in capsys.readouterr().err


@pytest.mark.full
def test_the_commands_exit_code_is_returned_and_index_is_an_address(tmp_path, capfd):
    tiny_wheel(tmp_path)
    assert local_index.main([str(tmp_path), "echo", "at", "INDEX"]) == 0
    assert capfd.readouterr().out.startswith("at http://127.0.0.1:")
    assert local_index.main([str(tmp_path), "false", "INDEX"]) == 1


@pytest.mark.full
def test_pip_installs_by_name_what_is_there(tmp_path):
    wheel = tiny_wheel(tmp_path / "dist")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps"]
    install = [*pip, "--extra-index-url", "INDEX", "--target", str(tmp_path / "there"), "tiny-one"]
    code = local_index.main([str(wheel.parent), *install])
    assert code == 0 and (tmp_path / "there/tiny_one.py").is_file()


@pytest.mark.full
def test_the_checksums_are_signed_and_a_change_is_found(tmp_path, monkeypatch, keys):
    if shutil.which("gpg") is None:
        pytest.skip("needs gpg")
    monkeypatch.setenv("GNUPGHOME", keys)
    key = ["--batch", "--passphrase", "", "--quick-generate-key", "release@example.org", "ed25519"]
    subprocess.run(["gpg", *key], check=True, capture_output=True)
    (told := tmp_path / archives.CHECKSUMS).write_text("0  a.whl\n")
    signature = make_release.sign(told, "release@example.org")
    verify = ["gpg", "--batch", "--verify", str(signature), str(told)]
    assert signature.name == "SHA256SUMS.asc"
    assert subprocess.run(verify, capture_output=True).returncode == 0
    told.write_text("1  a.whl\n")
    assert subprocess.run(verify, capture_output=True).returncode != 0
    with pytest.raises(subprocess.CalledProcessError):
        make_release.sign(told, "nobody@example.org")


def fake_sigstore(folder: Path, code: str) -> None:
    """Write a package that is run in place of sigstore's."""
    (folder / "sigstore").mkdir()
    (folder / "sigstore/__init__.py").write_text("")
    (folder / "sigstore/__main__.py").write_text(f"import sys\n{code}\n")


@pytest.mark.parametrize("code", ["open(sys.argv[3], 'w').write(sys.argv[4])", "sys.exit(1)"])
def test_the_checksums_are_signed_as_an_account(tmp_path, monkeypatch, code):
    fake_sigstore(tmp_path, "assert sys.argv[1:3] == ['sign', '--bundle']\n" + code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told = tmp_path / archives.CHECKSUMS
    if "exit" in code:
        with pytest.raises(SystemExit, match=r"SHA256SUMS is not signed.*SIGSTORE_IDENTITY_TOKEN"):
            make_release.sign_as_account(told)
    else:
        bundle = make_release.sign_as_account(told)
        assert bundle.name == "SHA256SUMS.sigstore.json" and bundle.read_text() == str(told)


def test_without_sigstore_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install sigstore"):
        make_release.sign_as_account(tmp_path / archives.CHECKSUMS)
