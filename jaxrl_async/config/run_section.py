"""Settings of the run itself: job, steps, faults that it survives, checkpoints, metrics.

Needs no JAX.
"""

from typing import Literal

from pydantic import Field

from jaxrl_async.config.section import NonNegative, Positive, Section


class RunSection(Section):
    job: Literal["rl", "sft", "preference", "reward_model"] = "rl"
    """What to train: a policy by rewards (rl), by given answers (sft) or by preferences, or a
    reward model."""
    name: str = Field("run", pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")
    """Name of the run; its folder is DIR/NAME."""
    dir: str = "runs"
    """Folder of the run folders and of JAX's persistent compilation cache."""
    seed: NonNegative = 0
    """Seed of all random numbers: initial weights, data order, sampling."""
    steps: Positive = 100
    """Number of updates."""
    resume: bool = False
    """Resume from the newest checkpoint in the run's folder (also: --resume)."""
    resume_or_start: bool = False
    """Resume the run if its folder holds one, else start it: for jobs that are restarted
    automatically."""
    overwrite: bool = False
    """Start anew even if the run's folder already holds a run; the old one is moved aside."""
    copy_to: str | None = None
    """Address, such as gs://BUCKET/DIR, below which the run is copied to NAME while it goes on; a
    resumed run that is not here is fetched from there; null: no copy."""
    logs: Literal["text", "json"] = "text"
    """json: each line of the log is one JSON object, as Cloud Logging reads them; sampler processes
    that start elsewhere take it from the environment variable JAXRL_ASYNC_LOGS."""
    profile: tuple[Positive, ...] = ()
    """Steps that JAX's profiler traces, at most 8, such as [5, 6]: in the trainer with its
    threads, and in the first 4 sampler processes. The traces are in the folder `profile` of the
    run, for XProf and https://ui.perfetto.dev; a traced step is slower."""
    replay_schedule: str | None = None
    """Replay a recorded schedule bit for bit: the schedule.jsonl of another run of the same
    configuration (also: --replay-schedule FILE); null: no replay."""


class FaultsSection(Section):
    """Timeouts and retries before a failure ends the run."""

    backoff_s: float = Field(1.0, ge=0)
    """Wait before a sampler is restarted, a call of a service that is away is made again or a group
    is scored again, seconds; doubles with each consecutive failure, up to 60."""
    sampler_restarts: NonNegative = 3
    """Restarts of one sampler before it is given up; an hour without a failure resets the count."""
    sampler_hang_s: float = Field(600.0, gt=0)
    """Time without a finished block, compilation included, after which a sampler with work counts
    as hung, seconds."""
    nonfinite_in_a_row: Positive = 8
    """Consecutive completions with NaN or infinite log-probs after which a sampler is restarted."""
    scorer_timeout_s: float = Field(600.0, gt=0)
    """Timeout for scoring one group, seconds; includes the reward model and waiting for one of
    reward.threads."""
    scorer_retries: NonNegative = 2
    """Retries of scoring a group after an error or a timeout."""
    env_timeout_s: float = Field(600.0, gt=0)
    """Timeout of an environment for one reply, seconds."""
    max_failures: Positive = 8
    """Consecutive failed groups that end the run, each begun after the one before it had failed;
    after each, the next ones wait for backoff_s, doubled with each further one. Outages do not
    count."""
    outage_s: float | None = Field(None, gt=0)
    """Longest outage of a service (environment, judge, reward), seconds: connections that break,
    time-outs of its client, HTTP 429 and 5xx. Until then its calls are made again and the run
    waits, which is reported each minute; null: for ever, and 30 s for one that has never
    answered. Set it where a judge's server begins together with the run and loads its model."""
    watchdog_s: float = Field(1800.0, ge=0)
    """Time without progress, compilation included, after which the run stops and names the part
    that hangs, seconds; 0: never. Outages, calls within their own time limits and the time of
    the caller's on_step or loop do not count."""


class CheckpointSection(Section):
    dir: str | None = Field(None, pattern=r"^gs://[^/?@:]+(/[^?]*)?$")
    """Bucket, as gs://BUCKET/DIR, to whose folder NAME each host of the trainer writes its shards
    itself; a resumed run that is not here goes on from there; null: in the run's folder."""
    every: NonNegative = 50
    """Updates between two checkpoints; 0: only at the end."""
    keep: Positive = 2
    """How many of the newest checkpoints to keep."""
    verify: bool = True
    """Compare every file with its checksum before a checkpoint is restored; if one differs, the
    previous checkpoint is used."""
    grace_s: float = Field(25.0, gt=0)
    """Time after SIGTERM or SIGHUP to save and exit (exit code 75), seconds; after that the run
    exits without saving. Keep it below the job controller's own limit (30 on Kubernetes by
    default)."""


class WandbSection(Section):
    """Weights & Biases (extra [wandb])."""

    project: str | None = Field(None, min_length=1)
    """Project that the run is shown in; null: none."""
    entity: str | None = Field(None, min_length=1)
    """User or team whose project it is; null: the key's own."""
    name: str | None = Field(None, min_length=1)
    """Name of the run there; null: run.name."""
    mode: Literal["online", "offline"] | None = None
    """offline: only write files in the run's folder, which `wandb sync` sends later; null: as
    WANDB_MODE says, else online."""


class MlflowSection(Section):
    """MLflow (extra [mlflow])."""

    experiment: str | None = Field(None, min_length=1)
    """Experiment that the run is shown in, made if it is not there; null: none."""
    tracking_uri: str | None = Field(None, min_length=1)
    """Address of the server (http://HOST:PORT), or of a store (sqlite:///FILE); null: as
    MLFLOW_TRACKING_URI says, else MLflow's own default."""


class TrackioSection(Section):
    """trackio (extra [trackio])."""

    project: str | None = Field(None, min_length=1)
    """Project that the run is shown in; null: none."""


class MetricsSection(Section):
    tensorboard: bool = True
    """Write TensorBoard events."""
    prometheus: str | None = Field(None, pattern=r"^(\S+|\[\S+\]):\d{1,5}$")
    """HOST:PORT at which Prometheus reads the newest metrics (extra [prometheus]); port 0 takes any
    free one; null: none. With several processes the first one serves."""
    wandb: WandbSection = WandbSection()
    mlflow: MlflowSection = MlflowSection()
    trackio: TrackioSection = TrackioSection()
    spans: bool = False
    """Record who was busy when: the page of runs shows it, and https://ui.perfetto.dev opens
    trace.json in the run's folder, written each minute and at the end."""
    samples_every: NonNegative = 10
    """Updates between two records of sample completions; 0: none. One more forward pass over these
    few shows the trainer's log-probs beside the sampler's."""
    peak_flops: float | None = Field(None, gt=0)
    """Peak FLOP/s of one trainer device, for the FLOP utilisation; null: measured with a matrix
    product. An update that is faster than the peak is the peak from then on, and logged if the peak
    was set."""
