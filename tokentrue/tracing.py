"""OpenTelemetry: a span for each model request and each stage of its turn. Spans hold no keys and no text."""

from collections.abc import Awaitable, Callable, Generator, Iterable
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanKind, Tracer

P = ParamSpec("P")
T = TypeVar("T")
SERVICE = "tokentrue"


class _Tracing:
    tracer: "Tracer | None" = None
    provider: "TracerProvider | None" = None


def start_tracing(url: str, *, exporter: "SpanExporter | None" = None) -> None:
    """`url`: an OTLP/HTTP collector (http://host:4318). Call it once per process."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if _Tracing.provider is not None:
        return
    if exporter is None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces")
    provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
    _Tracing.provider, _Tracing.tracer = provider, provider.get_tracer(SERVICE)


def stop_tracing() -> None:
    provider, _Tracing.provider, _Tracing.tracer = _Tracing.provider, None, None
    if provider is not None:
        provider.shutdown()


@contextmanager
def _span(name: str, context: "Context | None" = None, kind: "SpanKind | None" = None) -> Generator[None]:
    from opentelemetry.trace import SpanKind, StatusCode

    assert _Tracing.tracer is not None
    # Record only the type of an error: its message may quote a conversation.
    with _Tracing.tracer.start_as_current_span(
        name, context, kind or SpanKind.INTERNAL, record_exception=False, set_status_on_exception=False
    ) as span:
        try:
            yield
        except BaseException as error:
            span.set_status(StatusCode.ERROR, type(error).__name__)
            raise


def traced(name: str) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]:
    def decorate(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        async def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with _span(name):
                return await function(*args, **kwargs)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
            return (run if is_traced() else function)(*args, **kwargs)

        return call

    return decorate


def is_traced() -> bool:
    return _Tracing.tracer is not None


@contextmanager
def trace_request(name: str, headers: Iterable[tuple[bytes, bytes]]) -> Generator[None]:
    """A child of the caller's span if the headers carry a `traceparent`."""
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    given = [(key, value) for key, value in headers if key in (b"traceparent", b"tracestate")]
    carrier = {key.decode("latin-1"): value.decode("latin-1") for key, value in given}
    parent = TraceContextTextMapPropagator().extract(carrier)
    with _span(name, context=parent, kind=SpanKind.SERVER):
        yield


def annotate(**attributes: str | int | float | bool) -> None:
    if _Tracing.tracer is not None:
        from opentelemetry import trace

        trace.get_current_span().set_attributes({f"tokentrue.{name}": value for name, value in attributes.items()})
