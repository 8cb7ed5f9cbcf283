"""A harness of the library verifiers that needs a container, imported by name."""

from verifiers_reverse import ReverseHarness

__all__ = ["ContainedHarness"]


class ContainedHarness(ReverseHarness):
    NEEDS_CONTAINER = True
