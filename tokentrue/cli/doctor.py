"""tokentrue doctor: compares an engine with the trainer's model and names faults."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from tokentrue.cli.common import AsJson, ReportPage, name_option, print_json, print_table, print_verdict, show_status
from tokentrue.errors import ConfigError
from tokentrue.hub import load_config
from tokentrue.providers.registry import IN_PROCESS, REMOTE, list_names

if TYPE_CHECKING:
    from tokentrue.doctor import DoctorReport

COLOURS = {"ok": "green", "fault": "bold red", "cannot_tell": "yellow"}


def command(
    engine: Annotated[str, Option(help=list_names(REMOTE + IN_PROCESS))],
    model: Annotated[str, Option(help="the reference: the directory or the hub id that the trainer loads")],
    url: Annotated[str | None, Option(help=f"the engine's base URL ({list_names(REMOTE)})")] = None,
    samples: Annotated[Path | None, Option(help="exported samples, to be judged too")] = None,
    dtype: Annotated[str | None, Option(help="what the engine should compute in; default: the model's own")] = None,
    served: Annotated[
        str | None, Option(help="hf, exact: the directory or hub id that the engine loads, if another")
    ] = None,
    previous: Annotated[
        str | None, Option(help="the weights before the last update, a directory or a hub id, to recognise stale ones")
    ] = None,
    adapter: Annotated[
        str | None,
        Option(help="[NAME=]DIR: a PEFT adapter that belongs to the trainer's policy, and its name at a remote engine"),
    ] = None,
    interrupt: Annotated[
        bool, Option("--interrupt", help="also pause and preempt a generation; others wait a moment")
    ] = False,
    as_json: AsJson = False,
    output: ReportPage = None,
) -> int:
    """Exit 0: no fault found. 1: a fault, with its likely cause and cure. 2: called wrongly, or nothing could be
    probed."""
    from tokentrue.app.libraries import quiet_libraries, require_dtype, require_samples_of
    from tokentrue.app.wiring import ENGINE_KEY
    from tokentrue.samples import read_samples

    if engine not in REMOTE + IN_PROCESS:
        raise ConfigError(f"--engine: no engine {engine!r}; choose one of {', '.join(REMOTE + IN_PROCESS)}")
    if (engine in REMOTE) != (url is not None):
        needs = "needs one" if engine in REMOTE else "runs in this process and takes none"
        raise ConfigError(f"--url: engine {engine!r} {needs}")
    if dtype is not None:
        require_dtype(dtype)
    quiet_libraries()
    from tokentrue.doctor import EngineRoutes, Reference, examine
    from tokentrue.renderers import load_renderer

    # Before the first model is loaded: `--previous` is needed only after minutes of probes.
    for option, name in {"--model": model, "--served": served, "--previous": previous}.items():
        if name is not None:
            with name_option(option):
                load_config(name)
    loaded, _, directory = (adapter or "").rpartition("=")
    if loaded and engine not in REMOTE:
        raise ConfigError(f"--adapter: engine {engine!r} runs in this process and has no adapter {loaded!r}; give DIR")
    recorded = [] if samples is None else list(read_samples(samples))
    if samples is not None:
        # Those of another model would blame the engine, or contain token ids that the reference has no logits for.
        require_samples_of(recorded, model)

    async def probe() -> DoctorReport:
        with name_option("--model"):
            reference = Reference.load(model, adapter=Path(directory) if directory else None)
            renderer = load_renderer(model)
        with name_option("--served" if served else "--model"):
            provider, module = load_engine(engine, url, served or model, dtype or reference.dtype, loaded or None)
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
                    on_progress=lambda name: update(f"probing: {name}"),
                )
        finally:
            await routes.close()
            await provider.close()

    with show_status("loading", quiet=as_json or not sys.stderr.isatty()) as update:
        report = asyncio.run(probe())
    if output is not None:
        from tokentrue.cli.reports import write_doctor_report

        write_doctor_report(report, output)
    if as_json:
        print_json(report.to_json())
    else:
        print_findings(report)
        if output is not None:
            print(f"report: {output}")
    return report.exit_code


def load_engine(engine: str, url: str | None, served: str, dtype: str, adapter: str | None) -> tuple[Any, Any]:
    """Returns the engine, and its torch module if it runs in this process."""
    if url is not None:
        from tokentrue.app.wiring import EngineConfig, connect_engine

        return connect_engine(EngineConfig(name=engine, options={"adapter": adapter}), url), None
    from tokentrue.providers import load

    if engine == "exact":
        return load(engine, model=served, dtype=dtype), None
    import torch

    from tokentrue.doctor.reference import load_model

    module = load_model(served).to(getattr(torch, dtype))
    return load(engine, model=module), module


def print_findings(report: DoctorReport) -> None:
    columns = ("probe", "verdict", "figure", "cause and cure", "confidence")
    rows = [
        (
            one.probe,
            (one.verdict.value.replace("_", " "), COLOURS[one.verdict.value]),
            f"{one.figure}\n{one.detail}" if one.detail else one.figure,
            f"{one.cause}\n{one.cure}" if one.fault else "",
            one.confidence,
        )
        for one in report.findings
    ]
    print_table(f"{report.engine}: {report.model}", columns, rows)
    print_verdict(report.summary, ok=not report.faults)
