"""The command line: one module per command, imported when it is called; exit 0 fine, 1 found something wrong, 2 called wrong."""

from __future__ import annotations

import sys
from importlib import import_module

from tokentrue.cli.extras import extra_with
from tokentrue.errors import TokenTrueError

COMMANDS: dict[str, str] = {  # name -> its line in `tokentrue --help`
    "serve": "the gateway: OpenAI Chat Completions, OpenAI Responses, Anthropic Messages; every token recorded",
    "verify": "prove or refute, in id space, that a model's chat template can be extended",
    "samples": "export training samples of a journal or a running gateway: jsonl, parquet, safetensors, verl, trl, slime, prime-rl, tinker",
    "sessions": "list, show or delete the sessions of a journal or of a running gateway",
    "audit": "re-check certificates, prefix identity and coverage of exported samples, from the file alone",
    "diagnose": "mismatch between rollout and trainer: δ, K1/K3, ratio tails, flips, contribution skew; table and HTML report",
    "view": "the viewer in a browser: sessions, tokens, what would have broken, mismatch plots; --export writes one file",
    "doctor": "probe an engine against a model directory and name what is wrong with it: cause, cure, confidence",
    "bench": "measure ratios in one run on this machine: render, samples, gateway, engine, mismatch",
    "demo": "the whole loop on one machine: agent over HTTP, exact engine, GRPO, report; under three minutes on two cores",
    "rollout": "an environment's tasks through a gateway, in groups, scored, written as samples",
    "train": "the reference trainer, one process or under torchrun (FSDP2)",
    "lab": "experiments that show where mismatch hurts, and what cures it: list, run NAME",
}
INSPECT = {"verify", "samples", "sessions", "audit", "diagnose", "view", "doctor"}  # in cli/inspect; the others are in cli/run


def usage() -> str:
    width = max(map(len, COMMANDS), default=0)
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: tokentrue COMMAND [options]   (tokentrue COMMAND --help tells more)", "", *lines])


def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(usage())
        raise SystemExit(0 if arguments else 2)
    if arguments[0] in {"-V", "--version"}:
        from tokentrue import __version__

        print(f"tokentrue {__version__}")
        raise SystemExit(0)
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"tokentrue: no command {name!r}; `tokentrue --help` lists them", file=sys.stderr)
        raise SystemExit(2)
    raise SystemExit(run(name, rest))


def run(name: str, rest: list[str]) -> int:
    """The command's exit code. What a user can mend (a TokenTrueError, a file, a missing extra) is one line, without a stack trace."""
    import typer

    try:
        module = import_module(f"tokentrue.cli.{'inspect' if name in INSPECT else 'run'}.{name}")
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        app.command(name)(module.command)
        result = app(rest, prog_name=f"tokentrue {name}", standalone_mode=False)
    except (TokenTrueError, OSError) as error:
        print(f"tokentrue {name}: {_sentence(error)}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        extra = extra_with(error.name)
        if extra is None:
            raise
        print(f"tokentrue {name}: {error.name} is not installed: pip install 'tokentrue[{extra}]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # click's usage errors carry their own text and exit code
        show = getattr(error, "show", None)
        if show is None:
            raise
        show()
        return int(getattr(error, "exit_code", 2))
    return int(result or 0)


def _sentence(error: TokenTrueError | OSError) -> str:
    """One line; a file that cannot be read or written is named with the system's reason."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__
