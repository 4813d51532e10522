"""One module per command, imported when called. Exit codes: 0 fine, 1 found something wrong, 2 usage error, 70 a bug in
tokentrue."""

import io
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from tokentrue.errors import ConfigErrors, TokenTrueError, did_you_mean

COMMANDS = {  # module -> its line in `tokentrue --help`
    "serve": "the gateway: OpenAI, Anthropic and Google APIs; every token recorded",
    "demo": "the whole loop on one machine: agent over HTTP, exact engine, GRPO, report; under three minutes",
    "rollout": "an environment's tasks through a gateway, in groups, scored, written as samples",
    "train": "the reference trainer, one process or under torchrun (FSDP2)",
    "verify": "prove or refute, by comparing token ids, that a model's chat template can be extended",
    "samples": "export training samples of a journal or a running gateway, in its own format or a trainer's",
    "sessions": "list, show or delete the sessions of a journal or of a running gateway",
    "audit": "re-check certificates, prefix identity and coverage of exported samples, from the file alone",
    "diagnose": "mismatch between rollout and trainer: δ, K1/K3, ratio tails, flips, contribution skew",
    "view": "the viewer in a browser: sessions, tokens, what would have broken; --export writes one file",
    "conformance": "check any token-capturing gateway against the specification: rows, histories, streams, faults",
    "doctor": "probe an engine against the trainer's model and name what is wrong with it: cause, remedy, confidence",
}
EXTRAS: dict[str, set[str]] = {  # the optional extra that brings a library
    "gateway": {"aiohttp", "httptools", "jinja2", "prometheus_client", "regex", "starlette", "tokenizers"}
    | {"transformers", "uvicorn", "uvloop"},
    "engine": {"torch"},
    "train": {"matplotlib", "openai", "tensorboard"},
    "ray": {"ray"},
    "postgres": {"psycopg"},
    "otel": {"opentelemetry"},
}
NEEDS: dict[str, str] = {  # the extra with everything that a command uses
    **dict.fromkeys(("train", "rollout", "demo"), "train"),
    **dict.fromkeys(("diagnose", "doctor"), "engine"),
}
SUGGESTED = {  # words of others for what a command does
    "coverage": "; `tokentrue sessions STORE_OR_URL` has it per session, `tokentrue audit FILE` for exported samples",
    "export": "; `tokentrue samples STORE_OR_URL -o FILE` exports",
}
INTERRUPTED = {
    "train": ": the last whole step is in a checkpoint; the same command resumes",
    "rollout": ": whole groups are on file; the same command resumes",
}


def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    first = arguments[0] if arguments else None
    if first in COMMANDS:
        raise SystemExit(flush_output(run(first, arguments[1:])))
    if first in {None, "-h", "--help"}:
        width = max(map(len, COMMANDS))
        lines = ["usage: tokentrue COMMAND [options]   (tokentrue COMMAND --help tells more)", ""]
        lines += [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
        raise SystemExit(flush_output(0 if arguments else 2, "\n".join(lines) + "\n"))
    if first in {"-V", "--version"}:
        from tokentrue import __version__

        raise SystemExit(flush_output(0, f"tokentrue {__version__}\n"))
    meant = SUGGESTED.get(str(first)) or did_you_mean(str(first), COMMANDS) or "; `tokentrue --help` lists them"
    print(f"tokentrue: no command {first!r}{meant}", file=sys.stderr)
    raise SystemExit(2)


def flush_output(code: int, text: str = "") -> int:
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


def load_command(name: str) -> Callable[..., int]:
    return import_module(f"tokentrue.cli.{name}").command


def run(name: str, rest: list[str]) -> int:
    """Errors that a user can correct give one line, no stack trace."""
    import typer

    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found": no command needs it then
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by `>&-` or by a daemon
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    out: Any = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out.errors == "strict":
        # lone surrogates of damaged files, and other scripts on an ASCII terminal, are printed as escapes
        out.reconfigure(errors="backslashreplace")
    code = 0
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
        if os.environ.get("TOKENTRUE_TRACEBACK"):
            raise
        for each in error.errors if isinstance(error, ConfigErrors) else [error]:
            code, text = explain_error(each, NEEDS.get(name))
            print(f"tokentrue {name}: {' '.join(text.split())}", file=sys.stderr)
    if code == 130:
        print(f"\ntokentrue {name}: interrupted{INTERRUPTED.get(name, '')}", file=sys.stderr)
    return code


def explain_error(error: Exception, needed: str | None = None) -> tuple[int, str]:
    """The exit code, and what to print. `needed`: the command's extra."""
    if isinstance(error, ModuleNotFoundError):
        top = (error.name or "").split(".")[0]
        for extra, modules in EXTRAS.items():
            if top in modules:
                wanted = needed if needed and extra in ("gateway", "engine", "train") else extra
                return 2, f"{error.name} is not installed: pip install 'tokentrue[{wanted}]'"
    if isinstance(error, OSError) and error.filename is not None:
        return 2, f"{error.filename}: {error.strerror}"
    if isinstance(error, TokenTrueError | OSError):
        return 2, str(error) or type(error).__name__
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="tokentrue-error-", suffix=".log", delete=False) as file:
        file.writelines(traceback.format_exception(error))
    text = f"internal error: {type(error).__name__}: {error}; the traceback is in {file.name}, please report it"
    return 70, text
