"""python -m jaxrl_async.launch.gke_scale VALUES.yaml: scale a run's samplers on GKE.

    trainer ──metrics port──> demand ──> kubectl apply NAME-sampler-4      the trainer waited
       (kubectl get --raw)          └──> kubectl delete NAME-sampler-3     samplers were idle

Checks every CHECK_S until the trainer's JobSet has ended, and keeps the number between
samplers.least and samplers.most of the values. The rules are in launch/autoscale.py and also apply
on Ray. A sampler that is removed hands its requests back first. Needs kubectl with the rights to
read services, and to create and delete JobSets. It may be stopped and restarted at any time.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jaxrl_async.config.schema import Config
from jaxrl_async.errors import ConfigError
from jaxrl_async.launch.autoscale import NEEDED, demand_of, measured_steps, wanted_samplers
from jaxrl_async.launch.gke import run_config
from jaxrl_async.launch.gke_manifests import (
    METRICS_PORT,
    ROLE,
    SAMPLER,
    sampler_name,
    sampler_set,
)
from jaxrl_async.launch.gke_values import Values, load_values
from jaxrl_async.metrics.prometheus import gauge_name

CHECK_S = 15.0
"""Interval between two reads of the metrics, seconds."""
KUBECTL_S = 60.0
"""Timeout of one kubectl call, seconds."""
MOST_STEPS = 200
"""Maximum number of steps that are kept, newest last."""

Kubectl = Callable[[Sequence[str], str], str]
"""Runs kubectl with arguments and standard input; returns its output. Raises OSError."""


def run_kubectl(arguments: Sequence[str], text: str = "") -> str:
    """Run kubectl; return its output. Raises OSError with kubectl's message if it fails."""
    try:
        done = subprocess.run(
            ["kubectl", *arguments], input=text, capture_output=True, text=True, timeout=KUBECTL_S
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"kubectl {arguments[0]} did not end within {KUBECTL_S:.0f} s") from None
    if done.returncode:
        raise OSError(f"kubectl {arguments[0]}: {done.stderr.strip()}")
    return done.stdout


def step_of(text: str) -> tuple[int, dict[str, float]] | None:
    """Return the newest step that the metrics port serves, and its values of NEEDED. None if no
    step
    has ended yet, or samplers were not measured."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        name, brace, rest = line.partition("{")
        if brace and not line.startswith("#"):
            values[name] = float(rest.rpartition(" ")[2])
    measured = {key: values.get(gauge_name(key)) for key in NEEDED}
    number = values.get("jaxrl_step")
    if number is None or any(value is None for value in measured.values()):
        return None
    return int(number), {key: value for key, value in measured.items() if value is not None}


@dataclass(slots=True, kw_only=True)
class Scaler:
    """Keeps the samplers of one run at the number that its trainer needs."""

    values: Values
    config: Config
    kubectl: Kubectl = run_kubectl
    steps: dict[int, Mapping[str, float]] = field(default_factory=dict)
    changed_at: int = 0  # step of the last change: earlier measurements do not count

    def check(self) -> str | None:
        """Read the metrics once, and change the number of samplers accordingly. Return a
        description of what was done; None if the run has ended. Raises OSError."""
        sets = self._job_sets()
        trainer = sets.get(self.values.name)
        if trainer is None or _has_ended(trainer):
            return None
        running = {
            name for name, item in sets.items()
            if item["metadata"].get("labels", {}).get(ROLE) == SAMPLER and not _has_ended(item)
        }  # fmt: skip
        newest = step_of(self._metrics())
        if newest is None:
            return "no step has been measured yet"
        number, measured = newest
        self.steps[number] = measured
        for old in sorted(self.steps)[:-MOST_STEPS]:
            del self.steps[old]
        living = int(measured["sampler/living"])
        if living != len(running):
            return f"{living} of {len(running)} samplers are sampling"
        counted = [step for n, step in sorted(self.steps.items()) if n > self.changed_at]
        if not (seen := measured_steps(counted, living)):
            return f"{living} samplers: too few steps have been measured"
        role, demand = self.values.samplers, demand_of(seen)
        assert role is not None, "main has checked it"
        wanted = wanted_samplers(demand, living, role.least, role.most or role.replicas)
        report = (
            f"samplers: {living} -> {wanted} (the trainer waits {demand.trainer_waits:.0%} of the "
            f"time, samplers idle {demand.sampler_idles:.0%})"
        )
        if wanted != living:
            self._change(running, wanted)
            self.changed_at = number
        return report

    def _change(self, running: set[str], wanted: int) -> None:
        """Add samplers with the lowest free numbers, or remove the ones with the highest."""
        numbers = {name: name.rpartition("-")[2] for name in running}
        names = ((i, sampler_name(self.values, i)) for i in range(len(running) + wanted))
        free = (i for i, name in names if name not in running)
        for _ in range(wanted - len(running)):
            document = sampler_set(self.values, self.config, next(free))
            self.kubectl(["apply", "-f", "-"], yaml.safe_dump(document, sort_keys=False))
        numbered = [name for name in running if numbers[name].isdigit()]
        last = sorted(numbered, key=lambda name: int(numbers[name]), reverse=True)
        for name in last[: max(len(running) - wanted, 0)]:
            space = ["--namespace", self.values.namespace]
            self.kubectl(["delete", "jobset", name, *space, "--wait=false"], "")

    def _job_sets(self) -> dict[str, Any]:
        chosen = f"app.kubernetes.io/instance={self.values.name}"
        words = ["get", "jobset", "--namespace", self.values.namespace, "-l", chosen, "-o", "json"]
        sets = json.loads(self.kubectl(words, ""))["items"]
        return {item["metadata"]["name"]: item for item in sets}

    def _metrics(self) -> str:
        services = f"/api/v1/namespaces/{self.values.namespace}/services"
        name = f"{self.values.name}-metrics:{METRICS_PORT}"
        try:
            return self.kubectl(["get", "--raw", f"{services}/{name}/proxy/metrics"], "")
        except OSError:
            return ""  # it is starting or restarting


def _has_ended(job_set: Mapping[str, Any]) -> bool:
    """Return whether a JobSet has completed, has failed, or is being deleted."""
    status = job_set.get("status", {})
    return bool(status.get("terminalState")) or "deletionTimestamp" in job_set["metadata"]


def main(
    argv: Sequence[str] | None = None,
    kubectl: Kubectl = run_kubectl,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Scale the samplers of a values file until the run has ended; return the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if len(args) != 1 or args[0].startswith("-"):
        print("usage: python -m jaxrl_async.launch.gke_scale VALUES.yaml", file=sys.stderr)
        return 2
    path = Path(args[0])
    try:
        values = load_values(path)
        if values.samplers is None:
            raise ConfigError(f"{path}: no samplers to scale. Set samplers.")
        scaler = Scaler(values=values, config=run_config(values, path.parent), kubectl=kubectl)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    printed = ""
    while True:
        try:
            report = scaler.check()
        except (OSError, ValueError, KeyError) as error:
            report = f"the cluster does not answer: {error}"
        if report is None:
            print(f"{values.name} has ended, or was never applied")
            return 0
        if report != printed:
            print(report, flush=True)
        printed = report
        sleep(CHECK_S)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
