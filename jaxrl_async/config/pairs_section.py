"""Settings of pairs of the policy's own answers (online DPO): the section `pairs`. Needs no JAX."""

from typing import Literal

from jaxrl_async.config import function_facts as facts
from jaxrl_async.config.choice import Choice, name_of
from jaxrl_async.config.section import Section


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
