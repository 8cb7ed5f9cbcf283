"""Settings of prompts and records. Needs no JAX."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from jaxrl_async.config.section import Count, Positive, ReadWith, Section


class AdditionSection(Section):
    """The embedded task: a + b, worked out digit by digit with carries."""

    digits: Annotated[int, Field(ge=1, le=9)] = 4
    """Maximum digits of a summand, at most 9."""
    eval_size: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Number of held-out problems."""
    worked_share: float = Field(1.0, ge=0, le=1)
    """Share of the demonstrations that show the work digit by digit."""


class JsonlSection(Section):
    """Records with a question or chat messages and an answer, or (preference jobs) prompt, chosen
    and rejected, or prompt, completion and label."""

    path: str | None = None
    """Training records: JSON lines (also gzip, bz2, xz); with the extra [datasets] a FILE.parquet,
    a folder of such files or a saved split, or OWNER/NAME:CONFIG:SPLIT on the hub. null: the
    section only says how warm_start.path is read."""
    eval_path: str | None = None
    """Held-out records, named as in path; null: the last records of path."""
    eval_size: Positive | None = None
    """Maximum number of held-out records; null: 64, and without eval_path a tenth of path at
    most."""
    prompt_field: str = "question"
    """Field with the question or chat messages; preference jobs always read `prompt`."""
    messages_field: str | None = "messages"
    """Field with chat messages, read where a record has no prompt_field; a last message by the
    assistant is the answer."""
    tools_field: str | None = "tools"
    """Field with the function tools that the chat format shows; without it, `tool_defs` is read."""
    answer_field: str | None = "answer"
    """Field with the answer; null: records have no answer. Preference jobs read chosen and
    rejected, or completion."""
    answer_mark: str | None = None
    """Text before the final answer, such as '#### ' in GSM8K: a reward's reference is what follows
    the last one. Demonstrations are never cut."""
    template: str | None = None
    """Python format string with {prompt}; null: the chat format, or the bare prompt if the
    tokenizer has none."""
    max_bad_share: float = Field(0.01, ge=0, le=1)
    """Maximum share of records that may be skipped as malformed, too long or incomplete."""


class DataSection(Section):
    """Prompts of data.addition or data.jsonl; a task may bring its own."""

    addition: AdditionSection | None = AdditionSection()
    """The embedded task, adding two numbers, used where data.jsonl.path is not set."""
    jsonl: JsonlSection | None = None
    """Records of files or of the hub."""
    tokenizer: str | None = None
    """Hugging Face tokenizer directory, or OWNER/NAME on the hub; null: the tokenizer of
    model.path, or of the embedded task."""
    system_prompt: str | None = None
    """System message for prompts without one."""
    chat_format: str = "auto"
    """Writer of chat messages: template (the tokenizer's own), a FILE.jinja, a renderer of the
    package `renderers` such as qwen3 (extra [chat]), or auto: the renderer that fits the model,
    else the template."""
    chat_arguments: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Further arguments of the chat format, such as {enable_thinking: false}."""
    keep_thinking: bool = False
    """Keep the thinking of earlier turns where the chat format drops it: a conversation then stays
    one sequence."""
    max_prompt_tokens: Positive | None = None
    """Maximum length of a prompt from record files, tokens; longer ones are skipped and counted.
    null: what sampler.max_length leaves after sampler.max_new_tokens, at least half of it if that
    is not set."""
    curriculum: Literal["none", "hard_first", "frontier_first"] = "none"
    """Order of the prompts: the stream's (none), or sampled with weights 1 - p (hard_first) or p (1
    - p) (frontier_first), p being the measured pass rate."""
    curriculum_pool: Annotated[Count, ReadWith("curriculum", ("hard_first", "frontier_first"))] = 64
    """Upcoming prompts that a curriculum chooses among."""
    curriculum_threshold: Annotated[
        float, ReadWith("curriculum", ("hard_first", "frontier_first"))
    ] = 0.5
    """Rewards above this count as correct in the pass rate."""

    @model_validator(mode="before")
    @classmethod
    def _without_unused_source(cls, settings: object) -> Any:
        """Leave the embedded task out where records are given and the task is not mentioned."""
        if not isinstance(settings, Mapping) or "addition" in settings:
            return settings
        jsonl = settings.get("jsonl")
        path = jsonl.get("path") if isinstance(jsonl, Mapping) else getattr(jsonl, "path", None)
        return {**settings, "addition": None} if path else settings

    @property
    def problems(self) -> AdditionSection | None:
        """The embedded task, if it is the source."""
        return None if self.records_path else self.addition

    @property
    def records_path(self) -> str | None:
        """The training records, if they are the source."""
        return None if self.jsonl is None else self.jsonl.path

    @property
    def record_fields(self) -> JsonlSection:
        """How the fields of records are read."""
        return JsonlSection() if self.jsonl is None else self.jsonl
