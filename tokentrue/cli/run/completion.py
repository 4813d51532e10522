"""tokentrue completion SHELL: prints a script that completes commands, their options and file names.

The script contains the names, so that pressing Tab does not start Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from tokentrue.errors import ConfigError

BASH = """\
_tokentrue() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} words=""
  if [ "$COMP_CWORD" -eq 1 ]; then words="{commands}"
  else case "${{COMP_WORDS[1]}}" in
{cases}
  esac; fi
  if [ "$COMP_CWORD" -gt 1 ] && [[ $current != -* ]]; then COMPREPLY=($(compgen -f -- "$current"))
  else COMPREPLY=($(compgen -W "$words" -- "$current")); fi
}}
complete -o filenames -F _tokentrue tokentrue
"""


def command(shell: Annotated[str, typer.Argument(help="bash, zsh or fish")]) -> int:
    """Print a completion script: source <(tokentrue completion bash), or save it where your shell looks for
    completions."""
    scripts = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
    if shell not in scripts:
        raise ConfigError(f"no shell {shell!r}; choose one of {', '.join(scripts)}")
    print(scripts[shell](list_options()), end="")
    return 0


def list_options() -> Mapping[str, Sequence[str]]:
    """Long options of each command; none for a command whose libraries are not installed."""
    from typer.main import get_command

    from tokentrue.cli.main import COMMANDS, load_command

    found: dict[str, list[str]] = {}
    for name in COMMANDS:
        app = typer.Typer(add_completion=False)
        try:
            app.command(name)(load_command(name))
        except ModuleNotFoundError:
            found[name] = ["--help"]
            continue
        options = [text for parameter in get_command(app).params for text in parameter.opts if text.startswith("--")]
        found[name] = sorted({*options, "--help"})
    return found


def bash_script(options: Mapping[str, Sequence[str]]) -> str:
    cases = "\n".join(f'    {name}) words="{" ".join(words)}" ;;' for name, words in options.items())
    return BASH.format(commands=" ".join([*options, "--help", "--version"]), cases=cases)


def zsh_script(options: Mapping[str, Sequence[str]]) -> str:
    return "autoload -U +X bashcompinit && bashcompinit\n" + bash_script(options)


def fish_script(options: Mapping[str, Sequence[str]]) -> str:
    from tokentrue.cli.main import COMMANDS

    lines: list[str] = []
    for name, words in options.items():
        about = COMMANDS[name].replace("'", "\\'")
        lines.append(f"complete -c tokentrue -n __fish_use_subcommand -f -a {name} -d '{about}'")
        lines += [
            f"complete -c tokentrue -n '__fish_seen_subcommand_from {name}' -l {word.removeprefix('--')}"
            for word in words
        ]
    return "\n".join(lines) + "\n"
