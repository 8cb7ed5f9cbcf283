"""Settings of the run itself: job, steps, fault tolerance, checkpoints, metrics.

Needs no JAX.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from jaxrl_async.config.choice import Choice
from jaxrl_async.config.section import NonNegative, Positive, ReadWith, Section, check


class RunSection(Section):
    job: Literal["rl", "sft", "preference", "reward_model"] = "rl"
    """What to train: a policy by rewards (rl), given answers (sft) or preferences (preference), or
    a reward_model."""
    name: str = Field("run", pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")
    """Name of the run; its folder is DIR/NAME."""
    dir: str = "runs"
    """Folder of the run folders and of JAX's compilation cache."""
    seed: NonNegative = 0
    """Seed of initial weights, data order and sampling."""
    steps: Positive = 100
    """Number of updates."""
    resume: bool = False
    """Resume from the newest checkpoint in the run's folder."""
    resume_or_start: bool = False
    """Resume the run if its folder holds one, else start it."""
    overwrite: bool = False
    """Start from the beginning even if the run's folder holds a run, which is moved aside."""
    copy_to: str | None = None
    """Address, such as gs://BUCKET/DIR: the run is uploaded to ADDRESS/NAME while it runs, and a
    resume downloads it if it is missing locally."""
    logs: Literal["text", "json"] = "text"
    """Format of the log: text, or json, one object per line; sampler processes on other machines
    read JAXRL_ASYNC_LOGS."""
    profile: tuple[Positive, ...] = ()
    """Steps that JAX's profiler traces, at most 8, such as [5, 6]; the traces are in the run's
    folder `profile`, for XProf and https://ui.perfetto.dev."""
    callbacks: tuple[Choice, ...] = ()
    """Your own subclasses of jaxrl_async.Callback (FILE.py:CLASS), called at begin, step,
    evaluation, save and end."""
    replay_schedule: Annotated[str | None, ReadWith("job", ("rl",), switches=())] = None
    """Replay a recorded schedule bit for bit: the schedule.jsonl of another run of the same
    configuration."""

    @check
    def what_is_continued_is_not_replaced(self) -> Iterator[str]:
        """Require run.overwrite not to go with what continues a run."""
        for name in ("resume", "resume_or_start"):
            if self.overwrite and getattr(self, name):
                yield (
                    f"run.{name} and run.overwrite exclude each other: the first continues a run "
                    "that exists, the second replaces it. Set one of them to false."
                )

    @check
    def traced_steps_are_made(self) -> Iterator[str]:
        """Require different steps of the run, at most 8, for the profiler's traces."""
        steps, most = self.profile, 8
        if len(set(steps)) < len(steps) or max(steps, default=0) > self.steps:
            yield (
                f"run.profile={list(steps)} must name different steps up to run.steps "
                f"({self.steps}), such as [{min(2, self.steps)}]: the first step also "
                "compiles."
            )
        if len(steps) > most:
            yield (
                f"run.profile names {len(steps)} steps, and at most {most} are allowed: a trace "
                "has tens to hundreds of MB on an accelerator. Name fewer."
            )

    @check
    def a_copy_goes_to_an_address(self) -> Iterator[str]:
        """Require a writable address without a secret: config.yaml contains it."""
        address = self.copy_to
        if address is None:
            return
        scheme, separator, rest = address.partition("://")
        if not separator or not rest or scheme in ("http", "https"):
            yield (
                f"run.copy_to = {address!r} is not a writable address. Give one such as "
                "gs://BUCKET/DIR or s3://BUCKET/DIR, or file:///DIR for a mounted folder."
            )
        elif ":" in rest.partition("/")[0].rpartition("@")[0] or "?" in rest:
            yield (
                f"run.copy_to: the address at {scheme}:// holds a password or a query, which would "
                "be written to config.yaml. Set keys in the environment variables of its file "
                "system."
            )


class FaultsSection(Section):
    """Timeouts and retries before a failure ends the run."""

    backoff_s: float = Field(1.0, ge=0)
    """Wait before a sampler is restarted, a service is called again or a group is scored again,
    seconds; doubles with each consecutive failure, up to 60."""
    sampler_restarts: NonNegative = 3
    """Maximum restarts of one sampler; an hour without a failure resets the count."""
    sampler_hang_s: float = Field(600.0, gt=0)
    """Time without a finished block, compilation included, after which a sampler counts as hung,
    seconds."""
    nonfinite_in_a_row: Positive = 8
    """Consecutive completions with NaN or infinite log-probs that restart a sampler."""
    scorer_timeout_s: float = Field(600.0, gt=0)
    """Timeout for scoring one group, seconds; includes waiting for one of reward.threads."""
    scorer_retries: NonNegative = 2
    """Retries of scoring a group."""
    env_timeout_s: float = Field(600.0, gt=0)
    """Timeout of an environment for one reply, seconds."""
    max_failures: Positive = 8
    """Consecutive failed groups that end the run; outages do not count."""
    outage_s: float | None = Field(None, gt=0)
    """Maximum outage of a service (environment, judge, reward), seconds, during which its calls are
    retried; null: no limit, but 30 s for a service that has never answered."""
    watchdog_s: float = Field(1800.0, ge=0)
    """Time without progress, compilation included, after which the run stops and names the part
    that hangs, seconds; 0: no limit."""


class CheckpointSection(Section):
    dir: str | None = Field(None, pattern=r"^gs://[^/?@:]+(/[^?]*)?$")
    """Bucket for checkpoints, gs://BUCKET/DIR: each host of the trainer writes its shards there,
    and a resumed run that is missing locally continues from there; null: the run's folder."""
    every: NonNegative = 50
    """Updates between two checkpoints; 0: only at the end."""
    keep: Positive = 2
    """Number of newest checkpoints to keep."""
    hugging_face: bool = False
    """Write each checkpoint's policy, or with model.lora its adapter, as a Hugging Face directory,
    too: RUN/hugging_face/STEP, removed with its checkpoint."""
    verify: bool = True
    """Compare every file with its checksum before restoring; if one differs, use the previous
    checkpoint."""
    grace_s: float = Field(25.0, gt=0)
    """Time after SIGTERM or SIGHUP to save and exit (exit code 75), seconds. Keep it below the job
    controller's limit (Kubernetes: 30)."""


class WandbSection(Section):
    """Weights & Biases (extra [wandb])."""

    project: str = Field(min_length=1)
    """Project of the run."""
    entity: str | None = Field(None, min_length=1)
    """User or team that owns the project; null: the owner of the key."""
    name: str | None = Field(None, min_length=1)
    """Display name of the run; null: run.name."""
    mode: Literal["online", "offline"] | None = None
    """online, or offline: files that `wandb sync` sends later; null: WANDB_MODE, else online."""


class MlflowSection(Section):
    """MLflow (extra [mlflow])."""

    experiment: str = Field(min_length=1)
    """Experiment of the run."""
    tracking_uri: str | None = Field(None, min_length=1)
    """Server (http://HOST:PORT) or store (sqlite:///FILE); null: MLFLOW_TRACKING_URI, else MLflow's
    default."""


class TrackioSection(Section):
    """trackio (extra [trackio])."""

    project: str = Field(min_length=1)
    """Project of the run."""


class MetricsSection(Section):
    tensorboard: bool = True
    """Write TensorBoard events."""
    prometheus: str | None = Field(None, pattern=r"^(\S+|\[\S+\]):\d{1,5}$")
    """HOST:PORT at which Prometheus reads the newest metrics (extra [prometheus]); port 0: any free
    one."""
    wandb: WandbSection | None = None
    mlflow: MlflowSection | None = None
    trackio: TrackioSection | None = None
    spans: bool = False
    """Record a timeline of all threads, for the dashboard and, as trace.json in the run's folder,
    for https://ui.perfetto.dev."""
    tags: tuple[str, ...] = ()
    """Words by which the dashboard filters and groups runs, such as [sweep, small]."""
    samples_every: NonNegative = 10
    """Updates between two records of sample completions; 0: none."""
    peak_flops: float | None = Field(None, gt=0)
    """Peak FLOP/s of one trainer device, for the FLOP utilisation; null: measured."""
