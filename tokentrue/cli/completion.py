"""tokentrue completion SHELL: prints a script that completes commands, their options and file names.

The script contains the names, so that pressing Tab does not start Python.
"""

from __future__ import annotations

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
complete -o filenames -F _tokentrue tokentrue"""
SHELLS = ("bash", "zsh", "fish")


def command(shell: Annotated[str, typer.Argument(help="bash, zsh or fish")]) -> int:
    """Print a completion script: source <(tokentrue completion bash), or save it where your shell looks for
    completions."""
    if shell not in SHELLS:
        raise ConfigError(f"no shell {shell!r}; choose one of {', '.join(SHELLS)}")
    from tokentrue.cli.main import COMMANDS

    options = {name: list_options(name) for name in COMMANDS}
    if shell == "fish":
        for name, words in options.items():
            about = COMMANDS[name].replace("'", "\\'")
            print(f"complete -c tokentrue -n __fish_use_subcommand -f -a {name} -d '{about}'")
            for word in words:
                print(f"complete -c tokentrue -n '__fish_seen_subcommand_from {name}' -l {word.removeprefix('--')}")
        return 0
    if shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    cases = "\n".join(f'    {name}) words="{" ".join(words)}" ;;' for name, words in options.items())
    print(BASH.format(commands=" ".join([*options, "--help", "--version"]), cases=cases))
    return 0


def list_options(name: str) -> list[str]:
    """Long options; none for a command whose libraries are not installed."""
    from typer.main import get_command

    from tokentrue.cli.main import load_command

    app = typer.Typer(add_completion=False)
    try:
        app.command(name)(load_command(name))
    except ModuleNotFoundError:
        return ["--help"]
    options = [text for parameter in get_command(app).params for text in parameter.opts if text.startswith("--")]
    return sorted({*options, "--help"})
