"""Settings of a judge and of process rewards: reward.judge and reward.process. Needs no JAX."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from jaxrl_async.config.section import (
    Count,
    NonNegative,
    Positive,
    ReadWith,
    Section,
    check,
)

OWN_FIELDS = ("model", "messages", "stream", "n", "temperature", "max_tokens")
"""Fields of a judge's call that other settings decide, or that would make replies unreadable."""


class Criterion(Section):
    """One criterion of a rubric."""

    text: str
    """The question to the judge."""
    weight: float = Field(1.0, gt=0)
    """Weight of its score relative to the other criteria."""


class JudgeSection(Section):
    """A language model behind an OpenAI-compatible endpoint that judges answers by a rubric."""

    model: str
    """Name of the judging model."""
    base_url: str = Field("https://api.openai.com/v1", pattern=r"^https?://\S+$")
    """Address of the endpoint, up to /v1."""
    key_variable: str | None = Field(None, pattern=r"^\w+$")
    """Environment variable with the endpoint's API key."""
    rubric: str | dict[str, str | Criterion] | None = None
    """Description of a good answer, whose score is the part `judge`; or several criteria, each a
    part: {right: The result is right., polite: {text: The tone is polite., weight: 0.5}}."""
    rubric_file: str | None = None
    """File in place of `rubric`: FILE.yaml with criteria, any other with a text."""
    mode: Literal["score", "rank"] = "score"
    """score: one call for each answer; rank: one call that compares all answers to a prompt
    (RULER)."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Worst and best number that the judge gives; they become 0 and 1."""
    weight: float = 1.0
    """Weight of the judge's reward, 0 to 1; 0: it only judges steps (reward.process)."""
    show_reference: bool = True
    """Show the judge the record's right answer."""
    temperature: float | None = Field(0.0, ge=0)
    """Sampling temperature; null: the endpoint's default."""
    max_tokens: Positive | None = 1024
    """Maximum tokens of a reply, reasoning included; null: the endpoint's default."""
    extra: dict[str, Any] = Field({})
    """Further fields of each call, such as {max_completion_tokens: 1024}."""
    concurrency: Count = 16
    """Maximum concurrent calls."""
    timeout_s: float = Field(60.0, gt=0)
    """Timeout of one call, seconds."""
    retries: NonNegative = 5
    """Retries of a call that broke, met an overload (429, 5xx) or gave no scores."""
    backoff_s: float = Field(1.0, ge=0)
    """Wait before the first retry, seconds; doubles, up to 60."""
    patience_s: float = Field(300.0, gt=0)
    """Timeout of all answers to one prompt, retries included, seconds; then on_failure applies."""
    on_failure: Literal["fail", "neutral"] = "fail"
    """Answers that could not be judged: fail: the group is scored again (faults.scorer_retries),
    then dropped; neutral: they get the mean of the group's other answers, or the middle of the
    scale."""
    cache: bool = True
    """Keep the scores in the run's folder: no question is paid for twice."""

    @property
    def judges_answers(self) -> bool:
        """Whether whole answers are judged."""
        return self.weight != 0

    @check
    def a_judge_has_one_rubric(self) -> Iterator[str]:
        """Require a rubric in one place for a judge of whole answers."""
        unclear = (self.rubric is None) == (self.rubric_file is None)
        if self.judges_answers and unclear:
            yield (
                "reward.judge.rubric and rubric_file: set exactly one of them; it describes what "
                "makes an answer good."
            )

    @check
    def a_judges_scale_rises(self) -> Iterator[str]:
        """Require the worst number of the scale to be below the best."""
        worst, best = self.scale
        if worst >= best:
            yield (
                f"reward.judge.scale ({worst:g}, {best:g}): the first number is the worst and must "
                "be below the second. Swap them or correct them."
            )

    @check
    def a_judges_call_keeps_its_form(self) -> Iterator[str]:
        """Refuse extra fields of a call that other settings decide or that change its format."""
        if reserved := [name for name in OWN_FIELDS if name in self.extra]:
            yield (
                f"reward.judge.extra has {', '.join(reserved)}, which the other settings of "
                "reward.judge decide. Leave it out of extra."
            )


class ProcessSection(Section):
    """Rewards of the steps or tokens within an answer, in addition to the reward of the whole."""

    function: str
    """Your own function (FILE.py:FUNCTION), which gives a number for each step, or judge
    (reward.judge)."""
    split: Literal["separator", "turn", "token"] = "separator"
    """A step: text that ends with `separator`, a turn of the policy, or a token. A turn's end
    always ends a step."""
    separator: Annotated[str, ReadWith("split", ("separator",))] = Field("\n\n", min_length=1)
    """Text at the end of each step."""
    rubric: Annotated[str, ReadWith("function", ("judge",))] = (
        "Is the step right, and does it lead towards the goal?"
    )
    """Description of a good step, for function=judge."""
    weight: float = 1.0
    """Weight of the steps' rewards."""
    max_age_s: float | None = Field(None, ge=0)
    """Time that a group with all other rewards waits for these, seconds; then it is trained on
    without them. null: faults.scorer_timeout_s."""
    max_age: NonNegative | None = None
    """Staleness at which a group stops waiting for them, in versions; an older group is trained on
    without them."""
    on_failure: Literal["fail", "without"] = "fail"
    """A group whose process rewards failed: fail: it is scored again (faults.scorer_retries), then
    dropped; without: it is trained on without them."""
    timeout_s: Annotated[
        float, ReadWith("has_own_function", (), "your own reward.process.function", ("function",))
    ] = Field(30.0, gt=0)
    """Timeout of the function for one answer, seconds; the judge has its own."""

    @property
    def has_own_function(self) -> bool:
        """Whether a function of the user's gives the rewards."""
        return self.function != "judge"
