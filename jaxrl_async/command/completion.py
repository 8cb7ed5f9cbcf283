"""jaxrl-async completion SHELL: print a script that completes the command's words in a shell.

usage: jaxrl-async completion bash|zsh|fish

    bash    jaxrl-async completion bash > ~/.local/share/bash-completion/completions/jaxrl-async
    zsh     jaxrl-async completion zsh > "${fpath[1]}/_jaxrl-async"
    fish    jaxrl-async completion fish > ~/.config/fish/completions/jaxrl-async.fish

It completes commands, their options, recipes, files, and names of settings, such as
algorithm.learning_rate=. Generate it again after an upgrade, since it contains the names.
"""

import sys
from collections.abc import Sequence

from jaxrl_async.command.entry_point import COMMANDS, PROGRAM
from jaxrl_async.config.field_help import setting_names
from jaxrl_async.config.recipes import PREFIX, recipe_names

CONFIGURED = ("train", "plan", "doctor")
"""Commands that take a configuration and settings."""
OPTIONS = {
    "init": "--help --model --data --task --reward --algorithm --lora-rank --prompt-field "
    "--answer-field --name --steps --out --force --yes",
    "train": "--help --print-config --resume --replay-schedule",
    "plan": "--help --topology --num-slices --sampler-topology --lengths --write --json --cache",
    "convert": "--help --out --devices --records",
    "doctor": "--help --timeout",
    "view": "--help --host --port",
    "diff": "--help --all --json",
    "sample": "--help --join --mesh --name --process --coordinator --wait --data-port --once "
    "--cores --decoder --tls-certificate --tls-key --tls-authority",
    "serve": "--help --host --port --key-variable --slots --max-length --max-new-tokens "
    "--kv-memory-mib --max-open-calls --chat-format --cors --adapter --adapters-from --max-loras "
    "--max-lora-rank --decoder --seed",
    "chat": "--help --step --base --system --temperature --top-p --top-k --max-new-tokens "
    "--logprobs --seed --max-length --chat-arguments --decoder --model --key-variable --timeout",
    "eval": "--help --data --task --reward --samples --temperature --top-p --top-k "
    "--max-new-tokens --prompts --pass-reward --seed --compare --base --model --key-variable "
    "--concurrency --out",
    "export": "--help --dtype --step --adapter --adapter-only --upload --private --decoder",
}
"""Options of the commands; a test compares them with each command's --help."""


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    if "--help" in argv or "-h" in argv:
        print((__doc__ or "").strip())
        return 0
    if len(argv) != 1 or argv[0] not in SCRIPTS:
        print(f"usage: {PROGRAM} completion {'|'.join(SCRIPTS)}", file=sys.stderr)
        return 2
    print(script(argv[0]), end="")
    return 0


def script(shell: str) -> str:
    """Return the script for bash, zsh or fish."""
    recipes = recipe_names()
    abouts = {name: one.about.replace("'", r"\'") for name, one in COMMANDS.items()}
    words = {
        "@COMMANDS@": " ".join(COMMANDS),
        "@CONFIGURED@": "|".join(CONFIGURED),
        "@CONFIGURED_LIST@": " ".join(CONFIGURED),
        "@RECIPES@": " ".join(PREFIX + name for name in recipes),
        "@RECIPE_NAMES@": " ".join(recipes),
        "@SETTINGS@": " ".join(f"{name}=" for name in setting_names()),
        "@SHELLS@": " ".join(SCRIPTS),
        "@OPTIONS@": "\n".join(
            f'    {name}) options="{" ".join(text.split())}" ;;' for name, text in OPTIONS.items()
        ),
        "@FISH_COMMANDS@": "\n".join(
            f"complete -c {PROGRAM} -n __fish_use_subcommand -a {name} -d '{about}'"
            for name, about in abouts.items()
        ),
        "@FISH_OPTIONS@": "\n".join(
            f"complete -c {PROGRAM} -n '__fish_seen_subcommand_from {name}' -a '{text}'"
            for name, text in OPTIONS.items()
        ),
    }
    text = SCRIPTS[shell]
    for mark, value in words.items():
        text = text.replace(mark, value)
    return text


_BASH = r"""# bash completion of jaxrl-async; made by `jaxrl-async completion bash`
_jaxrl_async() {
  local word command options
  # Words as typed: bash has split them at ":" and "=".
  local line="${COMP_LINE:0:COMP_POINT}"
  word="${line##*[[:space:]]}"
  command="${COMP_WORDS[1]}"
  COMPREPLY=()
  if [ "$COMP_CWORD" -le 1 ]; then
    COMPREPLY=($(compgen -W "@COMMANDS@ --help --version" -- "$word"))
    return
  fi
  case "$command" in
@OPTIONS@
    *) options="--help" ;;
  esac
  case "$word" in
    -*) COMPREPLY=($(compgen -W "$options" -- "$word")); return ;;
  esac
  case "$command" in
    completion) COMPREPLY=($(compgen -W "@SHELLS@" -- "$word")); return ;;
    recipes) COMPREPLY=($(compgen -W "@RECIPE_NAMES@" -- "$word")); return ;;
    @CONFIGURED@)
      case "$word" in
        *=*)  # the value of a setting may be a path
          compopt -o filenames
          mapfile -t COMPREPLY < <(compgen -f -- "${word#*=}")
          return ;;
        recipe:*)
          COMPREPLY=($(compgen -W "@RECIPES@" -- "$word"))
          case "$COMP_WORDBREAKS" in
            *:*) COMPREPLY=("${COMPREPLY[@]#recipe:}") ;;
          esac
          return ;;
      esac
      if [ "$COMP_CWORD" -ge 3 ]; then
        compopt -o nospace
        COMPREPLY=($(compgen -W "@SETTINGS@" -- "$word"))
        [ -n "$word" ] && [ ${#COMPREPLY[@]} -gt 0 ] && return
      else
        COMPREPLY=($(compgen -W "@RECIPES@" -- "$word"))
      fi ;;
  esac
  compopt -o filenames
  mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -f -- "$word")
}
complete -F _jaxrl_async jaxrl-async
"""

_ZSH = r"""#compdef jaxrl-async
# zsh completion of jaxrl-async; made by `jaxrl-async completion zsh`
_jaxrl_async() {
  local word="${words[CURRENT]}" command="${words[2]}" options
  if (( CURRENT == 2 )); then
    compadd -- @COMMANDS@ --help --version
    return
  fi
  case "$command" in
@OPTIONS@
    *) options="--help" ;;
  esac
  if [[ "$word" == -* ]]; then
    compadd -- ${=options}
    return
  fi
  case "$command" in
    completion) compadd -- @SHELLS@; return ;;
    recipes) compadd -- @RECIPE_NAMES@; return ;;
    @CONFIGURED@)
      if [[ "$word" == *=* ]]; then  # the value of a setting may be a path
        compset -P '*='
        _files
        return
      fi
      if (( CURRENT >= 4 )); then
        compadd -S '' -- @SETTINGS@
      else
        compadd -- @RECIPES@
      fi ;;
  esac
  _files
}
compdef _jaxrl_async jaxrl-async
if [ "$funcstack[1]" = "_jaxrl-async" ]; then _jaxrl_async "$@"; fi
"""

_FISH = r"""# fish completion of jaxrl-async; made by `jaxrl-async completion fish`
complete -c jaxrl-async -n __fish_use_subcommand -f
complete -c jaxrl-async -n __fish_use_subcommand -a '--help --version'
@FISH_COMMANDS@
@FISH_OPTIONS@
complete -c jaxrl-async -n '__fish_seen_subcommand_from completion' -f -a '@SHELLS@'
complete -c jaxrl-async -n '__fish_seen_subcommand_from recipes' -f -a '@RECIPE_NAMES@'
complete -c jaxrl-async -n '__fish_seen_subcommand_from @CONFIGURED_LIST@' -a '@RECIPES@'
complete -c jaxrl-async -n '__fish_seen_subcommand_from @CONFIGURED_LIST@' -a '@SETTINGS@'
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
