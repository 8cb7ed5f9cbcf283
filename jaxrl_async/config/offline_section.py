"""Settings of training on given answers and preferences: warm start, sft, preference, reward model.

Needs no JAX.
"""

from typing import Annotated

from pydantic import Field

from jaxrl_async.config import function_facts as facts
from jaxrl_async.config.choice import Choice, name_of
from jaxrl_async.config.section import Count, NonNegative, ReadWith, Section


class WarmStartSection(Section):
    """A short supervised training on prompt-answer pairs before the RL."""

    steps: NonNegative = 0
    """Number of supervised updates."""
    batch_size: Count = 64
    """Pairs per update."""
    learning_rate: float = Field(1e-3, ge=0)
    """Peak learning rate."""
    path: str | None = None
    """File or folder of pairs, as data.jsonl.path; null: the training data's own answers."""


class SftSection(Section):
    """Supervised fine-tuning (run.job=sft) by maximum likelihood of the records' answers."""

    batch_size: Count = 64
    """Prompt-answer pairs per update."""


class PreferenceSection(Section):
    """Training a policy on chosen and rejected answers (run.job=preference)."""

    batch_size: Count = 32
    """Pairs per update; an answer that only has a label (kto) counts as one."""
    loss: Choice = "dpo"
    """Loss: dpo, ipo, ipo_average, kto, simpo or orpo."""
    reference: Annotated[
        str | None, ReadWith("refers", (), "a preference.loss that compares with it", ())
    ] = None
    """Hugging Face directory of the frozen reference; null: the initial weights, after the warm
    start."""

    @property
    def refers(self) -> bool:
        """Whether the loss compares with the reference."""
        return name_of(self.loss) not in facts.WITHOUT_REFERENCE


class RewardModelSection(Section):
    """Training a reward model on chosen and rejected answers (run.job=reward_model)."""

    batch_size: Count = 32
    """Pairs per update."""
    margin: float = Field(0.0, ge=0)
    """Margin by which the chosen answer should get a higher score."""
