"""Every setting of a run, in frozen sections, one per part.

A field's docstring is its help text (`--help`) and names its unit. What settings must keep to
together is checked by config/rules.py. Needs no JAX.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.config.section import Count, NonNegative, Positive, Section
from jaxrl_async.staleness import least_limit

Choice = str | dict[str, dict[str, Any]]
"""A registered function by name, or {name: {argument: value}}."""
Choices = Choice | list[Choice]
"""One choice, or a list of them."""


def name_of(choice: Choice) -> str:
    """Return the function's name in a choice."""
    return choice if isinstance(choice, str) else next(iter(choice), "")


def each_of(choices: Choices | None) -> list[Choice]:
    """Return one choice, a list of them or None as a list."""
    if choices is None:
        return []
    return choices if isinstance(choices, list) else [choices]


def arguments_of(choice: Choice) -> dict[str, Any]:
    """Return the function's arguments in a choice."""
    return {} if isinstance(choice, str) else next(iter(choice.values()), {})


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
    replay_schedule: str | None = None
    """Replay a recorded schedule bit for bit: the schedule.jsonl of another run of the same
    configuration (also: --replay-schedule FILE); null: no replay."""


class DistributedSection(Section):
    """Several processes, one per host, that make one run. Not needed for one process."""

    detect: bool = True
    """If the fields below are not set, look for a TPU pod's or GKE's settings in the
    environment."""
    coordinator: str | None = Field(None, pattern=r"^\S+:\d{1,5}$")
    """HOST:PORT at which the others reach process 0; set together with the next two fields or not
    at all."""
    num_processes: Positive | None = None
    """Number of processes in the run."""
    process_id: NonNegative | None = None
    """Index of this process, from 0."""
    wait_s: Positive = 300
    """Timeout for the other processes to join at the start, seconds."""
    heartbeat_s: Positive = 100
    """Silence of one process after which the others exit, seconds."""


class AxesSection(Section):
    data: Count = 1
    """Devices that hold copies of the weights (data parallel)."""
    fsdp: Count = 1
    """Devices that shard each weight and the optimizer state (fully sharded data parallel)."""
    expert: Count = 1
    """Devices that shard the experts of each layer, and also the rows (expert parallel);
    mixture-of-experts models only."""
    context: Count = 1
    """Devices that shard the length of each row, for long sequences (context parallel); trainer
    only."""
    tensor: Count = 1
    """Devices that shard each layer's heads and MLP columns (tensor parallel)."""

    @property
    def num_devices(self) -> int:
        """data * fsdp * expert * context * tensor."""
        return self.data * self.fsdp * self.expert * self.context * self.tensor


class MeshSection(Section):
    trainer: AxesSection = AxesSection()
    """Shape of the trainer's slice."""
    sampler: AxesSection = AxesSection()
    """Shape of one sampler's slice: tensor and expert divide its work, the other axes only repeat
    it. For more throughput, raise samplers."""
    samplers: Count = 1
    """Independent samplers, each on its own slice; for small models several beat one wide
    sampler."""
    colocated: bool = False
    """Run trainer and sampler on the same devices, in turns, still asynchronously."""
    samplers_in: Literal["threads", "processes", "elsewhere"] = "threads"
    """Where the samplers run: in threads of this process, on slices of its devices; in processes of
    their own, which the run starts on this machine; or elsewhere: in processes that join the run
    (python -m jaxrl_async.sample --join HOST:PORT)."""

    @property
    def remote(self) -> bool:
        """Whether the samplers run in processes of their own, so that the mesh is the trainer's."""
        return self.samplers_in != "threads"

    @property
    def num_devices(self) -> int:
        """Devices that the run's own process needs: the larger slice if colocated, else all slices;
        the trainer's alone if the samplers are processes of their own."""
        if self.remote:
            return self.trainer.num_devices
        both = (self.trainer.num_devices, self.samplers * self.sampler.num_devices)
        return max(both) if self.colocated else sum(both)

    @property
    def without_samplers(self) -> "MeshSection":
        """The trainer's slice alone, for jobs without a sampler."""
        alike = AxesSection(data=self.trainer.num_devices)
        return MeshSection(trainer=self.trainer, sampler=alike, colocated=True)


class ArchitectureSection(Section):
    """A decoder with random weights, where model.path is not set."""

    family: Literal["llama", "qwen2", "qwen3", "qwen3_moe"] = "qwen3"
    """Model family: decides about biases, query and key norms, and RoPE scaling."""
    layers: Count = 4
    """Number of layers."""
    width: Positive = 128
    """Model width (hidden size)."""
    heads: Count = 4
    """Query heads."""
    kv_heads: Count = 2
    """Key and value heads."""
    head_dim: Positive = 32
    """Width of a head."""
    mlp: Positive = 384
    """Hidden width of the MLP, or of each expert."""
    experts: NonNegative = 0
    """Experts per layer, for family=qwen3_moe; 0: a dense MLP."""
    experts_per_token: Positive = 2
    """Experts that each token is routed to."""
    tied: bool = True
    """Use the embedding as the output head, too."""
    rope_theta: float = Field(10_000.0, gt=0)
    """Base of the rotary embedding."""
    vocab: Positive | None = None
    """Vocabulary size, at least the tokenizer's; null: the tokenizer's."""


class ModelSection(Section):
    path: str | None = None
    """Hugging Face directory (config.json, *.safetensors); null: random weights of
    model.architecture."""
    architecture: ArchitectureSection = ArchitectureSection()
    """Shape of the model if path is null."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the trainer's and the sampler's computations."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the trainer's weights and gradients; trainer.rounding says what becomes of
    updates below bfloat16's resolution."""
    remat: Literal["none", "layer", "attention", "dots"] = "none"
    """What the backward pass recomputes: nothing, each layer, each layer except attention (keeps
    splash's results on TPUs: 2 bytes per query, token and layer), or everything but matrix products
    (dots)."""
    attention: Literal["auto", "reference", "splash", "cudnn"] = "auto"
    """The trainer's attention: plain JAX (reference), TPU's splash or NVIDIA's cuDNN; auto: by
    platform."""


class AdditionSection(Section):
    """The embedded task: a + b, worked out digit by digit with carries."""

    digits: Annotated[int, Field(ge=1, le=9)] = 4
    """Most digits of a summand."""
    eval_size: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Number of held-out problems, which are never trained on."""
    worked_share: float = Field(1.0, ge=0, le=1)
    """Share of the answers for the warm start and sft that show the work digit by digit; the others
    give the sum alone."""


class JsonlSection(Section):
    """Records, one JSON object per line: question and answer, or (preference jobs) prompt, chosen
    and rejected, or prompt, completion and label."""

    path: str = ""
    """File of training records."""
    eval_path: str | None = None
    """File of held-out records; null: the last eval_size records of path."""
    eval_size: Positive = 64
    """Most held-out records to use."""
    prompt_field: str = "question"
    """Field with the question; preference jobs always read `prompt`."""
    answer_field: str | None = "answer"
    """Field with the answer; null: the records have none, and a reward's reference is empty.
    Preference jobs read chosen and rejected, or completion."""
    answer_mark: str | None = None
    """Text before the final answer, such as '#### ' in GSM8K: a reward's reference is what follows
    the last one; null: the whole answer. Answers to imitate are never cut."""
    template: str | None = None
    """Python format string with {prompt}; null: the tokenizer's chat template, or the bare prompt
    if it has none."""
    max_bad_share: float = Field(0.01, ge=0, le=1)
    """Largest share of records that may be skipped as malformed, too long or incomplete."""


class DataSection(Section):
    source: Literal["addition", "jsonl"] = "addition"
    """Source of the prompts: the embedded addition task or a file of records."""
    addition: AdditionSection = AdditionSection()
    """Settings of the embedded task."""
    jsonl: JsonlSection = JsonlSection()
    """Settings of the record file."""
    tokenizer: str | None = None
    """Hugging Face tokenizer directory; null: that of model.path, or the embedded task's own."""
    max_prompt_tokens: Positive = 64
    """Longest prompt, tokens; longer ones are skipped, counted and logged."""
    curriculum: Literal["none", "hard_first", "frontier_first"] = "none"
    """Order of the prompts: the stream's, or drawn with weights 1 - p (hard_first) or p (1 - p)
    (frontier_first), p being the prompt's measured pass rate."""
    curriculum_pool: Count = 64
    """Upcoming prompts that a curriculum chooses among; each is used exactly once in any case."""
    curriculum_threshold: float = 0.5
    """Rewards above this count as correct in the pass rate."""


class WarmStartSection(Section):
    """A short supervised training on prompt-answer pairs before the RL."""

    steps: NonNegative = 0
    """Number of supervised updates; 0: none."""
    batch_size: Count = 64
    """Pairs per update."""
    learning_rate: float = Field(1e-3, ge=0)
    """Peak learning rate."""
    path: str | None = None
    """JSONL file of pairs with the fields of data.jsonl; null: the training data's own answers."""


class SftSection(Section):
    """Supervised fine-tuning (run.job=sft) by maximum likelihood of the records' answers."""

    batch_size: Count = 64
    """Prompt-answer pairs per update."""


class PreferenceSection(Section):
    """Training on chosen and rejected answers (run.job=preference and run.job=reward_model)."""

    batch_size: Count = 32
    """Pairs per update; a single judged answer counts as one."""
    loss: Choice = "dpo"
    """Loss of run.job=preference: dpo, ipo, ipo_average, kto, simpo or orpo, with its arguments."""
    reference: str | None = None
    """Hugging Face directory of the frozen reference of run.job=preference; null: the initial
    weights, after the warm start."""
    margin: float = Field(0.0, ge=0)
    """Margin by which run.job=reward_model should score the chosen answer higher."""


class SamplerSection(Section):
    engine: Literal["ours", "vllm"] = "ours"
    """What draws tokens: the sampler of this package, or vLLM servers (engine_urls), which need
    mesh.samplers_in=elsewhere."""
    engine_urls: tuple[str, ...] = ()
    """Addresses of the servers of engine=vllm, such as http://127.0.0.1:8000; they serve nobody
    else."""
    slots: Count | None = 64
    """Sequences that each sampler decodes at once (engine=vllm: that it has to answer at once);
    null: as many as kv_memory_mib holds."""
    reserve: float = Field(0.5, ge=0, le=1)
    """Sequences prefilled ahead to take over slots within a block, as a share of the slots."""
    max_length: Positive = 128
    """Longest sequence, prompt plus answer, tokens."""
    max_new_tokens: Positive = 64
    """Longest answer, tokens."""
    block: Count = 8
    """Decode steps per dispatch; weights can be swapped between two dispatches."""
    prefill_chunk: Positive = 2048
    """Prompt tokens to prefill between two blocks; a longer prompt takes several rounds."""
    page_tokens: Positive = 32
    """Tokens per page of the KV cache."""
    kv_memory_mib: float | None = Field(None, gt=0)
    """Memory for one sampler's KV cache, MiB; null: enough for all slots at max_length."""
    prefix_cache: bool = True
    """Keep the KV of finished requests for later requests with the same first tokens."""
    on_new_weights: Literal["continue", "recompute", "drain", "restart"] = "continue"
    """What happens to running sequences at a weight swap: keep their KV (continue), rebuild it
    (recompute), finish them first (drain) or start them over (restart)."""
    matmul: Literal["full", "bfloat16"] = "full"
    """Precision of matrix products: that of model.dtype (full), or bfloat16 (faster on chips with
    bfloat16 units)."""
    attention: Literal["auto", "gathered", "ragged"] = "auto"
    """Decode attention: dense on gathered pages, or TPU's ragged paged kernel; auto: by
    platform."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0: greedy."""
    top_k: NonNegative = 0
    """Sample from the k likeliest tokens; 0: from all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the likeliest tokens that together have this probability."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Sample from tokens with at least this probability relative to the likeliest token."""


class StalenessSection(Section):
    max_staleness: NonNegative = 1
    """Largest staleness of a group: the trainer's version minus that of the group's oldest token;
    0: synchronous."""
    lookahead: NonNegative = 0
    """How many younger groups may overtake a slow one."""
    when_too_old: Literal["wait", "drop"] = "wait"
    """Pacing: rollouts wait so that nothing becomes too stale, or run ahead, and groups that are
    too stale when drawn are dropped."""
    overcommit: float = Field(1.5, ge=1)
    """With drop: most groups in memory, as a multiple of (max_staleness + 1) * groups_per_step."""
    adapt: Literal["none", "ess"] = "none"
    """How the staleness target adapts: not at all, or by effective sample size (ess); never above
    max_staleness."""
    ess_target: float = Field(0.9, ge=0, le=1)
    """Effective sample size to keep, as a share of the tokens: below it the staleness target is
    halved, well above it raised by 1."""


class BufferSection(Section):
    select: Literal["strict", "recent", "reward_variance", "advantage_size"] = "strict"
    """Which groups are drawn first: the oldest (strict), the most recent, or those that teach most
    by variance of rewards or size of advantages."""
    reuse: Positive = 1
    """Most steps that may train on one group, within max_staleness; 1: each group once."""


class AlgorithmSection(Section):
    learning_rate: float = Field(1e-5, ge=0)
    """Peak learning rate of the policy."""
    group_size: Count = 8
    """Answers sampled per prompt (G)."""
    groups_per_step: Count = 8
    """Prompts per training step (P)."""
    shaping: tuple[Choice, ...] = ()
    """Transformations of rewards and masks, applied in order before the advantage."""
    advantage: Choice = "group_normalized"
    """Advantage estimator."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal, and sample other prompts instead."""
    max_resampled: NonNegative = 0
    """Most groups that dynamic sampling may drop for one step before the run ends; 0: no limit."""
    signal_part: str | None = None
    """Named part of the reward, such as correct, that dynamic sampling compares; null: the whole
    reward."""
    signal_std: float = Field(0.0, ge=0)
    """Dynamic sampling also drops groups whose rewards have at most this standard deviation."""
    correction: Choices | None = None
    """Off-policy correction, one or a list; null: the loss's default (truncate_token; none for a
    loss that bounds its own ratio or has no ratio)."""
    anchor: Literal["behavior", "proximal"] = "behavior"
    """Denominator of the loss's ratio: the policy that drew the token (behavior), or the weights at
    the start of the step (proximal)."""
    loss: Choice = "ppo_clip"
    """Policy loss."""
    epochs: Positive = 1
    """Passes over the data of one step; the weights are published once, after the last pass."""
    minibatches: Positive = 1
    """Optimizer updates per pass, each on its own part of the step's sequences; if there are fewer
    sequences, fewer updates are made, and counted."""
    kl: Choice = "k3"
    """Estimator of the KL from the reference; full: computed over the whole vocabulary."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the KL from the reference; 0: no reference is kept."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL goes: into the loss, or subtracted from the rewards."""
    kl_target: float | None = Field(None, gt=0)
    """Target KL to which kl_coefficient is adapted, nats per token; null: the coefficient is
    constant."""
    kl_horizon: float = Field(10.0, gt=0)
    """Time scale of that adaptation, steps (the coefficient changes by at most 20 % / kl_horizon
    per step)."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus in the loss."""
    entropy_clip: float | None = Field(None, gt=0)
    """Only tokens with less entropy than this get the bonus, nats; null: all tokens."""
    entropy_target: float | None = Field(None, gt=0)
    """Entropy below which the bonus acts, with an adapted weight, nats per token; null: it always
    acts, with a constant weight."""
    entropy_step: float = Field(5e-3, gt=0)
    """Change of the bonus's weight per step, towards the entropy target."""
    supervised_coefficient: float = Field(0.0, ge=0)
    """Weight of a supervised (maximum likelihood) loss on worked answers in each step; 0: none."""
    supervised_batch: Count = 16
    """Worked answers per step for that loss, from warm_start.path or the task's own."""
    aggregate: Choice = "token_mean"
    """How the token losses are averaged into one number."""
    keep_sampling_mask: bool = False
    """Take the trainer's log-probs over only the tokens that sampler.top_k, top_p and min_p left to
    draw from."""
    keep_routing: bool = False
    """Replay the sampler's choice of experts in the trainer (R3, routing replay);
    mixture-of-experts models only."""


class ReferenceSection(Section):
    path: str | None = None
    """Hugging Face directory of the reference policy; null: the initial policy of the run."""
    refresh_every: NonNegative = 0
    """Updates between two copies of the policy into the reference; 0: it stays fixed."""
    ema: float = Field(0.0, ge=0, lt=1)
    """After each update the reference becomes ema * reference + (1 - ema) * policy; 0: it stays
    fixed."""


class CriticSection(Section):
    path: str | None = None
    """Hugging Face directory of a reward model or policy to start the critic from; null: the
    policy's own weights."""
    learning_rate: float = Field(1e-5, ge=0)
    """Peak learning rate of the critic."""
    warmup_steps: NonNegative = 0
    """Steps at the start of the run that train only the critic."""
    clip: float | None = Field(0.2, gt=0)
    """Clip range of values around the old ones, reward units; null: no clipping."""


class TeacherSection(Section):
    source: Literal["none", "path", "self"] = "none"
    """Teacher to distil from: none, the model in path, or an older copy of the policy itself
    (self)."""
    path: str | None = None
    """Hugging Face directory of the teacher; it must have the policy's tokens, but its vocabulary
    may be padded to another size."""
    refresh_every: NonNegative = 10
    """Updates between two copies of the policy into the teacher of source=self; 0: it stays the
    initial policy."""
    form: Literal["advantage", "loss"] = "advantage"
    """advantage: -log(policy / teacher) of the drawn token is an advantage; loss: a divergence of
    distributions is a term of the loss."""
    kind: Literal["reverse", "forward", "js"] = "reverse"
    """Divergence for form=loss: KL(policy || teacher) (reverse), KL(teacher || policy) (forward) or
    generalised Jensen-Shannon (js)."""
    beta: float = Field(0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture for kind=js."""
    top_k: NonNegative = 0
    """Number of likeliest tokens that form=loss compares one by one, all others being lumped
    together; 0: the whole vocabulary."""
    top_of: Literal["teacher", "student"] = "teacher"
    """Whose likeliest tokens those are. The student's are taken at the start of the step with one
    more pass; they suit kind=reverse, an expectation under the student."""
    coefficient: float = Field(1.0, ge=0)
    """Weight of the distillation term."""
    rewards: float = Field(1.0, ge=0)
    """Weight of the advantages from rewards beside it; 0: distillation alone."""


class TrainerSection(Section):
    warmup_steps: NonNegative = 0
    """Optimizer updates over which the learning rate rises to its peak; a step makes
    algorithm.epochs * minibatches of them."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Largest global norm of the gradients; larger ones are scaled down."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay rate of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay rate of the second moment."""
    epsilon: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    rounding: Literal["masters", "stochastic", "nearest"] = "masters"
    """How updates are added to bfloat16 weights: to float32 master weights (4 more bytes per
    weight; with param_dtype=float32 the weights are the masters), rounded stochastically (right in
    the mean), or rounded to the nearest (loses updates below about 1/500 of a weight)."""
    row_length: Positive | None = None
    """Length of a packed row, tokens; null: sampler.max_length."""
    micro_batch_tokens: Positive = 4096
    """Tokens, padding included, per forward and backward pass."""
    logprob_chunk: Positive = 1024
    """Tokens per device whose logits are in memory at once."""
    offload: tuple[Literal["optimizer", "reference"], ...] = ()
    """What stays in host memory while not in use: AdamW's moments and master weights (optimizer),
    loaded for each update; the reference policy, loaded for a pass of its own."""
    compiler_options: dict[str, str] = Field({})
    """XLA compiler options for the update, by name; TPU options are refused on other platforms."""
    max_skipped_steps: Positive = 3
    """Consecutive non-finite steps that stop the run."""


class WeightsSection(Section):
    dtype: Literal["float32", "bfloat16", "int8", "float8_e4m3fn"] | None = None
    """Data type in which weights are sent and kept by the sampler; null: model.dtype. int8 and
    float8_e4m3fn quantise the layers' matrices, with one scale per output; the rest is in
    model.dtype."""
    probe: bool = True
    """After each publish, compare the sampler's log-probs of a fixed sequence with the
    trainer's."""
    probe_tolerance: float = Field(1e-3, gt=0)
    """Largest allowed difference between those log-probs, nats."""
    checksum: bool = True
    """After each transfer, compare a checksum of every array on both sides before the weights are
    used."""

    @property
    def eight_bits(self) -> Literal["int8", "float8_e4m3fn"] | None:
        """The type to which the sampler's matrices are quantised; None: they are not."""
        return self.dtype if self.dtype in ("int8", "float8_e4m3fn") else None


class EvalSection(Section):
    every: NonNegative = 10
    """Updates between two evaluations; 0: only at the start and at the end."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature in the evaluation; 0: greedy."""


class RewardSection(Section):
    function: Choices = "exact"
    """Built-in reward (exact, gsm8k, math), your own (FILE.py:FUNCTION), a list of these with
    weights ([math, {my.py:short: {weight: 0.1}}]), or none if there is a reward model. If
    there is a function, it alone judges the evaluation; its part `correct`, 0 to 1, is the
    accuracy."""
    function_weight: float = 1.0
    """Weight of the function's reward beside reward.model's in training; 0: it only judges the
    evaluation."""
    model: str | None = None
    """Folder of a reward model, as written by run.job=reward_model; null: none."""
    model_weight: float = 1.0
    """Weight of the reward model's score, which is added to the function's reward."""
    timeout_s: float = Field(30.0, gt=0)
    """Timeout of a function for one answer (for all answers to a prompt if it judges them
    together), seconds."""
    threads: Count = 16
    """Most threads that call reward functions that are not async; async ones wait side by side."""

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each function by name; empty: there is no function."""
        choices = [c for c in each_of(self.function) if name_of(c) != "none"]
        return {name_of(c): arguments_of(c).get("weight", 1.0) for c in choices}


class FaultsSection(Section):
    """Timeouts and retries before a failure ends the run."""

    backoff_s: float = Field(1.0, ge=0)
    """Wait before a sampler is restarted or a group is scored again, seconds; doubles with each
    consecutive failure, up to 60."""
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
    """Consecutive failed groups that end the run."""
    watchdog_s: float = Field(1800.0, ge=0)
    """Time without progress, compilation included, after which the run stops and names the part
    that hangs, seconds; 0: never."""


class CheckpointSection(Section):
    every: NonNegative = 50
    """Updates between two checkpoints; 0: only at the end."""
    keep: Positive = 2
    """How many of the newest checkpoints to keep."""
    verify: bool = True
    """Compare every file with its checksum before a checkpoint is restored; if one differs, the
    previous checkpoint is used."""
    grace_s: float = Field(25.0, gt=0)
    """Time after SIGTERM to save and exit (exit code 75), seconds; after that the run exits without
    saving. Keep it below the job controller's own limit (30 on Kubernetes by default)."""


class MetricsSection(Section):
    tensorboard: bool = True
    """Write TensorBoard events."""
    samples_every: NonNegative = 10
    """Updates between two records of sample completions; 0: none."""
    peak_flops: float | None = Field(None, gt=0)
    """Peak FLOP/s of one trainer device, for the FLOP utilisation; null: measured with a matrix
    product."""


class Config(Section):
    run: RunSection = RunSection()
    distributed: DistributedSection = DistributedSection()
    mesh: MeshSection = MeshSection()
    remote: RemoteSection = RemoteSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    warm_start: WarmStartSection = WarmStartSection()
    sft: SftSection = SftSection()
    preference: PreferenceSection = PreferenceSection()
    sampler: SamplerSection = SamplerSection()
    staleness: StalenessSection = StalenessSection()
    buffer: BufferSection = BufferSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    reference: ReferenceSection = ReferenceSection()
    critic: CriticSection = CriticSection()
    teacher: TeacherSection = TeacherSection()
    trainer: TrainerSection = TrainerSection()
    weights: WeightsSection = WeightsSection()
    reward: RewardSection = RewardSection()
    faults: FaultsSection = FaultsSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    metrics: MetricsSection = MetricsSection()

    @property
    def lowest_limit(self) -> int:
        """Smallest staleness target: the least that fills a step; with drop 1, since at 0 all
        groups under way at an update would be dropped."""
        if self.staleness.when_too_old == "drop":
            return 1
        return least_limit(
            self.algorithm.groups_per_step, self.staleness.lookahead, self.buffer.reuse
        )

    @property
    def row_length(self) -> int:
        """Length of a packed training row, tokens."""
        return self.trainer.row_length or self.sampler.max_length
