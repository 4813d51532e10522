"""One exception tree, grouped by the boundary that was crossed. Every message names what is wrong and what to do."""

from collections.abc import Iterable, Sequence


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message: `; did you mean steps?`, or nothing."""
    import difflib

    close = difflib.get_close_matches(name, list(known), 1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


class TokenTrueError(Exception):
    """Root of every exception that tokentrue raises deliberately. `code` is stable, `status` the gateway's HTTP status."""

    code = "error"
    status = 500
    field: str | None = None
    retry_after_s: float | None = None


class InputError(TokenTrueError):
    code = "invalid_input"
    status = 400


class MessageError(InputError):
    """`field` is a path such as `messages[3].tool_calls[0].function.arguments`."""

    code = "invalid_message"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field


class SamplingError(InputError):
    code = "invalid_sampling"


class ConfigError(InputError):
    code = "invalid_config"


class ConfigErrors(ConfigError):
    def __init__(self, errors: Sequence[Exception]) -> None:
        super().__init__("; ".join(map(str, errors)))
        self.errors = errors


class FileFormatError(InputError):
    code = "invalid_file"


class RenderError(TokenTrueError):
    code = "cannot_render"
    status = 422


class TemplateError(RenderError):
    code = "template"


class TemplateLimitError(RenderError):
    code = "template_limit"


class TokenizerError(RenderError):
    code = "tokenizer"


class SessionError(TokenTrueError):
    code = "session"


class SessionNotFound(SessionError):
    code = "session_not_found"
    status = 404


class SessionElsewhere(SessionError):
    """`url` is the address of the gateway that owns the session, if known."""

    code = "session_elsewhere"
    status = 503
    retry_after_s = 1.0

    def __init__(self, message: str, *, url: str | None = None) -> None:
        super().__init__(message)
        self.url = url


class SessionConflict(SessionError):
    code = "session_conflict"
    status = 409


class KeyConflict(SessionConflict):
    code = "idempotency_conflict"


class LimitExceeded(SessionError):
    """A size, count or age. With `retry_after_s` the limit is on work in flight, and the same request may succeed
    later."""

    code = "limit_exceeded"
    status = 413

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.status = 413 if retry_after_s is None else 429


class JournalError(SessionError):
    code = "journal"
    status = 503


class EngineError(TokenTrueError):
    code = "engine"
    status = 502


class EngineUnreachable(EngineError):
    code = "engine_unreachable"


class EngineTimeout(EngineError):
    code = "engine_timeout"
    status = 504


class EngineRejected(EngineError):
    code = "engine_rejected"


class PromptTooLong(EngineRejected):
    """OpenAI's code and Anthropic's "prompt is too long": agents look for them and shorten the conversation."""

    code = "context_length_exceeded"
    status = 400


class EngineContractError(EngineError):
    code = "engine_contract"


class GatewayError(TokenTrueError):
    code = "gateway"


class GatewayUnreachable(GatewayError):
    code = "gateway_unreachable"


class AgentError(TokenTrueError):
    code = "agent"


class TokenContractError(TokenTrueError):
    code = "token_contract"


class TrainingError(TokenTrueError):
    code = "training"


class AuditError(TokenTrueError):
    code = "audit"


class ExactnessError(TokenTrueError):
    code = "exactness"
