"""Settings of tasks: the section `env` of their environments, and the sections `tasks.NAME` of
several tasks in one run. Needs no JAX."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from jaxrl_async.config.choice import Choice
from jaxrl_async.config.data_section import DataSection
from jaxrl_async.config.reward_section import RewardSection
from jaxrl_async.config.sampler_section import SamplerSection
from jaxrl_async.config.section import Count, NonNegative, Positive, ReadWith, Section


class EnvSection(Section):
    """Limits of a task's environments."""

    max_turns: Positive = 16
    """Maximum turns of the policy in an episode."""
    tool_timeout_s: float = Field(30.0, gt=0)
    """Timeout of one call of a tool, seconds; the policy gets an error message."""
    tool_result_chars: Positive = 8192
    """Maximum length of a tool's result, characters; longer ones are truncated."""
    threads: Count = 64
    """Maximum threads for environments and tools that are not async."""
    program_timeout_s: float = Field(3600.0, gt=0)
    """Timeout of a task's program for a whole episode, seconds."""
    program_idle_s: float = Field(600.0, gt=0)
    """Maximum time between two calls of the policy by a program, seconds."""
    program_max_calls: Count = 256
    """Maximum calls of the policy in a program's episode."""
    program_max_tokens: Positive = 262_144
    """Maximum tokens of a program's episode: new prompt tokens plus sampled ones."""
    program_variables: tuple[str, ...] = ()
    """Environment variables that a program's command sees in addition to the usual ones
    (docs/agents.md); NAME*: all with this prefix."""
    retries: NonNegative = 2
    """Retries of an environment's reset, of its step if it is `repeatable`, and of a failed
    held-out episode."""


# ---- several tasks

TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
SHARED_DATA = ("tokenizer", "chat_format", "chat_arguments", "keep_thinking")
"""Settings of `data` that all tasks share, since they share a model."""


def section_of_task(name: str) -> str:
    """Return the section of one of several tasks by its name; "" for the run's only one."""
    return f"tasks.{name}" if name else ""


class TaskSamplingSection(Section):
    """Sampling of this task's answers, where it differs from `sampler`."""

    temperature: float | None = Field(None, ge=0)
    """In place of sampler.temperature."""
    top_k: NonNegative | None = None
    """In place of sampler.top_k."""
    top_p: float | None = Field(None, gt=0, le=1)
    """In place of sampler.top_p."""
    min_p: float | None = Field(None, ge=0, lt=1)
    """In place of sampler.min_p."""
    max_new_tokens: Positive | None = None
    """Maximum length of one turn, tokens; null: sampler.max_new_tokens, which it may not
    exceed."""

    def on(self, sampler: SamplerSection) -> SamplerSection:
        """Return the sampler's settings with these in place of theirs."""
        own: dict[str, Any] = {k: v for k, v in self.model_dump().items() if v is not None}
        return sampler.model_copy(update=own)


class NamedTaskSection(Section):
    """One of several tasks that a run trains on."""

    task: Choice | None = None
    """Task, as the setting `task`; null: the records of `data` with `reward`."""
    data: DataSection | None = None
    """Its records and curriculum, as the section `data`; null: the task's records, or the embedded
    addition. All tasks share the tokenizer and the chat format."""
    env: Annotated[EnvSection | None, ReadWith("task", switches=())] = None
    """As the section `env`; null: that section."""
    reward: RewardSection | None = None
    """As the section `reward`; null: that section."""
    sampling: TaskSamplingSection = TaskSamplingSection()
    weight: float = Field(1.0, ge=0, le=1e6)
    """Share of the groups, relative to the other tasks; 0: none, for a task that a resumed run no
    longer trains on."""
    max_in_flight: Count | None = None
    """Maximum groups that are sampled and scored at a time; the others take its share meanwhile."""
    timeout_s: float | None = Field(None, gt=0)
    """Timeout of a group, from its first request to its score, seconds; it then fails."""
    max_staleness: NonNegative | None = None
    """Maximum staleness of its groups; null: staleness.max_staleness, which it may not exceed."""
    trainer_waits: bool = True
    """Whether the trainer waits for its groups; false, for a task that may hang: other groups
    overtake them, and stale ones are dropped. Needs max_in_flight."""
    loss_weight: float = Field(1.0, ge=0)
    """Factor of the policy loss of its tokens."""
    kl_weight: float = Field(1.0, ge=0)
    """Factor of algorithm.kl_coefficient for its tokens."""
    warm_start: bool = True
    """Whether the warm start also imitates its demonstrations."""


NamedTasks = Mapping[str, NamedTaskSection]
