"""Parsers of the commands' options: --help as the text is written, with defaults, and numbers."""

import argparse
from collections.abc import Callable

NOTHING: tuple[object, ...] = (None, "", [], ())
"""Defaults that are shown as `none`."""


class DefaultsHelp(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of a description, and adds the default to the text of each option that takes
    a value, unless the text mentions it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        takes_value = bool(action.option_strings) and action.nargs != 0
        if not takes_value or action.required or "default" in text:
            return text
        return f"{text} (default: {'none' if action.default in NOTHING else '%(default)s'})"


def command_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a command, as yet without options."""
    return argparse.ArgumentParser(
        prog=f"jaxrl-async {command}", description=description, formatter_class=DefaultsHelp
    )


def whole_number(what: str, least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """Return a parser of whole numbers for an option, which raises ArgumentTypeError. what: such as
    "a port from 0 to 65535"."""

    def parsed(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return int(text)

    return parsed
