"""Every setting of a run, in frozen sections, one per part. Parsed at the door and spent there.

A field's docstring is its help text (`--help`), and names its unit. Needs no JAX.
"""

import logging
from collections.abc import Iterator
from sys import float_info
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from jaxrl_async.config.userfile import is_own

log = logging.getLogger(__name__)

MAX_WHOLE = 2**31 - 1
"""Largest whole number of a setting."""
Positive = Annotated[int, Field(ge=1, le=MAX_WHOLE)]
NonNegative = Annotated[int, Field(ge=0, le=MAX_WHOLE)]
Count = Annotated[int, Field(ge=1, le=65_536)]
"""Of things that are made one by one."""
Choice = str | dict[str, dict[str, Any]]
"""A registered function by name, or {name: {argument: value}}."""
Choices = Choice | list[Choice]
"""One such choice, or a list of them."""


def name_of(choice: Choice) -> str:
    """The name in a choice."""
    return choice if isinstance(choice, str) else next(iter(choice), "")


def each_of(choices: Choices | None) -> list[Choice]:
    """The choices, be they one, a list or none."""
    if choices is None:
        return []
    return choices if isinstance(choices, list) else [choices]


def arguments_of(choice: Choice) -> dict[str, Any]:
    """The arguments in a choice."""
    return {} if isinstance(choice, str) else next(iter(choice.values()), {})


COMPARED_IN_GROUP = (
    "group_normalized", "group_mean", "kimi", "rloo", "opo", "maxrl", "pass_at_k", "grpo_lead",
    "reinforce_pp_baseline", "gdpo",
)  # fmt: skip
"""Advantages that are 0 for a group of one."""
DIVIDED_IN_GROUP = ("group_normalized", "grpo_lead", "gdpo", "discounted", "maxrl")
"""Advantages that divide by the spread or the mean of a group's rewards, so that a group of equal
rewards and a KL in them gets advantages of full size made of that KL alone."""
CENTERED_IN_STEP = ("reinforce_pp", "discounted_batch")
"""Advantages that are 0 for a step of one answer, undiscounted, as `discounted` is for a group of
one."""
WITHOUT_RATIO = ("gpg",)
"""Losses that have no ratio: where nothing is corrected, no anchor is looked at."""
GRADERS = {"exact", "gsm8k", "math"}
"""Built-in rewards, which compare with the record's answer."""
OF_OTHER_JOBS: dict[str, tuple[str, ...]] = {
    "rl": ("sft", "preference"),
    "sft": ("preference", "reference", "critic", "teacher"),
    "preference": ("sft", "reference", "critic", "teacher"),
    "reward_model": ("sft", "reference", "critic", "teacher"),
}
"""Sections that nothing reads, by run.job. What says how rollouts are made and how many (sampler,
staleness, buffer, reward, group_size) may stand in a configuration for several jobs."""
OF_EVERY_JOB = (
    "learning_rate",
    "group_size",
    "groups_per_step",
    "keep_sampling_mask",
    "keep_routing",
)
"""Settings of algorithm that are no part of what is learnt."""


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, docstrings are the help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    def is_set(self, name: str) -> bool:
        """Whether a setting differs from its default: writing the default down changes nothing."""
        default = type(self).model_fields[name].get_default(call_default_factory=True)
        return bool(getattr(self, name) != default)


class RunSection(Section):
    job: Literal["rl", "sft", "preference", "reward_model"] = "rl"
    """What is trained: a policy by rewards, by given answers or by preferences; or a reward
    model."""
    name: str = Field("run", pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")
    """Name of the run; its folder is DIR/NAME."""
    dir: str = "runs"
    """Folder that holds runs, and beside them JAX's persistent compilation cache."""
    seed: NonNegative = 0
    """Seed of everything random: initial weights, data order, sampling."""
    steps: Positive = 100
    """Updates to make."""
    resume: bool = False
    """Continue from the newest checkpoint in the run's folder (also: --resume)."""
    resume_or_start: bool = False
    """Continue the run where there is one, start it where there is none: for jobs that are started
    again and again."""
    overwrite: bool = False
    """Start anew where the run's folder already holds a run; the old one is moved aside."""
    replay_schedule: str | None = None
    """Follow a recorded schedule bit for bit: the schedule.jsonl of another run of the same
    configuration (also: --replay-schedule FILE); null: run freely."""

    @model_validator(mode="after")
    def _can_be_replayed(self) -> "RunSection":
        if self.replay_schedule is not None and self.job != "rl":
            raise ValueError(
                f"run.replay_schedule replays run.job=rl; run.job={self.job} has one thread, and "
                "does the same each time. Leave it out."
            )
        if self.replay_schedule is not None and self.resume:
            raise ValueError(
                "run.replay_schedule begins where the recording begins, and run.resume at a "
                "checkpoint. Leave one out."
            )
        return self


class DistributedSection(Section):
    """Several processes, one on each host, that make one run; one process needs none of this."""

    detect: bool = True
    """Where the fields below are not given, look for a TPU pod's or GKE's settings in the
    environment."""
    coordinator: str | None = Field(None, pattern=r"^\S+:\d{1,5}$")
    """HOST:PORT of process 0, as the others reach it; given with the next two or not at all."""
    num_processes: Positive | None = None
    """Processes of the run."""
    process_id: NonNegative | None = None
    """Which of them this is, from 0."""
    wait_s: Positive = 300
    """Longest wait for the other processes at the start, seconds."""
    heartbeat_s: Positive = 100
    """Silence of a process after which the others end, seconds."""


class AxesSection(Section):
    data: Count = 1
    """Copies of the weights, devices."""
    fsdp: Count = 1
    """Devices that share each weight and the optimizer state (fully sharded data parallel)."""
    expert: Count = 1
    """Devices that share the experts of each layer (expert parallel); rows are divided over it too.
    Mixture of experts only."""
    context: Count = 1
    """Devices that share the length of each row (context parallel), for long sequences; the
    trainer's only."""
    tensor: Count = 1
    """Devices that share each layer's heads and MLP columns (tensor parallel)."""

    @property
    def num_devices(self) -> int:
        """data * fsdp * expert * context * tensor."""
        return self.data * self.fsdp * self.expert * self.context * self.tensor


class MeshSection(Section):
    trainer: AxesSection = AxesSection()
    """Shape of the trainer's slice."""
    sampler: AxesSection = AxesSection()
    """Shape of a sampler's slice: tensor and expert share its work, the other axes only repeat it.
    For more throughput set samplers."""
    samplers: Count = 1
    """Independent samplers, each on a slice of its own; for small models better than one wide."""
    colocated: bool = False
    """Trainer and sampler share the same devices and take turns, still asynchronously."""

    @property
    def num_devices(self) -> int:
        """Devices that the run needs: the larger slice when colocated, else both."""
        both = (self.trainer.num_devices, self.samplers * self.sampler.num_devices)
        return max(both) if self.colocated else sum(both)

    @property
    def without_samplers(self) -> "MeshSection":
        """The trainer's slice alone, for the jobs that draw nothing."""
        alike = AxesSection(data=self.trainer.num_devices)
        return MeshSection(trainer=self.trainer, sampler=alike, colocated=True)

    def devices_of_process(self, count: int) -> int:
        """Devices that each of `count` processes needs. ValueError where they cannot take equal
        parts: as many devices for the trainer, and as many samplers (colocated: none)."""
        if count == 1:
            return self.num_devices
        trainer, each = self.trainer.num_devices, self.sampler.num_devices
        samplers = 0 if self.colocated else self.samplers
        if trainer % count or samplers % count:
            raise ValueError(
                f"mesh.trainer ({trainer} devices) and mesh.samplers ({samplers}) must be "
                f"multiples of the number of processes ({count}): each gives as many devices to "
                "the trainer, and runs as many samplers, as the others. Change them."
            )
        if samplers and (trainer // count) % each:
            raise ValueError(
                f"mesh.sampler ({each} devices) must divide the trainer's devices of one process "
                f"({trainer // count}), so that the weights need not leave it. Make mesh.sampler "
                "smaller and mesh.samplers more."
            )
        return (trainer + samplers * each) // count

    @model_validator(mode="after")
    def _sampler_has_no_context(self) -> "MeshSection":
        if self.sampler.context > 1:
            raise ValueError(
                f"mesh.sampler.context ({self.sampler.context}) must be 1: a sampler decodes one "
                "token of each sequence at a time and has no length to share. Use "
                "mesh.sampler.tensor, or mesh.samplers for several of them."
            )
        return self

    @model_validator(mode="after")
    def _same_devices(self) -> "MeshSection":
        if self.colocated and self.trainer.num_devices != self.sampler.num_devices:
            raise ValueError(
                f"mesh.colocated needs slices of the same size; mesh.trainer has "
                f"{self.trainer.num_devices} devices and mesh.sampler {self.sampler.num_devices}. "
                "Make them equal or set mesh.colocated=false."
            )
        if self.colocated and self.samplers > 1:
            raise ValueError(
                f"mesh.colocated has one sampler on the trainer's devices; mesh.samplers is "
                f"{self.samplers}. Set mesh.samplers=1 or mesh.colocated=false."
            )
        return self


class ArchitectureSection(Section):
    """A decoder from scratch, with random weights; needed where model.path is not given."""

    family: Literal["llama", "qwen2", "qwen3", "qwen3_moe"] = "qwen3"
    """Family of the decoder: what has biases, norms on queries and keys, and RoPE scaling."""
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
    """Width of the MLP's inner layer, or of each expert's."""
    experts: NonNegative = 0
    """Experts in each layer, of family=qwen3_moe; 0: a dense MLP."""
    experts_per_token: Positive = 2
    """Experts that a token goes through, of those."""
    tied: bool = True
    """Share the embedding with the output head."""
    rope_theta: float = Field(10_000.0, gt=0)
    """Base of the rotary embedding."""
    vocab: Positive | None = None
    """Size of the vocabulary, that of the tokenizer at least; null: as large as that."""

    @model_validator(mode="after")
    def _routed(self) -> "ArchitectureSection":
        if bool(self.experts) != (self.family == "qwen3_moe"):
            raise ValueError(
                f"model.architecture.experts ({self.experts}) and family ({self.family}) do not go "
                "together: give a number of experts exactly with family=qwen3_moe."
            )
        if self.experts and self.experts_per_token > self.experts:
            raise ValueError(
                f"model.architecture.experts_per_token ({self.experts_per_token}) must be at most "
                f"model.architecture.experts ({self.experts})."
            )
        return self

    @model_validator(mode="after")
    def _groups(self) -> "ArchitectureSection":
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.architecture.heads ({self.heads}) must be a multiple of "
                f"model.architecture.kv_heads ({self.kv_heads})."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"model.architecture.head_dim ({self.head_dim}) must be even: rotary embeddings "
                f"turn pairs. Set it to {self.head_dim + 1}."
            )
        return self


class ModelSection(Section):
    path: str | None = None
    """Hugging Face directory (config.json, *.safetensors); null: random weights as in
    architecture."""
    architecture: ArchitectureSection = ArchitectureSection()
    """Shape of the model where path is null."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that the trainer and the sampler compute in."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that the trainer keeps the weights in and computes gradients of; trainer.rounding says
    how steps below bfloat16's resolution count."""
    remat: Literal["none", "layer", "attention", "dots"] = "none"
    """What the backward pass computes again: nothing, each layer, each layer but for the attention
    (splash's results are kept, on TPUs: 2 bytes of each query a token and layer), or all but matrix
    products."""
    attention: Literal["auto", "reference", "splash", "cudnn"] = "auto"
    """The trainer's attention: plain JAX, TPU's splash or NVIDIA's cuDNN; auto: by platform."""


class AdditionSection(Section):
    """The embedded task: a + b, written out digit by digit with carries."""

    digits: Annotated[int, Field(ge=1, le=9)] = 4
    """Largest number of digits of a summand."""
    eval_size: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Held-out problems; never trained on."""
    worked_share: float = Field(1.0, ge=0, le=1)
    """Share of the warm start's and sft's answers that are written out, not the sum at once."""


class JsonlSection(Section):
    """Records, one JSON object a line: question and answer, or (preference jobs) prompt, chosen
    and rejected, or prompt, completion and label."""

    path: str = ""
    """File of training records."""
    eval_path: str | None = None
    """File of held-out records; null: the last eval_size records of path."""
    eval_size: Positive = 64
    """Held-out records used, at most."""
    prompt_field: str = "question"
    """Field that holds the question; preference jobs: always prompt."""
    answer_field: str | None = "answer"
    """Field that holds the answer; null: the records have none, and a reward's reference is empty.
    Preference jobs: chosen and rejected, or completion."""
    answer_mark: str | None = None
    """What stands before the final answer, such as '#### ' in GSM8K: a reward's reference is what
    follows the last one; null: the whole answer. Worked answers to imitate are never cut."""
    template: str | None = None
    """Python format string with {prompt}; null: the tokenizer's chat template, or the bare
    prompt."""
    max_bad_share: float = Field(0.01, ge=0, le=1)
    """Share of records that may be skipped as malformed, over-long or incomplete."""


class DataSection(Section):
    source: Literal["addition", "jsonl"] = "addition"
    """Where prompts come from."""
    addition: AdditionSection = AdditionSection()
    """Settings of the embedded task."""
    jsonl: JsonlSection = JsonlSection()
    """Settings of the record file."""
    tokenizer: str | None = None
    """Hugging Face tokenizer directory; null: model.path, or the embedded task's own."""
    max_prompt_tokens: Positive = 64
    """Prompts longer than this are skipped, counted and logged, tokens."""
    curriculum: Literal["none", "hard_first", "frontier_first"] = "none"
    """Order of prompts: the stream's, or drawn by measured pass rate p, weights 1 - p or p (1 - p).
    """
    curriculum_pool: Count = 64
    """Upcoming prompts of the stream that a curriculum chooses among; each is used once in any
    case."""
    curriculum_threshold: float = 0.5
    """A reward above this counts as right in the pass rate."""


class WarmStartSection(Section):
    """A short supervised training before the RL, on prompt-answer pairs."""

    steps: NonNegative = 0
    """Supervised updates; 0: none."""
    batch_size: Count = 64
    """Pairs in an update."""
    learning_rate: float = Field(1e-3, ge=0)
    """Peak learning rate."""
    path: str | None = None
    """JSONL file of pairs in the fields of data.jsonl; null: the task's own worked answers."""


class SftSection(Section):
    """Supervised fine-tuning (run.job=sft): maximum likelihood of the records' answers."""

    batch_size: Count = 64
    """Prompts with their answers in an update."""


class PreferenceSection(Section):
    """Training on better and worse answers (run.job=preference and run.job=reward_model)."""

    batch_size: Count = 32
    """Pairs in an update; judged answers count as one each."""
    loss: Choice = "dpo"
    """Loss of run.job=preference: dpo, ipo, ipo_average, kto, simpo or orpo, with its settings."""
    reference: str | None = None
    """Hugging Face directory of the frozen reference of run.job=preference; null: the weights at
    the start, after the warm start."""
    margin: float = Field(0.0, ge=0)
    """By how much run.job=reward_model is to score the chosen answer higher."""


class SamplerSection(Section):
    slots: Count | None = 64
    """Sequences that decode at once in each sampler; null: as many as kv_memory_mib holds."""
    reserve: float = Field(0.5, ge=0, le=1)
    """Sequences prefilled ahead, to take over a slot in mid-block, as a share of the slots."""
    max_length: Positive = 128
    """Longest sequence, prompt and answer together, tokens."""
    max_new_tokens: Positive = 64
    """Longest answer, tokens."""
    block: Count = 8
    """Decode steps in one dispatch; weights can change between two of them."""
    prefill_chunk: Positive = 2048
    """Prompt tokens prefilled between two blocks; a longer prompt takes several rounds."""
    page_tokens: Positive = 32
    """Tokens in a page of the KV cache."""
    kv_memory_mib: float | None = Field(None, gt=0)
    """Memory for the KV cache of one sampler, MiB; null: what all slots at max_length need."""
    prefix_cache: bool = True
    """Keep the KV of finished requests for later ones that begin with the same tokens."""
    on_new_weights: Literal["continue", "recompute", "drain", "restart"] = "continue"
    """Running sequences at a swap: keep their KV, rebuild it, finish them first, or start over."""
    matmul: Literal["full", "bfloat16"] = "full"
    """Matrix products: in model.dtype, or rounded to bfloat16 (faster where the chip has units)."""
    attention: Literal["auto", "gathered", "ragged"] = "auto"
    """Decode attention: dense on gathered pages, or the TPU kernel on pages; auto: by platform."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    top_k: NonNegative = 0
    """Keep the k likeliest tokens; 0: all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the likeliest tokens that hold this probability."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Keep tokens at least this likely, relative to the likeliest."""


class StalenessSection(Section):
    max_staleness: NonNegative = 1
    """Trainer's version minus the oldest version of a group's tokens, at most; 0 is synchronous."""
    lookahead: NonNegative = 0
    """Younger groups that may overtake a slow one, in groups."""
    when_too_old: Literal["wait", "drop"] = "wait"
    """Rollouts wait so that nothing grows too old, or run on, and what is too old when drawn is
    dropped."""
    overcommit: float = Field(1.5, ge=1)
    """With drop: groups in memory, at most, as a multiple of (max_staleness + 1) * groups_per_step.
    """
    adapt: Literal["none", "ess"] = "none"
    """What moves the staleness aimed at, from max_staleness downwards: nothing, or the effective
    sample size."""
    ess_target: float = Field(0.9, ge=0, le=1)
    """Effective sample size to keep, as a share of the tokens: below, the limit halves; well above,
    it grows by 1."""


class BufferSection(Section):
    select: Literal["strict", "recent", "reward_variance", "advantage_size"] = "strict"
    """Which groups within reach are drawn first: the oldest, young ones, or those that teach
    most."""
    reuse: Positive = 1
    """Steps that may train on one group, as long as max_staleness allows; 1: each group once."""


class AlgorithmSection(Section):
    learning_rate: float = Field(1e-5, ge=0)
    """Peak learning rate of the policy."""
    group_size: Count = 8
    """Answers drawn for each prompt (G)."""
    groups_per_step: Count = 8
    """Prompts in one update (P)."""
    shaping: tuple[Choice, ...] = ()
    """What happens to rewards and masks before that, in this order."""
    advantage: Choice = "group_normalized"
    """Advantage estimator."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal, and play other prompts in their place."""
    max_resampled: NonNegative = 0
    """Groups that may be dropped so for one step before the run ends; 0: no limit."""
    signal_part: str | None = None
    """Named part of the reward, such as correct, that must differ in a group; null: the whole
    reward."""
    signal_std: float = Field(0.0, ge=0)
    """Groups whose rewards have a standard deviation of so much or less are dropped so, too."""
    correction: Choices | None = None
    """What corrects for data drawn by older weights, one or a list; null: what the loss asks for
    (truncate_token, or none for a loss that bounds its own ratio or has none)."""
    anchor: Literal["behavior", "proximal"] = "behavior"
    """What the loss's ratio is against: what drew the token, or the weights at the step's start."""
    loss: Choice = "ppo_clip"
    """Policy loss."""
    epochs: Positive = 1
    """Passes over the data of one step; the weights are published once, after the last."""
    minibatches: Positive = 1
    """Optimizer updates in one pass, each on another part of the step's sequences; with fewer
    sequences fewer are made, and counted."""
    kl: Choice = "k3"
    """Estimator of the divergence from the reference; full: over the whole vocabulary."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of that divergence; 0: no reference is kept."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the divergence goes: a term of the loss, or taken off the rewards."""
    kl_target: float | None = Field(None, gt=0)
    """Divergence that the coefficient is steered to, nats per token; null: it stays."""
    kl_horizon: float = Field(10.0, gt=0)
    """How slowly it is steered, steps (at most 20 % / kl_horizon a step)."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of an entropy bonus in the loss."""
    entropy_clip: float | None = Field(None, gt=0)
    """Only tokens with less entropy than this get the bonus, nats; null: all."""
    entropy_target: float | None = Field(None, gt=0)
    """Entropy below which the bonus is on, its weight steered, nats per token; null: always on."""
    entropy_step: float = Field(5e-3, gt=0)
    """How far a step moves the weight of the bonus towards the target."""
    supervised_coefficient: float = Field(0.0, ge=0)
    """Weight of maximum likelihood of worked answers mixed into each step; 0: none."""
    supervised_batch: Count = 16
    """Worked answers mixed into each step, from warm_start.path or the task's own."""
    aggregate: Choice = "token_mean"
    """How token losses become one number."""
    keep_sampling_mask: bool = False
    """Take log-probs over just the tokens that sampler.top_k, top_p and min_p left to draw from."""
    keep_routing: bool = False
    """Send each token through the experts that the sampler sent it through (R3, routing replay);
    needs a mixture of experts."""


class ReferenceSection(Section):
    path: str | None = None
    """Hugging Face directory of the reference policy; null: the policy at the start of the run."""
    refresh_every: NonNegative = 0
    """Updates between two refreshes, which make it a copy of the policy; 0: it stays."""
    ema: float = Field(0.0, ge=0, lt=1)
    """Each update makes it ema * itself + (1 - ema) * policy; 0: it stays."""


class CriticSection(Section):
    path: str | None = None
    """Hugging Face directory of a reward model or policy that the critic starts from; null: the
    policy's own weights."""
    learning_rate: float = Field(1e-5, ge=0)
    """Peak learning rate of the critic."""
    warmup_steps: NonNegative = 0
    """Steps at the start of the run in which only the critic learns."""
    clip: float | None = Field(0.2, gt=0)
    """How far an update may move a value, reward units; null: as far as it wants."""


class TeacherSection(Section):
    source: Literal["none", "path", "self"] = "none"
    """What the policy is distilled from: nothing, a model in path, or an older copy of itself."""
    path: str | None = None
    """Hugging Face directory of the teacher, which has the policy's tokens; its vocabulary may be
    padded to another size."""
    refresh_every: NonNegative = 10
    """Updates after which source=self becomes a copy of the policy; 0: it stays the first."""
    form: Literal["advantage", "loss"] = "advantage"
    """advantage: -log(policy / teacher) of the drawn token; loss: a divergence of distributions."""
    kind: Literal["reverse", "forward", "js"] = "reverse"
    """Divergence of form=loss: KL(policy || teacher), KL(teacher || policy) or Jensen-Shannon."""
    beta: float = Field(0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture of kind=js."""
    top_k: NonNegative = 0
    """Likeliest tokens that form=loss looks at, the rest as one; 0: all, exactly."""
    top_of: Literal["teacher", "student"] = "teacher"
    """Whose likeliest tokens those are. The student's, at the start of the step, take one pass
    more, and see more of kind=reverse, which is about what the student does."""
    coefficient: float = Field(1.0, ge=0)
    """Weight of the distillation."""
    rewards: float = Field(1.0, ge=0)
    """Weight of the rewards' advantages beside it; 0: distillation alone."""

    @model_validator(mode="after")
    def _top_is_read(self) -> "TeacherSection":
        if self.top_of == "student" and (self.form != "loss" or not self.top_k):
            raise ValueError(
                f"teacher.top_of=student says whose teacher.top_k ({self.top_k}) likeliest tokens "
                f"form=loss looks at, and teacher.form is {self.form}. Set form=loss and top_k, or "
                "leave top_of out."
            )
        return self


class TrainerSection(Section):
    warmup_steps: NonNegative = 0
    """Updates over which the learning rate rises to its peak; a step asks for algorithm.epochs *
    minibatches of them."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's decay of the second moment."""
    epsilon: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    rounding: Literal["masters", "stochastic", "nearest"] = "masters"
    """How updates reach weights in bfloat16: by float32 masters beside them (4 bytes more a weight;
    with param_dtype=float32 the weights are that themselves), rounded at random so that the mean is
    right, or to the nearest, which loses steps below about 1/500 of a weight."""
    row_length: Positive | None = None
    """Length of a packed row, tokens; null: sampler.max_length."""
    micro_batch_tokens: Positive = 4096
    """Tokens (padding included) in one forward and backward pass."""
    logprob_chunk: Positive = 1024
    """Tokens of each device whose logits exist at once."""
    offload: tuple[Literal["optimizer", "reference"], ...] = ()
    """What lies in the hosts' memory while it is not used: AdamW's moments (and the masters of
    trainer.rounding), which come to the device for each update; the reference policy, which comes
    for a pass of its own before it."""
    compiler_options: dict[str, str] = {}
    """XLA's options for compiling the update, by name; those of TPUs are refused elsewhere."""
    max_skipped_steps: Positive = 3
    """Non-finite steps in a row that stop the run."""


class WeightsSection(Section):
    dtype: Literal["float32", "bfloat16", "int8", "float8_e4m3fn"] | None = None
    """Type that is sent and that the sampler keeps the weights in; null: model.dtype. The last two:
    the layers' matrices, each output with a scale; all else in model.dtype."""
    probe: bool = True
    """After each publish, compare the sampler's log-probs on a fixed sequence with the
    trainer's."""
    probe_tolerance: float = Field(1e-3, gt=0)
    """Largest allowed difference of those, nats."""
    checksum: bool = True
    """After each transfer, compare a checksum of every array on both sides before it is used."""

    @property
    def eight_bits(self) -> Literal["int8", "float8_e4m3fn"] | None:
        """What the sampler's matrices are rounded to; None: they are not."""
        return self.dtype if self.dtype in ("int8", "float8_e4m3fn") else None


class EvalSection(Section):
    every: NonNegative = 10
    """Updates between two evaluations; 0: only at the start and the end."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the evaluation; 0 is greedy."""


class RewardSection(Section):
    function: Choices = "exact"
    """Built-in reward (exact, gsm8k, math), your own (FILE.py:FUNCTION), or a list of these with
    weights ([math, {my.py:short: {weight: 0.1}}]); none where there is a model. Where there is
    one, it alone judges the evaluation. Its part `correct`, 0 to 1, is the accuracy."""
    function_weight: float = 1.0
    """Weight of the function's reward in training beside reward.model; 0: it only judges the
    evaluation."""
    model: str | None = None
    """Folder of a reward model, as run.job=reward_model leaves it; null: none."""
    model_weight: float = 1.0
    """Weight of that model's score, which is added to the function's reward."""
    timeout_s: float = Field(30.0, gt=0)
    """Longest time that a function may take for one answer (for all answers to a prompt where it
    judges them together), seconds."""
    threads: Count = 16
    """Threads that call functions that are not async, at most; async ones wait side by side."""

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each function by its name; empty: none."""
        listed = each_of(self.function)
        told = [(name_of(choice), arguments_of(choice)) for choice in listed]
        return {name: arguments.get("weight", 1.0) for name, arguments in told if name != "none"}

    @model_validator(mode="after")
    def _some_reward(self) -> "RewardSection":
        listed = each_of(self.function)
        for choice in listed:
            weight = arguments_of(choice).get("weight", 1.0)
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            is_number = is_number and abs(weight) <= float_info.max  # isfinite(10**400) raises
            if arguments_of(choice).keys() - {"weight"} or not is_number:
                raise ValueError(
                    f"reward.function: {name_of(choice)} takes one argument, weight, a number; "
                    f"given {arguments_of(choice)}. Correct it."
                )
        names = [name_of(choice) for choice in listed]
        if len(set(names)) < len(names) or (len(names) != 1 and "none" in names):
            raise ValueError(
                f"reward.function lists {', '.join(names)}: give each function once, and none "
                "alone."
            )
        if not self.weights and self.model is None:
            raise ValueError(
                f"reward.function={self.function} leaves no reward at all. Set reward.model to the "
                "folder of a reward model, or reward.function to exact, gsm8k, math or "
                "FILE.py:FUNCTION."
            )
        return self


class FaultsSection(Section):
    """What is tried, how often and for how long, before something that failed ends the run."""

    backoff_s: float = Field(1.0, ge=0)
    """Wait before a sampler is started again or a group is scored again, seconds; it doubles with
    each failure in a row, up to 60."""
    sampler_restarts: NonNegative = 3
    """Times that one sampler is started again before it is given up; an hour without trouble
    clears the count."""
    sampler_hang_s: float = Field(600.0, gt=0)
    """A sampler with work that finishes no block for so long hangs, compiling included, seconds."""
    nonfinite_in_a_row: Positive = 8
    """Completions with NaN or infinite log-probs in a row after which a sampler is started
    again."""
    scorer_timeout_s: float = Field(600.0, gt=0)
    """Longest time that scoring one group may take, reward model and waiting for one of
    reward.threads included, seconds."""
    scorer_retries: NonNegative = 2
    """Times that a group is scored again where the scorer failed or took too long."""
    env_timeout_s: float = Field(600.0, gt=0)
    """Longest time that an environment may take for one reply, seconds."""
    max_failures: Positive = 8
    """Groups that fail in a row and end the run."""
    watchdog_s: float = Field(1800.0, ge=0)
    """A run that makes no progress for so long stops and names the part that stands still,
    compiling included, seconds; 0: it waits for ever."""


class CheckpointSection(Section):
    every: NonNegative = 50
    """Updates between two checkpoints; 0: only at the end."""
    keep: Positive = 2
    """Newest checkpoints kept."""
    verify: bool = True
    """Compare every file with its checksum before a checkpoint is read; one that differs gives way
    to the one before it."""
    grace_s: float = Field(25.0, gt=0)
    """Seconds after SIGTERM in which the run saves and ends (exit code 75); then it ends without.
    Keep it below the job controller's own limit, which is 30 on Kubernetes by default."""


class MetricsSection(Section):
    tensorboard: bool = True
    """Write TensorBoard events."""
    samples_every: NonNegative = 10
    """Updates between two records of sample completions; 0: none."""
    peak_flops: float | None = Field(None, gt=0)
    """Peak of one trainer device for the FLOP utilisation, FLOP/s; null: measured by a matrix
    product."""


class Config(Section):
    run: RunSection = RunSection()
    distributed: DistributedSection = DistributedSection()
    mesh: MeshSection = MeshSection()
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
    def capacity(self) -> int:
        """Groups active at once where rollouts wait: ((max_staleness + 1) * groups_per_step) //
        reuse - lookahead."""
        steps = self.staleness.max_staleness + 1
        groups = steps * self.algorithm.groups_per_step // self.buffer.reuse
        return groups - self.staleness.lookahead

    @property
    def lowest_limit(self) -> int:
        """Smallest staleness to aim at: ceil(reuse * (1 + lookahead / groups_per_step)) - 1, below
        which no step could be filled; with drop 1, below which all that an update overtakes is
        dropped."""
        if self.staleness.when_too_old == "drop":
            return 1
        per_step = self.algorithm.groups_per_step
        return -(-self.buffer.reuse * (per_step + self.staleness.lookahead) // per_step) - 1

    @property
    def row_length(self) -> int:
        """Length of a packed training row, tokens."""
        return self.trainer.row_length or self.sampler.max_length

    def devices_of_process(self, count: int) -> int:
        """Devices that each of `count` processes needs for run.job. ValueError where so many cannot
        make this run."""
        if self.run.job != "rl":
            return self.mesh.without_samplers.devices_of_process(count)
        if count == 1:
            return self.mesh.num_devices
        refused = {
            "reward.model": (self.reward.model is not None, "leave it null"),
            "data.curriculum": (self.data.curriculum != "none", "set data.curriculum=none"),
            "mesh.colocated": (self.mesh.colocated, "set mesh.colocated=false"),
        }
        for key, (is_set, remedy) in refused.items():
            if is_set:
                raise ValueError(
                    f"{key} works in one process only, and this run has {count}: {remedy}, or run "
                    "on one host."
                )
        if self.algorithm.groups_per_step % count:
            raise ValueError(
                f"algorithm.groups_per_step ({self.algorithm.groups_per_step}) must be a multiple "
                f"of the number of processes ({count}): each plays an equal part. Change it."
            )
        return self.mesh.devices_of_process(count)

    @model_validator(mode="after")
    def _holds_together(self) -> "Config":
        """All broken rules at once, as the arguments of one ValueError."""
        rules = (
            self._can_be_paced,
            self._fits_together,
            self._has_answers,
            self._all_is_read,
            self._all_is_learnt,
        )
        broken = [problem for rule in rules for problem in rule()]
        if broken:
            raise ValueError(*broken)
        return self

    def _can_be_paced(self) -> Iterator[str]:
        section = self.staleness
        if section.when_too_old == "drop" and section.max_staleness == 0:
            yield (
                "staleness.when_too_old=drop with staleness.max_staleness=0 would drop every group "
                "that is under way at an update: rollouts would work for nothing while the trainer "
                "learns. Set staleness.when_too_old=wait (it trains on the same and drops nothing) "
                "or staleness.max_staleness=1."
            )
        if section.adapt != "none" and self.lowest_limit >= section.max_staleness:
            yield (
                f"staleness.adapt={section.adapt} has nothing to choose from: the staleness aimed "
                f"at can be {self.lowest_limit} at least (buffer.reuse, staleness.lookahead and "
                "staleness.when_too_old decide it) and staleness.max_staleness "
                f"({section.max_staleness}) at most. Raise staleness.max_staleness or set "
                "staleness.adapt=none."
            )

    def _has_answers(self) -> Iterator[str]:
        """Records without answers where something asks for them."""
        jsonl = self.data.jsonl
        if self.data.source != "jsonl" or jsonl.answer_field is not None:
            return
        judges = sorted(GRADERS & self.reward.weights.keys())
        asking = {
            "run.job=sft": self.run.job == "sft",
            "warm_start.steps": bool(self.warm_start.steps) and self.run.job == "rl",
            "algorithm.supervised_coefficient": bool(self.algorithm.supervised_coefficient),
            f"reward.function={', '.join(judges)}": self.run.job == "rl" and bool(judges),
            "data.jsonl.answer_mark": jsonl.answer_mark is not None,
        }
        if needs := next((key for key, asks in asking.items() if asks), None):
            yield (
                f"{needs} needs the records' answers, and data.jsonl.answer_field=null says that "
                "they have none. Name the field, or leave the other out."
            )

    def _all_is_read(self) -> Iterator[str]:
        """What is set, and nothing would read. Where the switch of a feature was turned off in so
        many words, what the feature would read may stay: an override can turn off what a file
        describes, and it is told in a warning."""
        unread: dict[str, list[str]] = {}  # by the switch that is off
        for keys, is_read, wanted, switches in self._readers():
            for key in keys.split():
                section, name = self._owner(key)
                if is_read or not section.is_set(name):
                    continue
                told = f"{key} ({getattr(section, name)})"
                if off := [switch for switch in switches.split() if self._is_given(switch)]:
                    unread.setdefault(off[0], []).append(told)
                else:
                    yield (
                        f"{told} is read by nothing without {wanted}. Set that, or leave {key} out."
                    )
        for switch, of_it in unread.items():
            log.warning(
                "read by nothing, as %s is %s: %s", switch, self._value(switch), ", ".join(of_it)
            )
        algorithm, reward = self.algorithm, self.reward
        if reward.model is None and reward.function_weight != 1:
            yield (
                f"reward.function_weight ({reward.function_weight}) weighs the function against "
                "reward.model, and there is none. Set the model, or leave the weight out."
            )
        outer = {reward.function_weight, reward.model_weight, *reward.weights.values()}
        if name_of(algorithm.advantage) == "gdpo" and outer != {1}:
            yield (
                "algorithm.advantage=gdpo weighs the parts of the reward itself. Set reward."
                "function_weight, model_weight and the functions' to 1, and gdpo's weights: "
                "{gdpo: {weights: {model: 0.5}}}."
            )
        yield from self._shaping_is_read()

    def _owner(self, key: str) -> tuple[Section, str]:
        """The section that holds a dotted key, and the last part of it."""
        *path, name = key.split(".")
        section: Any = self
        for part in path:
            section = getattr(section, part)
        return section, name

    def _is_given(self, key: str) -> bool:
        """Whether a setting was written down, be it as its default."""
        section, name = self._owner(key)
        return name in section.model_fields_set

    def _value(self, key: str) -> Any:
        section, name = self._owner(key)
        return getattr(section, name)

    def _readers(self) -> Iterator[tuple[str, bool, str, str]]:
        """Keys, whether something reads them, what would make it so, and the switches that turn it
        off."""
        a, teacher, staleness, job = self.algorithm, self.teacher, self.staleness, self.run.job
        for other in OF_OTHER_JOBS[job]:
            fields = type(getattr(self, other)).model_fields
            keys = " ".join(f"{other}.{n}" for n in fields)
            yield keys, False, f"another run.job than {job}", ""
        rest = [name for name in AlgorithmSection.model_fields if name not in OF_EVERY_JOB]
        yield " ".join(f"algorithm.{name}" for name in rest), job == "rl", "run.job=rl", ""
        if job in ("preference", "reward_model"):
            asked = "run.job=preference"
            yield "preference.loss preference.reference", job == "preference", asked, ""
            yield "preference.margin", job == "reward_model", "run.job=reward_model", ""
            refers = name_of(self.preference.loss) not in ("simpo", "orpo")
            yield "preference.reference", refers, "a preference.loss that compares with it", ""
        of_file = "data.jsonl.path data.jsonl.eval_path"
        yield of_file, self.data.source == "jsonl", "data.source=jsonl", ""
        reads = self.data.source == "jsonl" or self.warm_start.path is not None
        of_records = "data.jsonl.prompt_field data.jsonl.template"
        yield of_records, reads, "data.source=jsonl or warm_start.path", ""
        mixes = bool(a.supervised_coefficient)
        reads = bool(self.warm_start.steps) or mixes
        yield "warm_start.path", reads, "warm_start.steps above 0", "warm_start.steps"
        probes = self.weights.probe
        yield "weights.probe_tolerance", probes, "weights.probe=true", "weights.probe"
        if job != "rl":
            return
        of_order = "data.curriculum_pool data.curriculum_threshold"
        yield of_order, self.data.curriculum != "none", "data.curriculum", "data.curriculum"
        drops, switch = staleness.when_too_old == "drop", "staleness.when_too_old"
        yield "staleness.overcommit", drops, f"{switch}=drop", switch
        adapts, switch = staleness.adapt == "ess", "staleness.adapt"
        yield "staleness.ess_target", adapts, f"{switch}=ess", switch
        of_signal = "algorithm.max_resampled algorithm.signal_part algorithm.signal_std"
        switch = "algorithm.dynamic_sampling"
        yield of_signal, a.dynamic_sampling, f"{switch}=true", switch
        of_reference = " ".join(f"reference.{name}" for name in ReferenceSection.model_fields)
        refers, switch = bool(a.kl_coefficient), "algorithm.kl_coefficient"
        of_kl = f"algorithm.kl algorithm.kl_in algorithm.kl_target {of_reference}"
        yield of_kl, refers, f"{switch} above 0", switch
        steers, switch = a.kl_target is not None, "algorithm.kl_target"
        yield "algorithm.kl_horizon", steers, switch, switch
        bonus = bool(a.entropy_coefficient or a.entropy_target)
        wanted, switch = "algorithm.entropy_coefficient", "algorithm.entropy_target"
        yield "algorithm.entropy_clip", bonus, f"{wanted} or entropy_target", f"{wanted} {switch}"
        yield "algorithm.entropy_step", a.entropy_target is not None, switch, switch
        switch = "algorithm.supervised_coefficient"
        yield "algorithm.supervised_batch", mixes, f"{switch} above 0", switch
        of_critic = " ".join(f"critic.{n}" for n in CriticSection.model_fields if n != "path")
        has_critic, wanted = (
            name_of(a.advantage) == "gae",
            "algorithm.advantage=gae, which has a critic",
        )
        yield of_critic, has_critic, wanted, "algorithm.advantage"
        yield "critic.path", has_critic, wanted, ""  # a folder that the start would look for
        of_teacher = [n for n in TeacherSection.model_fields if n not in ("source", "path")]
        teaches, by_loss = teacher.source != "none", teacher.form == "loss"
        switch = "teacher.source"
        yield " ".join(f"teacher.{n}" for n in of_teacher), teaches, switch, switch
        if teaches:
            yield "teacher.refresh_every", teacher.source == "self", f"{switch}=self", switch
            switch, wanted = "teacher.form", "teacher.form=loss"
            yield "teacher.kind teacher.top_k", by_loss, wanted, switch
            mixed, switch = teacher.kind == "js", "teacher.kind" if by_loss else switch
            yield "teacher.beta", by_loss and mixed, f"{wanted} and kind=js", switch
            switch = "teacher.rewards"
            of_rewards = " ".join(
                f"algorithm.{n}" for n in ("advantage", "loss", "shaping", "correction", "anchor")
            )
            rewarded = bool(teacher.rewards or not by_loss)
            yield of_rewards, rewarded, f"{switch} above 0", switch
        corrects = a.correction not in (None, "none")
        anchors = name_of(a.loss) not in WITHOUT_RATIO or corrects
        yield "algorithm.anchor", anchors, "another algorithm.loss or a correction", ""
        has_model = self.reward.model is not None
        yield "reward.model_weight", has_model, "reward.model", "reward.model"

    def _shaping_is_read(self) -> Iterator[str]:
        """Shapings by length look at answers that can be so long."""
        longest = self.sampler.max_new_tokens
        for choice in self.algorithm.shaping:
            name, given = name_of(choice), arguments_of(choice)
            most, cache = given.get("max_tokens"), given.get("cache_tokens", 0)
            if not isinstance(most, int) or not isinstance(cache, int):
                continue
            if name in ("soft_overlong", "overlong_filter") and most - cache >= longest:
                yield (
                    f"algorithm.shaping {name} acts on answers of more than {most - cache} tokens, "
                    f"and sampler.max_new_tokens allows {longest}: it would never act. Lower its "
                    "max_tokens, or raise sampler.max_new_tokens."
                )

    def _all_is_learnt(self) -> Iterator[str]:
        """Settings with which nothing could be learnt, or only noise."""
        a, teacher, rl = self.algorithm, self.teacher, self.run.job == "rl"
        waits = self.critic.warmup_steps if rl and name_of(a.advantage) == "gae" else 0
        updates = (self.run.steps - waits) * (a.epochs * a.minibatches if rl else 1)
        if self.trainer.warmup_steps > updates > 0:
            less = " less critic.warmup_steps" if waits else ""
            yield (
                f"trainer.warmup_steps ({self.trainer.warmup_steps}) is more than all updates of "
                f"the run ({updates}: run.steps{less}, times algorithm.epochs and minibatches): "
                "the learning rate would never reach its peak. Lower it, or raise run.steps."
            )
        if not rl:
            return
        if self.sampler.temperature == 0 or self.sampler.top_k == 1:
            yield (
                f"sampler.temperature ({self.sampler.temperature:g}) and sampler.top_k "
                f"({self.sampler.top_k}) leave one token to draw: all answers to a prompt would be "
                "the same, and their log-probs no policy's. Set temperature=1.0 and top_k=0; "
                "eval.temperature is that of the evaluation."
            )
        name = name_of(a.advantage)
        distils = teacher.source != "none"
        if (
            a.group_size == 1
            and name in COMPARED_IN_GROUP
            and not (distils and teacher.rewards == 0)
        ):
            yield (
                f"algorithm.advantage={name} compares the answers to one prompt, and "
                "algorithm.group_size=1 has one: all advantages would be 0. Raise group_size, or "
                "set algorithm.advantage=reinforce_pp; for distillation alone teacher.rewards=0."
            )
        yield from self._tokens_differ()
        answers = a.groups_per_step * a.group_size
        if a.minibatches > answers:
            yield (
                f"algorithm.minibatches ({a.minibatches}) is more than the answers of a step "
                f"({answers}: groups_per_step * group_size): no part would be left for some of "
                f"them. Set it to {answers} at most."
            )
        if a.dynamic_sampling and a.group_size < 2:
            yield (
                "algorithm.dynamic_sampling drops groups whose rewards are all equal, which those "
                "of algorithm.group_size=1 always are. Raise it, or set dynamic_sampling=false."
            )
        if a.dynamic_sampling and distils and teacher.rewards == 0:
            yield (
                "algorithm.dynamic_sampling drops groups by their rewards, which teacher.rewards=0 "
                "does not learn from. Set dynamic_sampling=false, or teacher.rewards above 0."
            )
        if distils and teacher.coefficient == 0:
            yield (
                f"teacher.coefficient=0 learns nothing from teacher.source={teacher.source}. Raise "
                "it, or set teacher.source=none."
            )
        if a.kl_coefficient and a.kl_in == "loss" and name_of(a.kl) == "k1":
            yield (
                "algorithm.kl=k1 with algorithm.kl_in=loss has an expected gradient of 0: it would "
                "hold nothing back. Set algorithm.kl=k2 (or unbiased, k3), or kl_in=reward."
            )
        floor = arguments_of(a.advantage).get("floor", 0)
        noisy = name in DIVIDED_IN_GROUP and not (name == "group_normalized" and floor)
        if a.kl_coefficient and a.kl_in == "reward" and noisy:
            yield (
                f"algorithm.kl_in=reward with algorithm.advantage={name} blows the KL of a group "
                "of equal rewards up to advantages of full size. Set kl_in=loss, or an advantage "
                "that does not divide by the group's spread (group_mean, rloo, reinforce_pp), or "
                "{group_normalized: {floor: 0.1}}."
            )
        if name == "gae" and self.critic.warmup_steps >= self.run.steps:
            yield (
                f"critic.warmup_steps ({self.critic.warmup_steps}) leaves the policy none of "
                f"run.steps ({self.run.steps}) to learn in. Lower it, or raise run.steps."
            )
        if a.supervised_coefficient and self.sampler.temperature != 1.0:
            yield (
                f"algorithm.supervised_coefficient learns at sampler.temperature "
                f"({self.sampler.temperature}), and worked answers are learnt at 1. Set the "
                "temperature to 1, or the coefficient to 0."
            )

    def _tokens_differ(self) -> Iterator[str]:
        """Advantages of tokens that are all alike, where they are compared with each other alone:
        one answer, rewarded as a whole, undiscounted."""
        a, name = self.algorithm, name_of(self.algorithm.advantage)
        steps = a.kl_coefficient and a.kl_in == "reward"
        if any(is_own(function) for function in self.reward.weights) or steps:
            return  # single tokens may be rewarded
        if self.teacher.source != "none" and self.teacher.rewards == 0:
            return
        alone = a.group_size == 1 and (name == "discounted" or a.groups_per_step == 1)
        whole = arguments_of(a.advantage).get("gamma", 1) == 1
        if alone and whole and name in ("discounted", *CENTERED_IN_STEP):
            where = "group" if name == "discounted" else "step"
            yield (
                f"algorithm.advantage={name} compares the tokens of a {where}, and one answer with "
                "gamma=1 gives all the same: all advantages would be 0. Raise algorithm.group_size"
                + ("." if name == "discounted" else " or groups_per_step.")
            )

    def _fits_together(self) -> Iterator[str]:
        if self.run.job == "sft" and self.warm_start.steps:
            yield (
                f"run.job=sft is supervised training itself; warm_start.steps "
                f"({self.warm_start.steps}) would do the same before it. Set warm_start.steps=0."
            )
        waits = self.staleness.when_too_old == "wait"
        most = self.staleness.max_staleness * self.algorithm.groups_per_step
        if waits and self.staleness.lookahead > most:
            yield (
                f"staleness.lookahead ({self.staleness.lookahead}) must be at most max_staleness * "
                f"groups_per_step ({most}): a step could never be filled. Set "
                f"staleness.lookahead={most} or raise staleness.max_staleness."
            )
        if waits and self.capacity < self.algorithm.groups_per_step:
            yield (
                f"buffer.reuse ({self.buffer.reuse}) leaves room for {self.capacity} groups at "
                f"once, fewer than algorithm.groups_per_step ({self.algorithm.groups_per_step}): a "
                "step could never be filled. Lower it, or raise staleness.max_staleness to at "
                "least buffer.reuse - 1 and more with staleness.lookahead."
            )
        if (
            self.buffer.select != "strict"
            and self.buffer.reuse == 1
            and not self.staleness.lookahead
        ):
            yield (
                f"buffer.select={self.buffer.select} has nothing to choose from with "
                "staleness.lookahead=0 and buffer.reuse=1. Raise one of them, or set "
                "buffer.select=strict."
            )
        longest = self.data.max_prompt_tokens + 1
        if longest > self.sampler.max_length:
            yield (
                f"data.max_prompt_tokens ({self.data.max_prompt_tokens}) leaves no room for an "
                "answer "
                f"in sampler.max_length ({self.sampler.max_length}). Lower the first or raise the "
                "second."
            )
        if self.row_length < self.sampler.max_length:
            yield (
                f"trainer.row_length ({self.row_length}) is shorter than sampler.max_length "
                f"({self.sampler.max_length}): long episodes could not be trained on. Raise it."
            )
        context = self.mesh.trainer.context
        if context > 1 and self.row_length % (2 * context):
            yield (
                f"trainer.row_length ({self.row_length}; null is sampler.max_length) must be a "
                f"multiple of 2 * mesh.trainer.context ({2 * context}): each device takes two "
                "equal parts of a row. Change one of them."
            )
        if self.trainer.micro_batch_tokens < self.row_length:
            yield (
                f"trainer.micro_batch_tokens ({self.trainer.micro_batch_tokens}) is less than one "
                "row "
                f"({self.row_length} tokens). Raise it to at least {self.row_length}."
            )
        if (self.teacher.source == "path") != (self.teacher.path is not None):
            yield (
                f"teacher.source={self.teacher.source} and teacher.path={self.teacher.path} do not "
                "go together: give a path exactly with teacher.source=path."
            )
        if self.weights.eight_bits and self.weights.probe and self.weights.probe_tolerance < 0.01:
            yield (
                f"weights.dtype={self.weights.dtype} rounds the sampler's weights, so that its "
                "log-probs on the probe differ from the trainer's by more than "
                f"weights.probe_tolerance ({self.weights.probe_tolerance:g}). Raise it to about "
                "0.5 nats, or set weights.probe=false."
            )
        if self.model.param_dtype == "float32" and self.trainer.rounding != "masters":
            raise ValueError(
                f"trainer.rounding={self.trainer.rounding} says how weights in bfloat16 are "
                "rounded, and model.param_dtype is float32. Set model.param_dtype=bfloat16, or "
                "leave it out."
            )
        refers = bool(self.algorithm.kl_coefficient)
        whole = name_of(self.algorithm.kl) == "full" and refers
        if "reference" in self.trainer.offload and (whole or not refers):
            yield (
                "trainer.offload=reference needs a reference (algorithm.kl_coefficient above 0) of "
                "whose distributions only the drawn tokens matter (algorithm.kl not full). Leave "
                "reference out of it, or change those."
            )
        if whole and self.teacher.source != "none" and self.teacher.form == "loss":
            yield (
                "algorithm.kl=full and teacher.form=loss each compare whole distributions, and one "
                "step does that once. Set algorithm.kl=k3 or teacher.form=advantage."
            )
        if whole and self.algorithm.kl_in == "reward":
            yield (
                "algorithm.kl=full is a term of the loss. Set algorithm.kl_in=loss, or an "
                "estimator by tokens (k1)."
            )
        if self.algorithm.keep_sampling_mask and (
            whole or (self.teacher.source != "none" and self.teacher.form == "loss")
        ):
            yield (
                "algorithm.keep_sampling_mask looks at some tokens of the vocabulary, and "
                "algorithm.kl=full or teacher.form=loss at all. Set algorithm.kl=k3 and "
                "teacher.form=advantage, or sample without top_k, top_p and min_p."
            )
        if self.reference.refresh_every and self.reference.ema:
            yield (
                "reference.refresh_every and reference.ema are two ways to move the reference. "
                "Keep one."
            )
        if self.data.source == "jsonl" and not self.data.jsonl.path:
            yield ("data.jsonl.path is needed with data.source=jsonl: give the file of records.")
