"""tokentrue doctor: compares an engine with the trainer's model and names faults."""

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from tokentrue.cli.common import (
    AsJson,
    ReportPage,
    check_model_of,
    name_option,
    output_report,
    require_file,
    show_status,
)
from tokentrue.errors import did_you_mean
from tokentrue.protocols import find_plugins
from tokentrue.providers.registry import IN_PROCESS, REMOTE, list_names

if TYPE_CHECKING:
    from tokentrue.doctor import DoctorReport
    from tokentrue.viewer import Report


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
    as_json: AsJson = False,
    out: ReportPage = None,
) -> int:
    """Exit 0: no fault found. 1: a fault, with its likely cause and cure. 2: called wrongly, or nothing could be
    probed."""
    from tokentrue.app.configuration import Checks
    from tokentrue.app.libraries import require_dtype, require_samples_of
    from tokentrue.app.wiring import ENGINE_KEY, EngineConfig, check_engine
    from tokentrue.hub import check_model, find_directory, load_config
    from tokentrue.samples.files import read_all

    loaded, _, directory = (adapter or "").rpartition("=")
    checks, known = Checks(), (*REMOTE, *IN_PROCESS, *find_plugins("providers"))
    listed = f"choose one of {list_names(known)}{did_you_mean(engine, known)}"
    named = f"--adapter: engine {engine!r} runs in this process and has no adapter {loaded!r}; give DIR"
    checks.require(engine in known, f"--engine: no engine {engine!r}; {listed}")
    runs_here = engine in IN_PROCESS
    checks.require(runs_here or engine not in known or url is not None, f"--url: engine {engine!r} needs one")
    checks.require(url is None or not runs_here, f"--url: engine {engine!r} runs here and takes none")
    checks.require(not (loaded and runs_here), named)
    checks(require_dtype, dtype or "float32")
    checks(require_file, "-o", out)
    models = {"--model": model, "--served": served, "--previous": previous}
    for option, name in models.items():  # the others are weights alone: their tokenizer is the model's
        checks(check_model_of, option, name, check_model if option == "--model" else find_directory)
    recorded = [] if samples is None else checks(read_all, samples)
    checks.finish()
    if url is not None:
        check_engine(EngineConfig(name=engine, urls=(url,)), model)
    # Before the first model is loaded: `--previous` is needed only after minutes of probes.
    for option, name in models.items():
        check_model_of(option, name, load_config)
    if recorded:
        # Those of another model would blame the engine, or contain token ids that the reference has no logits for.
        require_samples_of(recorded, model)
    from tokentrue.app.libraries import quiet_libraries

    quiet_libraries()
    from tokentrue.doctor import EngineRoutes, Reference, examine
    from tokentrue.renderers import load_renderer

    async def probe() -> "DoctorReport":
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
                    provider, renderer, reference, routes=routes, dtype=dtype, previous=previous, engine_model=module,
                    samples=recorded or [], on_progress=lambda name: update(f"probing: {name}"),
                )  # fmt: skip
        finally:
            await routes.close()
            await provider.close()

    with show_status("loading", quiet=as_json or not sys.stderr.isatty()) as update:
        found = asyncio.run(probe())
    output_report(report_from(found), out, found.to_json(), as_json=as_json, tables=1)
    return found.exit_code


def load_engine(engine: str, url: str | None, served: str, dtype: str, adapter: str | None) -> tuple[Any, Any]:
    if url is not None:
        from tokentrue.app.wiring import EngineConfig, connect_engine

        options = {} if adapter is None else {"adapter": adapter}
        return connect_engine(EngineConfig(name=engine, options=options), url), None
    from tokentrue.providers import load

    if engine == "exact":
        return load(engine, model=served, dtype=dtype), None
    import torch

    from tokentrue.doctor.reference import load_model

    module = load_model(served).to(getattr(torch, dtype))
    return load(engine, model=module), module


def report_from(found: "DoctorReport") -> "Report":
    from tokentrue.viewer import Report, ReportTable

    rows = [
        (
            one.probe,
            one.verdict.value.replace("_", " "),
            "\n".join(filter(None, (one.figure, one.detail))),
            "\n".join(filter(None, (one.cause, one.cure))),
            one.confidence,
        )
        for one in found.findings
    ]
    columns = ("probe", "verdict", "figure", "cause and cure", "confidence")
    return Report(
        title=f"Engine check: {found.engine}",
        verdict=found.summary,
        ok=not found.faults,
        facts=[("model", found.model), *found.facts.items()],
        tables=[ReportTable(title=f"{found.engine}: {found.model}", columns=columns, rows=rows)],
    )
