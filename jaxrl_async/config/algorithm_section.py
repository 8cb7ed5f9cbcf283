"""Settings of the algorithm and of the models it needs: reference, critic, teacher, pairs.

Needs no JAX.
"""

from typing import Literal

from pydantic import Field

from jaxrl_async.config import function_facts as facts
from jaxrl_async.config.choice import Choice, Choices, name_of
from jaxrl_async.config.section import Count, NonNegative, Positive, Section


class PivotSection(Section):
    """Continuations of answers, sampled from chosen tokens (pivots) and compared with each
    other."""

    continuations: Positive
    """Continuations sampled from each pivot, in addition to the answer's own."""
    members: Positive = 1
    """Members of each group whose answers have pivots, chosen at random; at most all."""
    per_member: Positive = 1
    """Pivots of each of these answers; fewer where it has fewer tokens or marks."""
    where: Literal["lowest_logprob", "random", "fractions", "mark"] = "lowest_logprob"
    """Choice of the first token that is sampled again: the least likely tokens (lowest_logprob),
    random tokens, tokens at equal fractions of the answer's length, or random tokens after a
    mark."""
    mark: str = Field("\n", min_length=1)
    """Text of where=mark: a pivot follows a token whose text contains it."""
    trunk: Literal["group", "fork"] = "group"
    """Credit of the forked answer's own tokens after a pivot: by comparison with the group's other
    members (group), or with the pivot's continuations (fork)."""


class AlgorithmSection(Section):
    learning_rate: float = Field(1e-5, ge=0)
    """Peak learning rate of the policy."""
    group_size: Count = 8
    """Answers sampled per prompt (G)."""
    groups_per_step: Count = 8
    """Prompts per training step (P)."""
    oversample: NonNegative = 0
    """Extra rollouts per group: the first group_size to finish are kept, the others are cancelled
    and counted. Saves waiting for the slowest; favours short answers."""
    min_members: Positive | None = None
    """Minimum members of a group in which some fail, which are counted; null: any failure drops the
    group."""
    pivots: PivotSection | None = None
    """More continuations of a group's answers, sampled from chosen tokens on; null: none."""
    shaping: tuple[Choice, ...] = ()
    """Transformations of rewards and masks, applied in order before the advantage."""
    advantage: Choice = "group_normalized"
    """Advantage estimator."""
    baseline: Literal["all", "unmasked"] = "all"
    """Answers that an answer is compared with: its whole group, masked answers included, as in DAPO
    (all), or the answers that no shaping masks (unmasked; with advantage=rloo it is RLOO-N)."""
    least_compared: int = Field(2, ge=2)
    """With baseline=unmasked, minimum number of unmasked answers in a group: where there are fewer,
    all its answers get advantage 0 and are counted."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal, and sample other prompts instead."""
    max_resampled: NonNegative | None = None
    """Maximum groups that dynamic sampling, or pairs.loss without a pair, may drop for one step
    before the run ends; null: ten steps' worth and at least 128 groups, if none is kept; 0: no
    limit."""
    signal_part: str | None = None
    """Named part of the reward, such as correct, that dynamic sampling compares; null: the whole
    reward."""
    signal_std: float = Field(0.0, ge=0)
    """Dynamic sampling also drops groups whose rewards have at most this standard deviation."""
    correction: Choices | None = None
    """Off-policy correction, one or a list; null: the loss's default (at the level of its ratio:
    truncate_token; none for a loss that bounds its own ratio or has no ratio)."""
    anchor: Literal["behavior", "proximal"] = "behavior"
    """Denominator of the loss's ratio: the policy that sampled the token (behavior), or the weights
    at the start of the step (proximal)."""
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
    """Weight of a supervised (maximum likelihood) loss on demonstrations in each step; 0: none."""
    supervised_batch: Count = 16
    """Demonstrations per step for that loss, from warm_start.path or the task's own."""
    aggregate: Choice = "token_mean"
    """How the token losses are averaged into one number."""
    keep_sampling_mask: bool | None = None
    """Compute the trainer's log-probs over only the tokens that sampler.top_k, top_p and min_p
    kept; null: yes, if one of these removes any and pairs.loss, which has no ratio, is null. false
    in that case: over the whole vocabulary, with a biased ratio."""
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
    """Distillation from a teacher, in addition to the rewards or in their place."""

    source: Literal["path", "self", "teachers"]
    """Teacher to distil from: the model in path, an older copy of the policy itself (self), or
    those that the section teachers names (teachers)."""
    path: str | None = None
    """Hugging Face directory of the teacher; it must have the policy's tokens, but its vocabulary
    may be padded to another size."""
    refresh_every: NonNegative = 10
    """Updates between two copies of the policy into the teacher of source=self; 0: it stays the
    initial policy."""
    form: Literal["advantage", "loss"] = "advantage"
    """advantage: -log(policy / teacher) of the sampled token is an advantage; loss: a divergence of
    distributions is a term of the loss."""
    kind: Literal["reverse", "forward", "js"] = "reverse"
    """Divergence for form=loss: KL(policy || teacher) (reverse), KL(teacher || policy) (forward) or
    generalised Jensen-Shannon (js)."""
    beta: float = Field(0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture for kind=js."""
    top_k: NonNegative = 0
    """Number of likeliest tokens that form=loss compares one by one, with all
    others lumped together; 0: the whole vocabulary."""
    top_k_of: Literal["teacher", "student"] = "teacher"
    """Model whose likeliest tokens are compared. The student's cost one more pass at the start of
    the step; they suit kind=reverse, an expectation under the student."""
    coefficient: float = Field(1.0, ge=0)
    """Weight of the distillation term."""
    rewards: float = Field(1.0, ge=0)
    """Weight of the advantages from rewards; 0: only the distillation."""
    column: str = Field("teacher", min_length=1)
    """Column of a record that names its teacher for source=teachers: a name, a list of names, or
    names with weights ({math: 0.7, code: 0.3}); empty: none. Without the column, the task's
    `teacher` decides, or the only teacher there is."""


class NamedTeacher(Section):
    """A teacher of some or all records (teacher.source=teachers): exactly one of url and path."""

    url: str | None = Field(None, pattern=r"^https?://\S+$")
    """Address of a server that gives the log-probs of a prompt's tokens, up to /v1: that of
    jaxrl-async serve, of vLLM, or of another one with OpenAI's completions."""
    model: str | None = None
    """Name of the model, or of the adapter, at url."""
    path: str | None = None
    """Hugging Face directory of the teacher, which computes on the trainer's chips at the start of
    a step; it must have the policy's tokens, but its vocabulary may be padded to another size."""
    adapter: str | None = None
    """Directory of a LoRA adapter of the model in path, as PEFT writes it; it is merged."""
    key_variable: str | None = Field(None, pattern=r"^\w+$")
    """Environment variable that holds the API key of url; null: it needs none."""
    protocol: Literal["completions", "generate", "echo"] = "completions"
    """How url is asked: /v1/completions with prompt_logprobs, /inference/v1/generate with
    prompt_logprobs, or /v1/completions with echo, which gives no likeliest tokens."""
    context: str | None = Field(None, min_length=1)
    """Column of a record with what the teacher at url reads in place of the prompt: a text or
    messages, such as the question with a demonstration. null: the prompt."""
    weight: float = Field(1.0, gt=0)
    """Weight of this teacher; records that name their own weights replace it."""
    concurrency: Count = 16
    """Maximum concurrent calls of url."""
    timeout_s: float = Field(60.0, gt=0)
    """Timeout of one call of url, seconds. Calls that broke or met an overload (429, 5xx) are
    repeated with growing waits, as faults.outage_s and faults.backoff_s say."""
    max_wait_s: float | None = Field(None, gt=0)
    """Time that a group waits for this teacher, seconds; then the group is dropped. null: it waits
    for faults.scorer_timeout_s, and for the end of an outage."""


class PairsSection(Section):
    """Preference learning within run.job=rl (online DPO): pairs of a prompt's answers take the
    place of advantages."""

    loss: Choice
    """Loss of a pair: dpo, ipo, ipo_average, simpo or orpo, with its arguments."""
    choose: Literal["best_worst", "best_random", "all"] = "best_worst"
    """Pairs of a group: its best answer against its worst, or against a random worse one, or each
    answer against each worse one."""

    @property
    def refers(self) -> bool:
        """Whether the loss compares with the reference policy."""
        return name_of(self.loss) not in facts.WITHOUT_REFERENCE
