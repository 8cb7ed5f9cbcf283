"""The base of all sections of the configuration: frozen, with help from docstrings. No JAX."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_WHOLE = 2**31 - 1
"""Largest integer of a setting."""
Positive = Annotated[int, Field(ge=1, le=MAX_WHOLE)]
NonNegative = Annotated[int, Field(ge=0, le=MAX_WHOLE)]
Count = Annotated[int, Field(ge=1, le=65_536)]
"""Number of things that are created one by one."""


class Section(BaseModel):
    """Base of all sections: frozen, refuses unknown keys, takes help texts from docstrings."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    def is_set(self, name: str) -> bool:
        """Return whether a setting differs from its default, even if that is written down."""
        default = type(self).model_fields[name].get_default(call_default_factory=True)
        return bool(getattr(self, name) != default)
