"""Settings of the algorithm and of the models it needs: reference, critic, teacher, pairs.

Needs no JAX.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from jaxrl_async.config import function_facts as facts
from jaxrl_async.config.choice import Choice, Choices, arguments_of, name_of
from jaxrl_async.config.section import (
    Count,
    NonNegative,
    Positive,
    ReadWith,
    Section,
    check,
)
from jaxrl_async.config.userfile import is_own

ENTROPY_BONUS = ReadWith(
    "has_entropy_bonus",
    (),
    "algorithm.entropy_coefficient or entropy_target",
    ("entropy_coefficient", "entropy_target"),
)


LossName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class PivotSection(Section):
    """Continuations of answers, sampled from chosen tokens (pivots) and compared with each
    other."""

    continuations: Positive
    """Continuations of each pivot, in addition to the answer's own."""
    members: Positive = 1
    """Members of each group whose answers have pivots, chosen at random."""
    per_member: Positive = 1
    """Pivots of each of these answers; fewer where it has fewer tokens or marks."""
    where: Literal["lowest_logprob", "random", "fractions", "mark"] = "lowest_logprob"
    """Where continuations begin: at the least likely tokens (lowest_logprob), random tokens, equal
    fractions of the answer's length, or random tokens after a mark."""
    mark: Annotated[str, ReadWith("where", ("mark",))] = Field("\n", min_length=1)
    """For where=mark: a pivot follows a token whose text contains it."""
    trunk: Literal["group", "fork"] = "group"
    """Credit of the forked answer's own tokens after a pivot: against the group's other members
    (group), or the pivot's continuations (fork)."""


class LossSection(Section):
    """A further term of the policy's loss, per token."""

    loss: Choice
    """Function: nll, entropy, kl, squared_log_ratio, or your own (FILE.py:FUNCTION)."""
    coefficient: float = 1.0
    """Weight of the term at the start of the run; may be negative."""
    coefficient_end: float | None = None
    """Weight after ramp_steps updates, to which it goes linearly; null: it is constant."""
    ramp_steps: Annotated[Positive, ReadWith("coefficient_end", switches=())] = 100
    """Updates until the weight is coefficient_end."""
    tokens: Literal["answers", "right", "demonstrations"] = "answers"
    """Tokens that it covers: of all answers, of answers with a reward above right_reward (right),
    or of each step's demonstrations (algorithm.supervised_batch)."""
    right_reward: Annotated[float, ReadWith("tokens", ("right",), switches=())] = 0.5
    """Reward, before shaping, above which an answer counts as right."""
    tasks: tuple[str, ...] | None = Field(None, min_length=1)
    """Names of the tasks whose answers it covers; null: all."""
    gradient_every: NonNegative = 0
    """Updates between two measurements of its gradient (loss_grad_norm/NAME), each a backward pass
    of its own; 0: never."""

    def coefficient_at(self, step: int) -> float:
        """Return the weight in a step, from 0."""
        if self.coefficient_end is None:
            return self.coefficient
        share = min(step / self.ramp_steps, 1.0)
        return self.coefficient + share * (self.coefficient_end - self.coefficient)

    def troubles(self, where: str) -> Iterator[str]:
        """Yield a sentence for each contradiction; where: name of this section."""
        if not self.coefficient and not self.coefficient_end:
            yield (
                f"{where}.coefficient=0 leaves the component without an effect. Give it another "
                "coefficient, or remove the component."
            )
        if self.tokens == "demonstrations" and self.tasks is not None:
            yield (
                f"{where}.tasks is about answers, and demonstrations are of no task. Leave it out, "
                "or set tokens=answers or right."
            )
        name = name_of(self.loss)
        if self.tokens == "demonstrations" and name in facts.COMPONENTS_OF_ANSWERS:
            yield (
                f"{where}: {name} compares with policies whose log-probs of demonstrations are not "
                "computed. Set tokens=answers, or loss=nll."
            )


class AlgorithmSection(Section):
    learning_rate: float = Field(1e-5, ge=0)
    """Peak learning rate of the policy."""
    group_size: Count = 8
    """Answers sampled per prompt (G)."""
    groups_per_step: Count = 8
    """Prompts per training step (P)."""
    oversample: NonNegative = 0
    """Extra rollouts per group: the first group_size to finish are kept. Saves waiting for the
    slowest; favours short answers."""
    min_members: Positive | None = None
    """Minimum members of a group in which some fail; null: any failure drops the group."""
    pivots: PivotSection | None = None
    """More continuations of a group's answers, sampled from chosen tokens on."""
    shaping: tuple[Choice, ...] = ()
    """Transformations of rewards and masks, applied in order before the advantage."""
    advantage: Choice = "group_normalized"
    """Advantage estimator."""
    baseline: Literal["all", "unmasked"] = "all"
    """Answers that an answer is compared with: its whole group, as in DAPO (all), or those that no
    shaping masks (unmasked; RLOO-N with advantage=rloo)."""
    least_compared: Annotated[int, ReadWith("baseline", ("unmasked",))] = Field(2, ge=2)
    """Minimum unmasked answers for baseline=unmasked; in groups with fewer, all advantages are
    0."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal, and sample other prompts instead."""
    max_resampled: NonNegative | None = None
    """Maximum groups that dynamic sampling, or pairs.loss without a pair, may drop for one step
    before the run ends; null: ten steps' worth, at least 128, if none is kept; 0: no limit."""
    signal_part: Annotated[str | None, ReadWith("dynamic_sampling")] = None
    """Part of the reward, such as correct, that dynamic sampling compares; null: the whole
    reward."""
    signal_std: Annotated[float, ReadWith("dynamic_sampling")] = Field(0.0, ge=0)
    """Dynamic sampling also drops groups whose rewards have at most this standard deviation."""
    correction: Choices | None = None
    """Off-policy correction, one or a list; null: the loss's default (truncate_token, or none where
    the loss needs none)."""
    anchor: Annotated[
        Literal["behavior", "proximal"],
        ReadWith("has_ratio", (), "another algorithm.loss or a correction", ()),
    ] = "behavior"
    """Denominator of the loss's ratio: the policy that sampled the token (behavior), or the weights
    at the start of the step (proximal)."""
    loss: Choice = "ppo_clip"
    """Policy loss."""
    epochs: Positive = 1
    """Passes over the data of one step; the weights are published after the last."""
    minibatches: Positive = 1
    """Optimizer updates per pass, each on its own part of the step's sequences."""
    kl: Annotated[Choice, ReadWith("kl_coefficient")] = "k3"
    """Estimator of the KL from the reference; full: over the whole vocabulary."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the KL from the reference; 0: no reference is kept."""
    kl_in: Annotated[Literal["loss", "reward"], ReadWith("kl_coefficient")] = "loss"
    """Whether the KL is added to the loss or subtracted from the reward."""
    kl_target: Annotated[float | None, ReadWith("kl_coefficient")] = Field(None, gt=0)
    """KL to which kl_coefficient is adapted, nats per token; null: the coefficient is constant."""
    kl_horizon: Annotated[float, ReadWith("kl_target")] = Field(10.0, gt=0)
    """Time scale of that adaptation, steps."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus in the loss."""
    entropy_clip: Annotated[float | None, ENTROPY_BONUS] = Field(None, gt=0)
    """Only tokens with less entropy than this get the bonus, nats."""
    entropy_target: float | None = Field(None, gt=0)
    """Entropy below which the bonus acts, with an adapted weight, nats per token; null: it always
    acts, with a constant weight."""
    entropy_step: Annotated[float, ReadWith("entropy_target")] = Field(5e-3, gt=0)
    """Change of the bonus's weight per step, towards the entropy target."""
    supervised_coefficient: float = Field(0.0, ge=0)
    """Weight of a supervised loss on demonstrations in each step."""
    supervised_batch: Annotated[
        Count,
        ReadWith(
            "mixes",
            (),
            "algorithm.supervised_coefficient above 0, or algorithm.losses with "
            "tokens=demonstrations",
            ("supervised_coefficient", "losses"),
        ),
    ] = 16
    """Demonstrations per step, from warm_start.path or the task."""
    losses: dict[LossName, LossSection] | None = None
    """Further terms of the loss by name, each with a function of the tokens and a coefficient."""
    aggregate: Choice = "token_mean"
    """How the token losses are averaged."""
    keep_sampling_mask: bool | None = None
    """Compute the trainer's log-probs over only the tokens that sampler.top_k, top_p and min_p
    kept; false: over the whole vocabulary, with a biased ratio; null: true if these remove any,
    without pairs."""
    keep_routing: bool = False
    """Replay the sampler's choice of experts in the trainer (R3); mixture-of-experts models
    only."""

    @property
    def has_ratio(self) -> bool:
        """Whether a ratio of policies, of the loss or of a correction, is computed."""
        corrected = self.correction not in (None, "none")
        return corrected or name_of(self.loss) not in facts.WITHOUT_RATIO

    @property
    def has_whole_kl(self) -> bool:
        """Whether the KL from the reference is taken over the whole vocabulary."""
        return bool(self.kl_coefficient) and name_of(self.kl) in facts.WHOLE_VOCABULARY

    @property
    def components(self) -> Mapping[str, LossSection]:
        """The loss components by name."""
        return {} if self.losses is None else self.losses

    @property
    def mixes(self) -> bool:
        """Whether demonstrations are trained on in each step."""
        covered = any(one.tokens == "demonstrations" for one in self.components.values())
        return self.supervised_coefficient > 0 or covered

    @property
    def refers(self) -> bool:
        """Whether a term of the loss or the rewards compares with a reference policy."""
        components = (name_of(one.loss) for one in self.components.values())
        return self.kl_coefficient > 0 or bool(facts.REFERRING_COMPONENTS & {*components})

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether the loss has an entropy bonus."""
        return bool(self.entropy_coefficient or self.entropy_target)

    @check
    def a_whole_kl_is_in_the_loss(self) -> Iterator[str]:
        """Require a KL over the whole vocabulary to be in the loss: it belongs to no token."""
        if self.has_whole_kl and self.kl_in == "reward":
            yield (
                "algorithm.kl=full is a term of the loss. Set algorithm.kl_in=loss, or an "
                "estimator per token (k1)."
            )

    @check
    def each_component_has_an_effect(self) -> Iterator[str]:
        """Require settings of loss components that have an effect."""
        for name, one in self.components.items():
            yield from one.troubles(f"algorithm.losses.{name}")

    @check
    def one_kl_looks_at_tokens(self) -> Iterator[str]:
        """Refuse a component that needs log-probs of tokens if a KL is over the vocabulary."""
        components = {name_of(one.loss) for one in self.components.values()}
        if self.has_whole_kl and components & facts.REFERRING_COMPONENTS:
            yield (
                "algorithm.losses has a component kl, which reads the reference's log-probs of "
                "tokens, and algorithm.kl=full compares whole distributions in their place. Set "
                "algorithm.kl=k3, or remove the component."
            )

    @check
    def a_kl_in_the_loss_has_a_gradient(self) -> Iterator[str]:
        """Require a KL estimator in the loss whose expected gradient is not 0."""
        if (
            self.kl_coefficient
            and self.kl_in == "loss"
            and name_of(self.kl) in facts.WITHOUT_GRADIENT
        ):
            yield (
                f"algorithm.kl={name_of(self.kl)} with algorithm.kl_in=loss has an expected "
                "gradient of 0: it has no effect. Set algorithm.kl=k2 (or unbiased, k3), or "
                "kl_in=reward."
            )

    @check
    def a_kl_in_the_reward_is_not_blown_up(self) -> Iterator[str]:
        """Refuse a division of a KL in the reward by a spread that consists of that KL alone."""
        name = name_of(self.advantage)
        floor = arguments_of(self.advantage).get("floor", 0)
        divides = name in facts.DIVIDED_IN_GROUP and not (name == "group_normalized" and floor)
        if self.kl_coefficient and self.kl_in == "reward" and divides:
            yield (
                f"algorithm.kl_in=reward with algorithm.advantage={name} amplifies the KL of a "
                "group of equal rewards to advantages of full size. Set kl_in=loss, or an "
                "advantage that does not divide by the group's spread (group_mean, rloo, "
                "reinforce_pp), or {group_normalized: {floor: 0.1}}."
            )

    @check
    def dynamic_sampling_keeps_some_groups(self) -> Iterator[str]:
        """Require several answers per group for dynamic sampling, which compares their rewards."""
        if self.dynamic_sampling and self.group_size < 2:
            yield (
                "algorithm.dynamic_sampling drops groups whose rewards are all equal, and a group "
                "of algorithm.group_size=1 always has equal rewards. Raise it, or set "
                "dynamic_sampling=false."
            )

    @check
    def continuations_are_compared(self) -> Iterator[str]:
        """Require an advantage that compares answers from one state, and no downsampling."""
        pivots = self.pivots
        if pivots is None:
            return
        name = name_of(self.advantage)
        if name not in facts.COMPARED_IN_GROUP | facts.DIVIDED_IN_GROUP and not is_own(name):
            yield (
                f"algorithm.pivots.continuations ({pivots.continuations}) need an advantage that "
                f"compares the answers of a group, and algorithm.advantage={name} does not. Choose "
                "one that does (group_normalized, group_mean, rloo), or set algorithm.pivots=null."
            )
        if any(name_of(choice) == "downsample" for choice in self.shaping):
            yield (
                "algorithm.pivots compares continuations with the answer from which they branch, "
                "which downsample in algorithm.shaping may drop. Remove one of them."
            )


class ReferenceSection(Section):
    """The policy that a KL or a loss of pairs compares with. null: the run's initial policy."""

    path: str | None = None
    """Hugging Face directory; null: the initial policy of the run."""
    teacher: str | None = None
    """Name of a model in `teachers` that gives the log-probs: the trainer's chips then hold no
    reference."""
    refresh_every: NonNegative = 0
    """Updates between two copies of the policy into the reference; 0: none."""
    ema: float = Field(0.0, ge=0, lt=1)
    """After each update the reference becomes ema * reference + (1 - ema) * policy; 0: it stays
    fixed."""

    @check
    def the_reference_moves_in_one_way(self) -> Iterator[str]:
        """Require either refreshes or a moving average, not both."""
        if self.refresh_every and self.ema:
            yield (
                "reference.refresh_every and reference.ema are two ways to move the reference. "
                "Keep one of them."
            )


class CriticSection(Section):
    """The model of an advantage that needs values, such as gae. null: the defaults."""

    path: str | None = None
    """Hugging Face directory of a reward model or policy to start from; null: the policy's own
    weights."""
    learning_rate: float = Field(1e-5, ge=0)
    """Peak learning rate of the critic."""
    warmup_steps: NonNegative = 0
    """Steps at the start of the run that train only the critic."""
    clip: float | None = Field(0.2, gt=0)
    """Clip range of values around the old ones, reward units."""


class TeacherSection(Section):
    """Distillation from a teacher, in addition to the rewards or in their place."""

    source: Literal["path", "self", "teachers"]
    """Teacher: the model in path, an older copy of the policy itself (self), or those in the
    section teachers."""
    path: str | None = None
    """Hugging Face directory of the teacher; it must have the policy's tokens, but may pad its
    vocabulary differently."""
    refresh_every: Annotated[NonNegative, ReadWith("source", ("self",))] = 10
    """Updates between two copies of the policy into the teacher of source=self; 0: none."""
    form: Literal["advantage", "loss"] = "advantage"
    """advantage: -log(policy / teacher) of the sampled token is an advantage; loss: a divergence is
    a term of the loss."""
    kind: Annotated[Literal["reverse", "forward", "js"], ReadWith("form", ("loss",))] = "reverse"
    """Divergence for form=loss: KL(policy || teacher) (reverse), KL(teacher || policy) (forward) or
    generalised Jensen-Shannon (js)."""
    beta: Annotated[
        float,
        ReadWith("form", ("loss",), "teacher.form=loss and kind=js"),
        ReadWith("takes_beta", (), "teacher.form=loss and kind=js", ("kind",)),
    ] = Field(0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture for kind=js."""
    top_k: Annotated[NonNegative, ReadWith("form", ("loss",))] = 0
    """Number of likeliest tokens that form=loss compares one by one, with all others lumped
    together; 0: the whole vocabulary."""
    top_k_of: Literal["teacher", "student"] = "teacher"
    """Whose likeliest tokens are compared: the teacher's, or the student's, which suit kind=reverse
    and cost one more pass."""
    unmatched_weight: Annotated[float, ReadWith("form", ("loss",))] = Field(0.0, ge=0)
    """Weight of a further term of form=loss for a teacher with another tokenizer: the distance
    between the sorted probabilities of tokens that only one side has (ULD); 0: none."""
    coefficient: float = Field(1.0, gt=0)
    """Weight of the distillation term."""
    rewards: float = Field(1.0, ge=0)
    """Weight of the advantages from rewards; 0: only the distillation."""
    column: Annotated[str, ReadWith("source", ("teachers",))] = Field("teacher", min_length=1)
    """Column of a record that names its teacher, several ([math, code]), or their weights ({math:
    0.7, code: 0.3}); empty: none. Without it, the task's `teacher` decides, or the only teacher
    there is."""

    @property
    def takes_beta(self) -> bool:
        """Whether `kind`, if it is read, is a mixture."""
        return self.form != "loss" or self.kind == "js"

    @check
    def a_students_top_tokens_are_looked_at(self) -> Iterator[str]:
        """Require a loss over top tokens if the student chooses them."""
        if self.top_k_of == "student" and (self.form != "loss" or not self.top_k):
            yield (
                f"teacher.top_k_of=student decides whose top teacher.top_k ({self.top_k}) tokens "
                f"form=loss compares, and teacher.form is {self.form}. Set form=loss and top_k, or "
                "leave top_k_of out."
            )

    @check
    def a_teacher_at_a_path_has_one(self) -> Iterator[str]:
        """Require teacher.path exactly if teacher.source=path."""
        if (self.source == "path") != (self.path is not None):
            yield (
                f"teacher.source={self.source} and teacher.path={self.path} do not match: give a "
                "path exactly with teacher.source=path."
            )


OF_URL = ReadWith("url", switches=())
"""Marks settings of a teacher that only one at an address has."""
OF_PATH = ReadWith("path", switches=())


class FollowingTeacher(Section):
    """The policy itself as a teacher, on the trainer's chips: exactly one of average and every."""

    average: float | None = Field(None, gt=0, lt=1)
    """After each update the teacher becomes average * teacher + (1 - average) * policy."""
    every: NonNegative | None = None
    """Updates between two copies of the policy into the teacher; 0: it stays the initial policy."""


class NamedTeacher(Section):
    """A teacher of some or all records (teacher.source=teachers), or the reference
    (reference.teacher): exactly one of url, path and policy."""

    url: str | None = Field(None, pattern=r"^https?://\S+$")
    """Address, up to /v1, of a server that gives the log-probs of a prompt's tokens: jaxrl-async
    serve, vLLM, or another one with OpenAI's completions."""
    model: Annotated[str | None, OF_URL] = None
    """Name of the model, or of the adapter, at url."""
    path: str | None = None
    """Hugging Face directory of the teacher; without `tokenizer` it must have the policy's
    tokens."""
    policy: FollowingTeacher | None = None
    """The policy itself, as a moving average of its weights or an older version."""
    chips: Annotated[Literal["trainer", "sampler"], OF_PATH] = "trainer"
    """Where the teacher in path computes: on the trainer's chips at the start of a step, or on the
    first sampler's, while a group waits for its rewards."""
    adapter: Annotated[str | None, OF_PATH] = None
    """Directory of a LoRA adapter of the model in path, as PEFT writes it; it is merged."""
    key_variable: Annotated[str | None, OF_URL] = Field(None, pattern=r"^\w+$")
    """Environment variable with the API key of url."""
    protocol: Annotated[Literal["completions", "generate", "echo"], OF_URL] = "completions"
    """How url is asked: completions (/v1/completions with prompt_logprobs), generate
    (/inference/v1/generate), or echo (/v1/completions with echo, which gives no likeliest
    tokens)."""
    tokenizer: Annotated[str | None, ReadWith("is_queried", (), "url or chips=sampler", ())] = None
    """Hugging Face directory of the teacher's tokenizer, if it is not the policy's: the two are
    aligned by text."""
    context: str | None = Field(None, min_length=1)
    """Column of a record with a text or messages that the teacher reads in place of the prompt."""
    weight: float = Field(1.0, gt=0)
    """Weight of this teacher, unless a record names its own weights."""
    concurrency: Annotated[Count, OF_URL] = 16
    """Maximum concurrent calls of url."""
    timeout_s: Annotated[float, OF_URL] = Field(60.0, gt=0)
    """Timeout of one call of url, seconds; calls that broke or met an overload are repeated
    (faults.outage_s)."""
    max_wait_s: Annotated[float | None, OF_URL] = Field(None, gt=0)
    """Time that a group waits for this teacher before it is dropped, seconds; null:
    faults.scorer_timeout_s, and the end of an outage."""

    @property
    def is_queried(self) -> bool:
        """Whether it gives log-probs while a group waits; else the trainer computes them."""
        return self.url is not None or self.chips == "sampler"


class PairsSection(Section):
    """Preference learning within run.job=rl (online DPO): pairs of a prompt's answers take the
    place of advantages."""

    loss: Choice
    """Loss of a pair: dpo, ipo, ipo_average, simpo or orpo."""
    choose: Literal["best_worst", "best_random", "all"] = "best_worst"
    """Pairs of a group: its best answer against its worst (best_worst) or a random worse one
    (best_random), or each against each worse one (all)."""

    @property
    def refers(self) -> bool:
        """Whether the loss compares with the reference policy."""
        return name_of(self.loss) not in facts.WITHOUT_REFERENCE

    @check
    def a_pairs_loss_learns_from_pairs(self) -> Iterator[str]:
        """Refuse losses of single judged answers."""
        if (name := name_of(self.loss)) in facts.SINGLE_ANSWERS:
            yield (
                f"pairs.loss={name} trains on single answers that are labelled good or bad, "
                "against a baseline of mismatched answers; pairs are compared with each other. Set "
                "dpo, ipo, simpo or orpo; run.job=preference has kto."
            )
