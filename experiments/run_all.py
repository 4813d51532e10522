"""Every experiment, every arm, every seed, on one device by a deadline; what is done by then is on file.

    python -m experiments.run_all --device cuda --out out/lab --jobs 14 --deadline 560
        makes its models first (32M parameters)
    python -m experiments.run_all --device cpu --tiny --out out/lab --jobs 2 --deadline 200
        does the whole thing work?
    python -m experiments.run_all --pretrained DIR --tasks FILE --steps 100 --lr 2e-5 --jobs 12 --out out/lab
        `pretrained`, and `routing-replay` where --models DIR-moe exists; --only takes arms whose name holds a text
    python -m experiments show tim-grpo --out out/lab
        table and figure of what is on file

Needs torch, transformers, tokenizers, safetensors and numpy alone. On a CUDA device the runs share it through the
multi-process service where that is installed; otherwise they take turns, and fewer steps are made (`--steps-alone`).
Runs are handed out in the order of `PLAN`, an arm's seeds together, so that a cut-off leaves whole arms.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing as mp
import os
import queue
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

PLAN: tuple[tuple[str, str | None, float], ...] = (  # experiment, arms whose name holds this, share of --lr
    ("thresholds", None, 1.0),
    ("tim-grpo", None, 0.5),
    ("retokenize", None, 0.5),
    ("regimes", "mixture", 1.0),
    ("regimes", "long", 1.0),
    ("tim-reinforce", None, 1.0),
    ("regimes", "steps old", 1.0),
    ("regimes", "vocabulary", 1.0),
)
VARIANTS: dict[str, tuple[str, ...]] = {
    "-warm": ("--steps", "1"),  # on these two the kernels are compiled while the others are trained
    "-warm-moe": ("--steps", "1", "--experts", "8", "--layers", "6"),
    "": (),
    "-moe": ("--experts", "8", "--layers", "6"),
    "-long": ("--longest", "5"),
    "-vocab": ("--pad-vocab", "32768"),
}
WARM, WARM_UPS = "warm-up", ("warm", "warm-moe")
PRETRAINED, ROUTING = "pretrained", "routing-replay"
MIXTURE_SHARE = 2.5  # of --lr: a small model wants a larger rate than a pretrained one


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run, or one seed of an experiment whose arms share their rollouts."""

    experiment: str
    arms: tuple[Any, ...]
    together: bool
    scale: Any
    seed: int

    @property
    def models(self) -> list[Path]:
        return [Path(f"{self.scale.model}-{arm.variant}" if arm.variant else self.scale.model) for arm in self.arms]

    def ready(self) -> bool:
        if self.experiment in (PRETRAINED, ROUTING):
            return True
        return all((path / "training_curve.json").exists() for path in self.models)  # the file that is written last


def main() -> None:
    options = parsed()
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    shared = options.device == "cuda" and start_sharing(options.out)
    say(began, f"multi-process service: {shared}")
    makers = [] if options.pretrained else make_models(options)
    steps = options.steps if shared or options.pretrained or options.device == "cpu" else options.steps_alone
    jobs = planned_pretrained(options) if options.pretrained else planned(options, steps)
    if options.pretrained and not options.compiled:
        compile_kernels(jobs)
        say(began, "kernels compiled")
    say(began, f"{len(jobs)} jobs of {jobs[-1].scale.steps} steps")
    try:
        done = work_through(jobs, options, began)
    finally:
        for maker in makers:
            maker.kill()
        for ending in () if options.pretrained else VARIANTS:
            said = Path(f"{options.models}{ending}.txt")
            say(began, f"model{ending}: " + " | ".join(said.read_text().splitlines()[-3:] if said.exists() else ()))
        if shared:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, timeout=20, check=False)
    say(began, f"{done} of {len(jobs)} jobs done")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--models", type=Path, default=Path("/tmp/lab-models/calculator-32m"), help="made where they are not there"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--deadline", type=float, default=560.0, help="seconds from the start, all included")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--steps-alone", type=int, default=14, help="steps where runs must take turns on the device")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--pretrained", help="an instruct model's directory: run the experiment of that name on it")
    parser.add_argument("--tasks", help="its questions, see scripts/make_reasoning_tasks.py")
    parser.add_argument("--groups", type=int, default=4, help="pretrained: tasks per step, 8 rollouts each")
    parser.add_argument("--only", help="pretrained: arms whose name holds one of these texts, with commas between them")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--compiled", action="store_true", help="pretrained: the kernels are in the compiler's cache already"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny models and batches: a look at whether it works")
    return parser.parse_args()


def say(began: float, text: str) -> None:
    print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)


# ---- the device ------------------------------------------------------------------------------------------------------------------------
def start_sharing(out: Path) -> bool:
    """CUDA's multi-process service, so that kernels of several runs are on the device at once. True if a program runs
    under it."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        return False
    for name in ("PIPE", "LOG"):
        os.environ[f"CUDA_MPS_{name}_DIRECTORY"] = f"/tmp/mps-{name.lower()}"
        Path(f"/tmp/mps-{name.lower()}").mkdir(exist_ok=True)
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, timeout=20)
        probe = "import torch; assert torch.ones(8, device='cuda').sum().item() == 8"
        subprocess.run([sys.executable, "-c", probe], check=True, timeout=60)
        return True
    except (OSError, subprocess.SubprocessError) as error:
        (out / "mps.txt").write_text(repr(error))
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, timeout=20, check=False)
        for name in ("PIPE", "LOG"):
            os.environ.pop(f"CUDA_MPS_{name}_DIRECTORY", None)
        return False


def make_models(options: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    """One maker per missing model, all at once."""
    tiny = ("--hidden", "64", "--layers", "2", "--steps", "2", "--batch", "4")
    size = tiny if options.tiny else ("--hidden", "512", "--layers", "10", "--lr", "5e-4", "--steps", "500")
    script = str(Path(__file__).resolve().parent.parent / "scripts" / "make_small_model.py")
    options.models.parent.mkdir(parents=True, exist_ok=True)
    makers: list[subprocess.Popen[bytes]] = []
    for ending, more in VARIANTS.items():
        target = Path(f"{options.models}{ending}")
        if not (target / "training_curve.json").exists():
            command = [
                sys.executable,
                script,
                "--out",
                str(target),
                "--device",
                options.device,
                "--judged",
                "0",
                *size,
                *more,
            ]
            with Path(f"{target}.txt").open("wb") as log:
                makers.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    return makers


# ---- the runs --------------------------------------------------------------------------------------------------------------------------
def planned(options: argparse.Namespace, steps: int) -> list[Job]:
    from experiments.arms import Arm, Scale
    from experiments.registry import module_of, select_arms

    size = {"groups": 1, "size": 2, "heldout": 2, "steps": 1} if options.tiny else {"steps": steps}
    base = replace(Scale(), model=str(options.models), device=options.device, jobs=1, **size)
    first = replace(base, steps=1)
    warm = [Arm(name=name, variant=name, source="int4") for name in WARM_UPS]
    jobs = [Job(experiment=WARM, arms=(arm,), together=False, scale=first, seed=0) for arm in warm]
    for name, only, share in PLAN:
        module = module_of(name)
        arms = select_arms(module, quick=False, only=only)
        together = hasattr(module, "run_arms")
        scale = replace(base, lr=options.lr * share, seeds=tuple(range(options.seeds)))
        for parts in [tuple(arms)] if together else [(arm,) for arm in arms]:
            jobs += [
                Job(experiment=name, arms=parts, together=together, scale=scale, seed=seed) for seed in scale.seeds
            ]
    return jobs


def planned_pretrained(options: argparse.Namespace) -> list[Job]:
    from experiments.arms import Scale
    from experiments.registry import module_of, select_arms

    scale = replace(
        Scale(), model=options.pretrained, tasks=options.tasks, device=options.device, jobs=1, steps=options.steps, lr=options.lr,
        groups=options.groups, seeds=tuple(range(options.seeds)),
    )  # fmt: skip
    mixture = replace(scale, model=str(options.models), tasks=None, lr=options.lr * MIXTURE_SHARE)
    names = {PRETRAINED: scale, **({ROUTING: mixture} if Path(f"{options.models}-moe").is_dir() else {})}
    return [
        Job(experiment=name, arms=(arm,), together=False, scale=own, seed=seed)
        for name, own in names.items()
        for arm in select_arms(module_of(name), quick=False, only=options.only)
        for seed in own.seeds
    ]


def compile_kernels(jobs: list[Job]) -> None:
    """One step of an arm of each kind, all at once: afterwards the kernels are in the compiler's cache."""
    kinds = {(job.experiment, job.arms[0].dtype, job.arms[0].adapter == "unmerged"): job for job in reversed(jobs)}
    context = mp.get_context("spawn")
    first = [context.Process(target=one_step, args=(job,)) for job in kinds.values()]
    for process in first:
        process.start()
    for process in first:
        process.join()


def one_step(job: Job) -> None:
    from experiments.arms import run_arm

    run_arm(replace(job.arms[0], scorer="exact"), replace(job.scale, steps=1), job.seed)


def worker(asked: Any, answers: Any, number: int) -> None:
    """Runs jobs until it receives None. Libraries are imported and kernels loaded once."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from transformers.utils import logging

    from experiments.arms import Engines
    from experiments.registry import module_of
    from experiments.study import run_arms_guarded, run_guarded

    engines = Engines()
    logging.disable_progress_bar()
    answers.put((number, None, []))
    while (job := asked.get()) is not None:
        if job.together:
            try:
                results = run_arms_guarded(module_of(job.experiment).run_arms, job.arms, job.scale, job.seed)
            except Exception as error:
                results = [{"arm": job.arms[0].name, "seed": job.seed, "error": repr(error), "rows": []}]
        else:
            results = [run_guarded(job.arms[0], job.scale, job.seed, engines)]
        gc.collect()
        empty_cache(job.scale.device)
        answers.put((number, job.experiment, results))


def empty_cache(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


def work_through(jobs: list[Job], options: argparse.Namespace, began: float) -> int:
    context = mp.get_context("spawn")
    answers = context.Queue()
    asked = [context.Queue() for _ in range(options.jobs)]
    workers = [context.Process(target=worker, args=(asked[i], answers, i), daemon=True) for i in range(options.jobs)]
    for each in workers:
        each.start()
    waiting, idle, done, running = list(jobs), [], 0, 0
    while (waiting or running) and time.monotonic() - began < options.deadline:
        try:
            number, experiment, results = answers.get(timeout=0.5)
            idle.append(number)
            if experiment is not None:
                running, done = running - 1, done + 1
                record(options.out, experiment, results, began)
        except queue.Empty:
            pass
        while idle and (job := next((job for job in waiting if job.ready()), None)) is not None:
            waiting.remove(job)
            asked[idle.pop()].put(job)
            running += 1
    for each in workers:
        each.kill()
    return done


def record(out: Path, experiment: str, results: list[dict[str, Any]], began: float) -> None:
    if experiment != WARM:
        with (out / f"{experiment}.runs.jsonl").open("a") as file:
            file.writelines(json.dumps(result) + "\n" for result in results)
    last = results[-1]
    shown = (
        last.get("error")
        or f"{last.get('before', 0):.2f} -> {last.get('after', last.get('cosine', 0)):.2f} in {last['seconds']:.0f} s"
    )
    say(began, f"{experiment}: {last['arm']}, seed {last['seed']}: {shown}"[:300])


if __name__ == "__main__":
    main()
