"""tokentrue doctor: compares an engine with the trainer's model and names faults."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokentrue.app.libraries import quiet_libraries, require_dtype
from tokentrue.app.wiring import ENGINE_KEY, EngineConfig, connect_engine
from tokentrue.cli.options import AsJson, ReportPage, name_option
from tokentrue.cli.output import print_table
from tokentrue.errors import ConfigError
from tokentrue.providers.registry import IN_PROCESS, REMOTE, list_names

if TYPE_CHECKING:
    from tokentrue.doctor import DoctorReport
    from tokentrue.types import Sample

COLOURS = {"ok": "green", "fault": "bold red", "cannot_tell": "yellow"}


def command(
    engine: Annotated[str, typer.Option("--engine", help=list_names(REMOTE + IN_PROCESS))],
    model: Annotated[
        str, typer.Option("--model", help="the reference: the directory or the hub id that the trainer loads")
    ],
    url: Annotated[str | None, typer.Option("--url", help=f"the engine's base URL ({list_names(REMOTE)})")] = None,
    samples: Annotated[Path | None, typer.Option("--samples", help="exported samples, to be judged too")] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="what the engine should compute in; default: the model's own")
    ] = None,
    served: Annotated[
        str | None,
        typer.Option("--served", help="hf, exact: the directory or hub id that the engine loads, if another"),
    ] = None,
    previous: Annotated[
        str | None,
        typer.Option(
            "--previous", help="the weights before the last update, a directory or a hub id, to recognise stale ones"
        ),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option("--adapter", help="a PEFT adapter that belongs to the trainer's policy")
    ] = None,
    interrupt: Annotated[
        bool, typer.Option("--interrupt", help="also pause and preempt a generation; others wait a moment")
    ] = False,
    as_json: AsJson = False,
    output: ReportPage = None,
) -> int:
    """Exit 0: no fault found. 1: a fault, with its likely cause and cure. 2: called wrongly, or nothing could be
    probed."""
    _check(engine, url, dtype)
    quiet_libraries()
    from rich.console import Console

    from tokentrue.doctor import EngineRoutes, Reference, examine
    from tokentrue.renderers import load_renderer

    _check_models({"--model": model, "--served": served, "--previous": previous})
    recorded = _read_samples(samples, model)
    status = Console(stderr=True, quiet=as_json or not sys.stderr.isatty()).status("loading")

    async def probe() -> DoctorReport:
        with name_option("--model"):
            reference, renderer = Reference.load(model, adapter=adapter), load_renderer(model)
        with name_option("--served" if served else "--model"):
            provider, module = _provider(engine, url, served or model, dtype or reference.dtype)
        routes = EngineRoutes(provider, url, api_key=os.environ.get(ENGINE_KEY))
        try:
            await provider.health()
            with name_option("--previous"):  # the one model that is loaded for the first time by a probe
                return await examine(
                    provider,
                    renderer,
                    reference,
                    routes=routes,
                    dtype=dtype,
                    previous=previous,
                    engine_model=module,
                    samples=recorded,
                    interrupt=interrupt,
                    on_progress=lambda name: status.update(f"probing: {name}"),
                )
        finally:
            await routes.close()
            await provider.close()

    with status:
        report = asyncio.run(probe())
    if output is not None:
        write_page(report, output)
    if as_json:
        print(json.dumps(report.to_json(), indent=1, ensure_ascii=False))
    else:
        _show(report, output)
    return report.exit_code


def _check(engine: str, url: str | None, dtype: str | None) -> None:
    if engine not in REMOTE + IN_PROCESS:
        raise ConfigError(f"--engine: no engine {engine!r}; choose one of {', '.join(REMOTE + IN_PROCESS)}")
    if (engine in REMOTE) != (url is not None):
        raise ConfigError(
            f"--url: engine {engine!r} {'needs one' if engine in REMOTE else 'runs in this process and takes none'}"
        )
    if dtype is not None:
        require_dtype(dtype)


def _check_models(models: Mapping[str, str | None]) -> None:
    """Before the first model is loaded: `--previous` is needed only after minutes of probes."""
    from tokentrue.hub import load_config

    for option, model in models.items():
        if model is not None:
            with name_option(option):
                load_config(model)


def _provider(engine: str, url: str | None, served: str, dtype: str) -> tuple[Any, Any]:
    """Returns the engine, and its torch module if it runs in this process."""
    if url is not None:
        return connect_engine(EngineConfig(name=engine), url), None
    from tokentrue.providers import load

    if engine == "exact":
        return load(engine, model=served, dtype=dtype), None
    import torch

    from tokentrue.doctor.reference import load_model

    module = load_model(served).to(getattr(torch, dtype))
    return load(engine, model=module), module


def _read_samples(path: Path | None, model: str) -> list[Sample]:
    """Samples of another model would blame the engine, or contain token ids that the reference has no logits for."""
    if path is None:
        return []
    from tokentrue.app.training import require_samples_of
    from tokentrue.samples import read_samples

    samples = list(read_samples(path))
    require_samples_of(samples, model)
    return samples


def write_page(report: DoctorReport, path: Path) -> None:
    from tokentrue import viewer

    tables = {
        "Probes": [("probe", "verdict", "figure", "confidence")]
        + [(one.probe, one.verdict.value.replace("_", " "), one.figure, one.confidence) for one in report.findings],
        "Causes and cures": [("probe", "cause", "cure"), *((one.probe, one.cause, one.cure) for one in report.faults)],
        "Details": [("probe", "detail"), *((one.probe, one.detail) for one in report.findings if one.detail)],
    }
    page = viewer.Report(
        title=f"Engine check: {report.engine}",
        verdict=report.summary,
        ok=not report.faults,
        facts=[("model", report.model), *report.facts.items()],
        tables=[
            viewer.ReportTable(title=title, columns=head, rows=rows) for title, (head, *rows) in tables.items() if rows
        ],
    )
    viewer.write_report(path, page)


def _show(report: DoctorReport, output: Path | None) -> None:
    from rich.console import Console
    from rich.text import Text

    print_table(
        f"{report.engine}: {report.model}",
        ("probe", "verdict", "figure", "cause and cure", "confidence"),
        (
            (
                one.probe,
                (one.verdict.value.replace("_", " "), COLOURS[one.verdict.value]),
                f"{one.figure}\n{one.detail}" if one.detail else one.figure,
                f"{one.cause}\n{one.cure}" if one.fault else "",
                one.confidence,
            )
            for one in report.findings
        ),
    )
    console = Console()
    console.print(Text(report.summary, style="red" if report.faults else "green"))
    if output is not None:
        console.print(f"report: {output}", highlight=False)
