"""The whole configuration: one frozen section per part, each in a file of its own, *_section.py.

Other modules import them from here. A field's docstring is its help text (`--help`) and names its
unit. What settings must keep to together is checked by config/rules.py. Needs no JAX.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from jaxrl_async.config.algorithm_section import (
    AlgorithmSection,
    CriticSection,
    FollowingTeacher,
    NamedTeacher,
    PairsSection,
    ReferenceSection,
    TeacherSection,
)
from jaxrl_async.config.choice import Choice, Choices, arguments_of, each_of, name_of
from jaxrl_async.config.data_section import AdditionSection, DataSection, JsonlSection
from jaxrl_async.config.devices_section import AxesSection, DistributedSection, MeshSection
from jaxrl_async.config.endpoint_section import EndpointSection
from jaxrl_async.config.judge_section import JudgeSection, ProcessSection
from jaxrl_async.config.model_section import (
    ArchitectureSection,
    ModelSection,
    WeightsSection,
    dtype_on,
)
from jaxrl_async.config.offline_section import (
    PreferenceSection,
    RewardModelSection,
    SftSection,
    WarmStartSection,
)
from jaxrl_async.config.remote_section import RemoteSection
from jaxrl_async.config.reward_section import (
    EvalName,
    EvalSection,
    NamedEvals,
    NamedEvalSection,
    RewardSection,
)
from jaxrl_async.config.run_section import (
    CheckpointSection,
    FaultsSection,
    MetricsSection,
    RunSection,
)
from jaxrl_async.config.sampler_section import (
    BufferSection,
    PrioritySection,
    SamplerSection,
    StalenessSection,
)
from jaxrl_async.config.seats_section import SeatSection
from jaxrl_async.config.section import ReadWith, Section
from jaxrl_async.config.task_section import (
    SHARED_DATA,
    EnvSection,
    NamedTasks,
    NamedTaskSection,
    TaskName,
    TaskSamplingSection,
)
from jaxrl_async.config.trainer_section import TrainerSection
from jaxrl_async.staleness import least_limit

__all__ = [
    "AdditionSection",
    "AlgorithmSection",
    "ArchitectureSection",
    "AxesSection",
    "BufferSection",
    "CheckpointSection",
    "Choice",
    "Choices",
    "Config",
    "CriticSection",
    "DataSection",
    "DistributedSection",
    "EndpointSection",
    "EnvSection",
    "EvalSection",
    "FaultsSection",
    "FollowingTeacher",
    "JsonlSection",
    "JudgeSection",
    "MeshSection",
    "MetricsSection",
    "ModelSection",
    "NamedEvalSection",
    "NamedEvals",
    "NamedTaskSection",
    "NamedTasks",
    "NamedTeacher",
    "PairsSection",
    "PreferenceSection",
    "ProcessSection",
    "ReferenceSection",
    "RemoteSection",
    "RewardModelSection",
    "RewardSection",
    "RunSection",
    "SamplerSection",
    "SeatSection",
    "SftSection",
    "StalenessSection",
    "TaskSamplingSection",
    "TeacherSection",
    "TrainerSection",
    "WarmStartSection",
    "WeightsSection",
    "arguments_of",
    "each_of",
    "name_of",
]


RUN_NAME = r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$"
"""Pattern of the name of one of several runs: of its adapter, and of its folder."""
RunName = Annotated[str, Field(pattern=RUN_NAME)]
TeacherName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


LONGEST_SHARED_ROW = 8192
"""Longest row, tokens, that trainer.share_prefixes makes by default: on a TPU
attention reads a mask of each pair of a row's tokens, about 1 GB of it at this length."""
CHEAP_SHARED_ROW = 2048
"""Length up to which it does so whatever the contexts' length; beyond, a row holds two of the
longest at most. Attention by XLA's programs keeps a score of each pair of a row's tokens."""


class Config(Section):
    """A checked configuration of a run: `load` makes one, and its sections are attributes
    (docs/settings.md)."""

    run: RunSection = RunSection()
    distributed: DistributedSection = DistributedSection()
    mesh: MeshSection = MeshSection()
    endpoint: EndpointSection | None = None
    remote: RemoteSection | None = None
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    task: Choice | None = None
    """Task with its environment, data and reward: a built-in (calculator, guess_number), your own
    (FILE.py:NAME), or reasoning_gym:NAME."""
    tasks: dict[TaskName, NamedTaskSection] | None = None
    """Several tasks by name, in place of `task` and `data` (docs/mixing.md)."""
    mixing: Annotated[str | None, ReadWith("tasks", switches=())] = Field(
        None, pattern=r"^.+\.py:\w+$"
    )
    """Your own choice of the next group's task, FILE.py:NAME (docs/mixing.md): a function that
    returns a name, or weights by name; null: by the weights of `tasks`."""
    env: EnvSection = EnvSection()
    seats: dict[str, SeatSection] | None = None
    """Players of the task's game, by seat: policy, {model: DIR or initial}, {endpoint: URL, model:
    NAME}, {older: {every: N, keep: K}}, or {mixture: [...]}. The policy plays all other seats."""
    warm_start: WarmStartSection = WarmStartSection()
    sft: SftSection = SftSection()
    preference: PreferenceSection = PreferenceSection()
    reward_model: RewardModelSection = RewardModelSection()
    sampler: SamplerSection = SamplerSection()
    priorities: PrioritySection = PrioritySection()
    staleness: StalenessSection = StalenessSection()
    buffer: BufferSection = BufferSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    pairs: PairsSection | None = None
    reference: ReferenceSection | None = None
    critic: CriticSection | None = None
    teacher: TeacherSection | None = None
    teachers: dict[TeacherName, NamedTeacher] | None = None
    """Teachers by name, for teacher.source=teachers and reference.teacher: {url: URL, model: NAME},
    {path: DIR} or {policy: {average: 0.99}}."""
    trainer: TrainerSection = TrainerSection()
    weights: WeightsSection = WeightsSection()
    reward: RewardSection = RewardSection()
    faults: FaultsSection = FaultsSection()
    eval: EvalSection = EvalSection()
    evals: dict[EvalName, NamedEvalSection] | None = None
    """Evaluations by name, in addition to `eval` (docs/evaluation.md)."""
    checkpoint: CheckpointSection = CheckpointSection()
    metrics: MetricsSection = MetricsSection()
    runs: dict[RunName, dict[str, Any]] = Field({})
    """Several runs by name, which each train an adapter of one base on shared samplers: the
    settings that differ, or a file with them. They share model, mesh, sampler, weights, warm_start,
    faults and, except run.steps, run."""

    def on_devices(self, platform: str, capability: str | None = None) -> "Config":
        """Return it with model.dtype chosen for such devices, if it is null (dtype_on)."""
        if self.model.dtype is not None:
            return self
        chosen = dtype_on(platform, capability)
        return self.model_copy(update={"model": self.model.model_copy(update={"dtype": chosen})})

    @property
    def named_tasks(self) -> NamedTasks:
        """The run's tasks by name; empty: it has one, the setting `task` or its data."""
        return {} if self.tasks is None else self.tasks

    @property
    def by_task(self) -> dict[str, "Config"]:
        """The configuration as each task has it, by name; "": the run's only one."""
        return {name: self.of_task(name) for name in self.named_tasks} or {"": self}

    @property
    def has_task(self) -> bool:
        """Whether the run has a task, or one of its tasks has."""
        return self.task is not None or any(t.task is not None for t in self.named_tasks.values())

    def of_task(self, name: str) -> "Config":
        """Return the configuration of a run that trains only on one of the tasks."""
        own = self.named_tasks[name]
        data = DataSection() if own.data is None else own.data
        shared = {name: getattr(self.data, name) for name in SHARED_DATA}
        if data.system_prompt is None:
            shared["system_prompt"] = self.data.system_prompt
        return self.model_copy(
            update={
                **{"tasks": None, "mixing": None, "evals": None, "task": own.task},
                "data": data.model_copy(update=shared),
                "env": self.env if own.env is None else own.env,
                "reward": self.reward if own.reward is None else own.reward,
                "sampler": own.sampling.on(self.sampler),
            }
        )

    @property
    def truncates(self) -> bool:
        """Whether top_k, top_p or min_p leave some tokens out, in any task."""
        return any(config.sampler.truncates for config in self.by_task.values())

    @property
    def task_temperatures(self) -> tuple[float, ...]:
        """The temperature of each task, in their order, 1 where it is greedy; (): they have one."""
        each = tuple(config.sampler.temperature or 1.0 for config in self.by_task.values())
        return each if len(set(each)) > 1 else ()

    @property
    def temperature(self) -> float:
        """The temperature that all answers were sampled at; 1 if tasks have different ones."""
        first = next(iter(self.by_task.values()))
        return 1.0 if self.task_temperatures else first.sampler.temperature or 1.0

    @property
    def teacher_folders(self) -> dict[str, str]:
        """The directories of teachers that compute in this process, by setting."""
        path = None if self.teacher is None else self.teacher.path
        named = {f"teachers.{name}.path": t.path for name, t in self.named_teachers.items()}
        return {k: path for k, path in {"teacher.path": path, **named}.items() if path is not None}

    @property
    def serving(self) -> EndpointSection:
        """The settings with which the endpoint serves, if it does."""
        return EndpointSection() if self.endpoint is None else self.endpoint

    @property
    def named_teachers(self) -> Mapping[str, NamedTeacher]:
        """The teachers by name."""
        return {} if self.teachers is None else self.teachers

    @property
    def players(self) -> Mapping[str, SeatSection]:
        """The players of the task's game by seat, except the policy in all other seats."""
        return {} if self.seats is None else self.seats

    @property
    def remote_settings(self) -> RemoteSection:
        """How samplers in other processes join and get weights, if there are any."""
        return RemoteSection() if self.remote is None else self.remote

    @property
    def reference_settings(self) -> ReferenceSection:
        """The settings of the reference policy, if the run has one."""
        return ReferenceSection() if self.reference is None else self.reference

    @property
    def critic_settings(self) -> CriticSection:
        """The settings of the critic, if the run has one."""
        return CriticSection() if self.critic is None else self.critic

    @property
    def named_evals(self) -> NamedEvals:
        """The evaluations in addition to `eval`, by name."""
        return {} if self.evals is None else self.evals

    @property
    def refers(self) -> bool:
        """Whether run.job=rl keeps a reference policy."""
        return self.algorithm.refers or (self.pairs is not None and self.pairs.refers)

    @property
    def distils_by_loss(self) -> bool:
        """Whether a divergence from a teacher is a term of the loss."""
        return self.teacher is not None and self.teacher.form == "loss"

    @property
    def weighs_rewards(self) -> bool:
        """Whether the policy is trained by rewards; else by distillation alone."""
        return self.teacher is None or self.teacher.rewards > 0

    @property
    def compares_whole_distributions(self) -> bool:
        """Whether a loss compares the probabilities of all tokens of the vocabulary."""
        return self.algorithm.has_whole_kl or self.distils_by_loss

    @property
    def holds_reference(self) -> bool:
        """Whether run.job=rl keeps a reference policy on the trainer's chips, or in their host's
        memory; else a teacher gives its log-probs."""
        return self.refers and self.reference_settings.teacher is None

    @property
    def distilling(self) -> Mapping[str, NamedTeacher]:
        """The teachers by name that the policy learns from."""
        reference = self.reference_settings.teacher
        return {name: one for name, one in self.named_teachers.items() if name != reference}

    @property
    def keeps_masks(self) -> bool:
        """Whether sampling masks go with the tokens to the trainer; by default not where pairs are
        trained on, whose loss is of whole distributions and has no ratio."""
        keeps = self.algorithm.keep_sampling_mask
        keeps = self.pairs is None if keeps is None else keeps
        return self.truncates and keeps

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
    def prompt_limit(self) -> int:
        """Longest prompt of record files, tokens; see data.max_prompt_tokens."""
        if self.data.max_prompt_tokens is not None:
            return self.data.max_prompt_tokens
        sampler = self.sampler
        if self.run.job != "rl":
            return max(self.longest_example - 1, 1)
        left = sampler.max_length - sampler.max_new_tokens
        if not sampler.is_set("max_new_tokens"):
            left = max(left, sampler.max_length // 2)
        return max(left, 1)

    @property
    def limited_data(self) -> DataSection:
        """The data's settings, with the longest prompt as a number."""
        return self.data.model_copy(update={"max_prompt_tokens": self.prompt_limit})

    @property
    def row_length(self) -> int:
        """Length of a packed training row, tokens."""
        shares = self.trainer.share_prefixes and self.run.job == "rl"
        if shares and self.trainer.row_length is None:
            return self._length_of_a_group
        return self.longest_example

    @property
    def longest_example(self) -> int:
        """Maximum length of a trained context or example, tokens."""
        return self.trainer.row_length or self.sampler.max_length

    @property
    def longest_text(self) -> int:
        """Most tokens of any text that a run encodes: a context, an example or a prompt."""
        return max(self.longest_example, self.sampler.max_length, self.prompt_limit)

    @property
    def _length_of_a_group(self) -> int:
        """Length of a row that holds the longest context and as many more answers as a group has,
        each behind a token of the prompt; or less, where attention would cost too much. Rows fill a
        device's share of a micro-batch; none is shorter than that context."""
        longest, parts = self.sampler.max_length, self.mesh.trainer.row_parts
        # an episode of a task has several turns
        answer = longest if self.has_task else min(self.sampler.max_new_tokens, longest)
        wanted = longest + (self.algorithm.group_size - 1) * (answer + 1)
        share = self.trainer.micro_batch_tokens // self.mesh.trainer.row_shards
        most = min(share, max(CHEAP_SHARED_ROW, 2 * longest), LONGEST_SHARED_ROW)
        wanted = max(longest, min(-(-wanted // parts) * parts, most))
        filling = min(share // max(1, share // wanted), most)
        return max(longest, filling // parts * parts)
