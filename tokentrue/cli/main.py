"""The command line: one module per command, imported when called.

Exit codes: 0 fine, 1 found something wrong, 2 usage error, 70 a bug in tokentrue.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from tokentrue.errors import TokenTrueError

INSPECT = {  # name -> its line in `tokentrue --help`; modules of cli/inspect
    "verify": "prove or refute, by comparing token ids, that a model's chat template can be extended",
    "samples": "export training samples of a journal or a running gateway, in its own format or a trainer's",
    "sessions": "list, show or delete the sessions of a journal or of a running gateway",
    "audit": "re-check certificates, prefix identity and coverage of exported samples, from the file alone",
    "diagnose": "mismatch between rollout and trainer: δ, K1/K3, ratio tails, flips, contribution skew",
    "view": "the viewer in a browser: sessions, tokens, what would have broken; --export writes one file",
    "doctor": "probe an engine against the trainer's model and name what is wrong with it: cause, remedy, confidence",
}
RUN = {  # modules of cli/run
    "serve": "the gateway: OpenAI, Anthropic and Google APIs; every token recorded",
    "demo": "the whole loop on one machine: agent over HTTP, exact engine, GRPO, report; under three minutes",
    "rollout": "an environment's tasks through a gateway, in groups, scored, written as samples",
    "train": "the reference trainer, one process or under torchrun (FSDP2)",
    "completion": "print a completion script for bash, zsh or fish",
}
COMMANDS = {**RUN, **INSPECT}
EXTRAS: dict[str, set[str]] = {  # the optional extra that brings a library
    "gateway": {"aiohttp", "httptools", "jinja2", "prometheus_client", "regex", "starlette", "tokenizers"}
    | {"transformers", "uvicorn", "uvloop"},
    "engine": {"torch"},
    "train": {"matplotlib", "openai", "tensorboard"},
    "ray": {"ray"},
    "postgres": {"psycopg"},
    "otel": {"opentelemetry"},
}

TRACEBACK = "TOKENTRUE_TRACEBACK"
INTERRUPTED = {
    "train": ": the last whole step is in a checkpoint; the same command resumes",
    "rollout": ": whole groups are on file; the same command resumes",
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: tokentrue COMMAND [options]   (tokentrue COMMAND --help tells more)", "", *lines])


def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] in COMMANDS:
        raise SystemExit(flush_output(run(arguments[0], arguments[1:])))
    if not arguments or arguments[0] in {"-h", "--help"}:
        raise SystemExit(flush_output(0 if arguments else 2, usage() + "\n"))
    if arguments[0] in {"-V", "--version"}:
        from tokentrue import __version__

        raise SystemExit(flush_output(0, f"tokentrue {__version__}\n"))
    print(f"tokentrue: no command {arguments[0]!r}; `tokentrue --help` lists them", file=sys.stderr)
    raise SystemExit(2)


def flush_output(code: int, text: str = "") -> int:
    """Returns the exit code. A full disk gives one line, not a traceback at exit."""
    try:
        print(text, end="", flush=True)
        return code
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes what is left when it ends
        if isinstance(error, BrokenPipeError):  # the reader stopped, as in `| head -1`
            return 1
        if text or code != 2:  # otherwise the command has reported the error on stderr
            print(f"tokentrue: standard output: {error.strerror}", file=sys.stderr)
        return 2


def run(name: str, rest: list[str]) -> int:
    """Errors that a user can correct (a TokenTrueError, a file, a missing extra) give one line, no stack trace."""
    import typer

    escape_in_output()
    try:
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        app.command(name)(load_command(name))
        # Of an interrupted command, typer returns 130.
        code = int(app(rest, prog_name=f"tokentrue {name}", standalone_mode=False) or 0)
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        show = getattr(error, "show", None)  # click's usage errors carry their own text and exit code
        if show is not None:
            show()
            return int(getattr(error, "exit_code", 2))
        return report_error(name, error)
    if code == 130:
        print(f"\ntokentrue {name}: interrupted{INTERRUPTED.get(name, '')}", file=sys.stderr)
    return code


def escape_in_output() -> None:
    """Prints lone surrogates of damaged files, and other scripts on an ASCII terminal, as escapes."""
    out: Any = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out.errors == "strict":
        out.reconfigure(errors="backslashreplace")


def load_command(name: str) -> Callable[..., int]:
    module = import_module(f"tokentrue.cli.{'inspect' if name in INSPECT else 'run'}.{name}")
    return module.command


def report_error(name: str, error: Exception) -> int:
    """Writes the traceback of a bug to a file; TOKENTRUE_TRACEBACK=1 raises it instead."""
    if os.environ.get(TRACEBACK):
        raise error
    text, code = explain_error(error), 2
    if text is None:
        text, code = f"internal error: {type(error).__name__}: {error}", 70
        text += f"; the traceback is in {save_traceback(error)}, please report it"
    print(f"tokentrue {name}: {' '.join(text.split())}", file=sys.stderr)
    return code


def explain_error(error: Exception) -> str | None:
    """None for a bug of ours."""
    if isinstance(error, ModuleNotFoundError):
        top = (error.name or "").split(".")[0]
        extra = next((extra for extra, modules in EXTRAS.items() if top in modules), None)
        return None if extra is None else f"{error.name} is not installed: pip install 'tokentrue[{extra}]'"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__ if isinstance(error, TokenTrueError | OSError) else None


def save_traceback(error: Exception) -> str:
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="tokentrue-error-", suffix=".log", delete=False) as file:
        file.writelines(traceback.format_exception(error))
    return file.name
