"""The numbers of pages and slots that fit a memory budget. Pure host code."""

from dataclasses import dataclass

from jaxrl_async.errors import ConfigError
from jaxrl_async.model.kv_layout import KvLayout
from jaxrl_async.sampler.batch.shapes import steps_of_half

STORE_SHARE = 0.25
"""Extra pages for the prefix store if no budget is given, as a share of the slots' pages."""
MOST_SLOTS = 256
"""Maximum slots that are derived from a budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The slots and pages of one sampler's KV cache."""

    slots: int
    reserve: int  # slots for sequences that are prefilled ahead
    pages: int
    page_tokens: int
    page_bytes: int  # of the layers of one group, keys and values
    layout: KvLayout
    block: int  # decode steps for which a sequence needs pages ahead
    places_bytes: int = 0  # of the places for adapters, on all devices
    copy_bytes: int = (
        0  # maximum copies of pages that a decode block works on; 0: it reads the pages
    )

    @property
    def kv_bytes(self) -> int:
        """pages * page_bytes."""
        return self.pages * self.page_bytes

    def pages_of(self, tokens: int) -> int:
        """Return the maximum pages that a sequence of `tokens` tokens holds while it decodes."""
        return self.layout.pages_of(tokens, self.page_tokens, self.block)


def plan_memory(
    *,
    token_bytes: int,
    layout: KvLayout,
    max_length: int,
    page_tokens: int,
    block: int,
    slots: int | None,
    reserve_share: float,
    budget_bytes: int | None,
    places_bytes: int = 0,
    state_bytes: int = 0,
    copies: bool = False,
) -> MemoryPlan:
    """Return the number of pages that fit a budget, and the number of slots that use them.

    Args:
        token_bytes: keys and values of one token in one layer.
        layout: the layers whose keys and values a page holds.
        max_length: tokens of the longest sequence.
        page_tokens: tokens in a page.
        block: decode steps for which a sequence needs pages ahead.
        slots: slots that decode; None: the number that fills the pages with sequences of half of
            max_length.
        reserve_share: reserve slots over slots.
        budget_bytes: for the pages, the places and the states; None: every slot and reserve slot
            can hold max_length tokens, and the prefix store gets a quarter on top.
        places_bytes: memory of the places for adapters.
        state_bytes: memory of one slot in addition to its pages, for gated delta nets.
        copies: decoding works on copies of pages, which come on top of the budget.

    Raises ConfigError if one sequence of max_length does not fit: it could never finish.
    """
    page_bytes = token_bytes * layout.arrays * page_tokens
    longest = layout.most_pages_of(max_length, page_tokens, block)
    if budget_bytes is None:
        slots = slots or 64
        reserve = int(slots * reserve_share)
        each = layout.pages_of(max_length, page_tokens, block)
        pages = max(longest, int((slots + reserve) * each * (1 + STORE_SHARE)))
    else:
        given = 1 if slots is None else slots + int(slots * reserve_share)
        states = given * state_bytes
        pages = max(0, budget_bytes - places_bytes - states) // page_bytes
        if pages < longest:
            least = longest * page_bytes + places_bytes + states
            places, fewer = "", ""
            if places_bytes:
                places = f" next to {places_bytes / 2**20:.1f} MiB of places for adapters"
                fewer = ", or fewer or smaller places (AdapterRoom, --max-loras, --max-lora-rank)"
            raise ConfigError(
                f"sampler.kv_memory_mib: {budget_bytes / 2**20:.1f} MiB hold {pages} pages of "
                f"{page_tokens} tokens{places}, but one sequence of sampler.max_length "
                f"({max_length}) needs {longest}. Give at least {least / 2**20:.1f} MiB or lower "
                f"sampler.max_length{fewer}."
            )
        if slots is None:
            half = page_tokens * max(1, (-(-max_length // page_tokens) + 1) // 2)
            each = layout.pages_of(half, page_tokens, block) * page_bytes + int(
                state_bytes * (1 + reserve_share)
            )
            slots = max(1, min(MOST_SLOTS, pages * page_bytes // each))
            pages -= -(-(slots + int(slots * reserve_share) - 1) * state_bytes // page_bytes)
            pages = max(pages, longest)
        reserve = int(slots * reserve_share)
    columns = _copied_columns(layout, max_length, page_tokens, block) if copies else 0
    return MemoryPlan(
        slots=slots,
        reserve=reserve,
        pages=pages,
        page_tokens=page_tokens,
        page_bytes=page_bytes,
        layout=layout,
        block=block,
        places_bytes=places_bytes,
        copy_bytes=slots * columns * token_bytes,
    )


def _copied_columns(layout: KvLayout, max_length: int, page_tokens: int, block: int) -> int:
    """Return the tokens of each row that a block copies, summed over layers, if one row has the
    maximum length: the row's tokens or its window, and the tokens that the block samples."""
    whole = steps_of_half(-(-max_length // page_tokens))
    pages = {
        g: min(whole, g.pages_behind(page_tokens) + 1) if g.window else whole for g in layout.groups
    }
    return sum(len(g.layers) * (n * page_tokens + block) for g, n in pages.items())
