"""Correction and diagnosis of one large batch against verl's helper, in one process, call after call.

verl's own code is used where it can be had: installed, or from its wheel in a checkout (`tests/mismatch/peers.py` loads
it). Without it our own figures are printed, and that it is absent. Time is the processor's, of one thread, so that
neighbours disturb it least.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import ROOT, Report, main

PRESET = "decoupled_k3_rs_token_tis"
COLUMNS = ("", "best ms", "median ms", "× verl", "peak MiB")
VERL = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}


def run(*, quick: bool) -> list[Report]:
    rows, width, rounds = (16, 2048, 5) if quick else (64, 8192, 60)
    helper, why = _verl_helper()
    calls = _calls(rows, width, helper)
    agree = _agreement(calls) if helper is not None else "not compared"
    taken = _time_interleaved(calls, rounds)
    peaks = {name: _peak(name, rows, width) for name in calls}
    lines = [(name, *_figures(taken, name), peaks[name]) for name in taken]
    notes = [
        f"{rows} rows of up to {width:,} tokens, float32, token weights capped at 2 and rows with mean K3 above 0.01 rejected",
        "correct + diagnose is `diagnose(…, correction=…)`, one pass for both; it computes what verl's does and, beyond it, quantiles, "
        "tails raw and as applied, |δ| by probability and position, moments, and the worst rows",
        "× verl: the median of the ratios to verl's call of the same round; both kinds of noise, fast and slow, fall out of it",
        "peak: growth of the process's resident memory over one call in a fresh process, in MiB, inputs not counted",
        f"weights, mask and shared metrics: {agree}",
    ]
    if helper is None:
        notes.insert(0, f"verl is absent ({why}): no ratio against it")
    reports = [Report(title="correction and diagnosis", columns=COLUMNS, rows=lines, notes=notes)]
    return [*reports, on_device("cuda", quick=quick)] if _has_cuda() else reports


def on_device(device: str, *, quick: bool) -> Report:
    """The same on a GPU: wall time between synchronisations, and the allocator's peak over one call."""
    import torch

    rows, width, rounds = (16, 2048, 3) if quick else (64, 8192, 20)
    helper, why = _verl_helper()
    calls = _calls(rows, width, helper, device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def timed(call: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: (call(), wait())

    taken = _time_interleaved({name: timed(call) for name, call in calls.items()}, rounds, time.perf_counter)
    lines = [(name, *_figures(taken, name), _device_peak(calls[name], device)) for name in taken]
    notes = [
        f"{rows} rows of up to {width:,} tokens, float32; peak: the allocator's, over one call, in MiB, inputs not counted"
    ]
    if helper is None:
        notes.append(f"verl is absent ({why}): no ratio against it")
    return Report(title=f"correction and diagnosis on {_device_name(device)}", columns=COLUMNS, rows=lines, notes=notes)


def _figures(taken: dict[str, list[float]], name: str) -> tuple[float, float, float]:
    """Best and median milliseconds, and the median of its ratios to verl's call of the same round."""
    base = taken.get("verl's helper", taken["correct + diagnose"])
    ratios = [theirs / mine for theirs, mine in zip(base, taken[name], strict=True)]
    return 1e3 * min(taken[name]), 1e3 * statistics.median(taken[name]), statistics.median(ratios)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else device


def _device_peak(call: Callable[[], Any], device: str) -> float:
    import torch

    if device != "cuda":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _inputs(rows: int, width: int, device: str) -> tuple[Any, Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    trainer = -torch.rand(rows, width, generator=generator) * 3
    rollout = trainer + torch.randn(rows, width, generator=generator) * 0.02
    lengths = torch.randint(width // 2, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths).float()
    return trainer.to(device), rollout.to(device), mask.to(device)


def _calls(rows: int, width: int, helper: Any | None, device: str = "cpu") -> dict[str, Callable[[], Any]]:
    import torch

    from tokentrue.mismatch import PRESETS, correct, diagnose

    torch.set_num_threads(1)
    trainer, rollout, mask = _inputs(rows, width, device)
    chosen = PRESETS[PRESET]
    calls: dict[str, Callable[[], Any]] = {
        "correct + diagnose": lambda: diagnose(trainer, rollout, mask, correction=chosen),
        "correct, then diagnose": lambda: (correct(trainer, rollout, mask, chosen), diagnose(trainer, rollout, mask)),
        "correct alone": lambda: correct(trainer, rollout, mask, chosen),
    }
    if helper is not None:
        whole = helper.compute_rollout_correction_and_rejection_mask
        calls = {"verl's helper": lambda: whole(trainer, rollout, mask, **VERL), **calls}
    return calls


def _time_interleaved(
    calls: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for name in calls:
        calls[name]()
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            call()
            taken[name].append(clock() - start)
    return taken


def _agreement(calls: dict[str, Callable[[], Any]]) -> str:
    import torch

    proto, mask, theirs = calls["verl's helper"]()
    mine = calls["correct + diagnose"]()
    out = mine.corrected
    apart = float((out.weights - proto.batch["rollout_is_weights"]).abs().max())
    same = torch.equal(out.mask, mask.bool())
    k3, chi2 = theirs["rollout_corr/k3_kl"], theirs["rollout_corr/chi2_token"]
    return (
        f"weights apart by at most {apart:.1e}, masks {'equal' if same else 'DIFFER'}; K3 {mine['corr/k3']:.7g} here, {k3:.7g} there "
        f"(its float32 formula); χ² {mine['chi2/token']:.7g} here, {chi2:.7g} there"
    )


def _peak(name: str, rows: int, width: int) -> float:
    """Resident growth over the second call in a process of its own; the first call pays for what is set up once."""
    command = [
        sys.executable,
        "-c",
        f"from benchmarks.mismatch import measure; measure({name!r}, {rows}, {width})",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def measure(name: str, rows: int, width: int) -> None:
    """Prints the peak of one call; run in a process of its own. Linux only: elsewhere it prints 0."""
    call = _calls(rows, width, _verl_helper()[0])[name]
    small = _calls(2, 256, _verl_helper()[0])[name]
    small()
    before = _read_resident_kib("VmRSS")
    if before is not None:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    call()
    peak = _read_resident_kib("VmHWM")
    print(json.dumps(0.0 if before is None or peak is None else max(0.0, (peak - before) / 1024)))


def _read_resident_kib(field: str) -> int | None:
    """KiB, from the kernel."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), None)


def _verl_helper() -> tuple[Any | None, str]:
    try:
        from verl.trainer.ppo import rollout_corr_helper  # type: ignore[import-not-found]

        return rollout_corr_helper, ""
    except ImportError:
        pass
    path = ROOT / "tests" / "mismatch" / "peers.py"
    if not path.exists():
        return None, "not installed, and this is not a checkout that could load its wheel"
    spec = importlib.util.spec_from_file_location("tokentrue_bench_peers", path)
    assert spec is not None and spec.loader is not None
    peers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(peers)
    try:
        return peers.verl().helper, ""
    except peers.Missing as reason:
        return None, str(reason)


if __name__ == "__main__":
    main("mismatch", __doc__ or "", run)
