"""The --help of the commands: their text as it is written, and the default of each option."""

import argparse

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
