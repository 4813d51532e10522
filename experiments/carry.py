"""Carries the weights of SmolLM2-135M to a machine without a network, in two parts of under 40 MB.

`python -m experiments.carry pack GGUF HF_DIR OUT` writes OUT/a and OUT/b from a Q4_1 file (needs the package gguf);
`python -m experiments.carry unpack A B HF_DIR MODEL` makes a Hugging Face directory of them, with HF_DIR's configuration
and tokenizer. Only the ids that the tasks use have rows of embeddings; the others are 0.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

FIRST_OF_B = 15  # layers before it are in part a
KEPT_IDS = 8192
HEADS = {"attn_q": 9, "attn_k": 3}  # GGUF interleaves the halves of rotary heads
BLOCK_BYTES = {"Q8_0": 34, "Q4_1": 20}
NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def pack(gguf: Path, config: Path, out: Path) -> None:
    from experiments.grid import load_tasks

    _, cut = load_tasks(Path(__file__).parent / "data" / "tasks.jsonl", config, KEPT_IDS)
    parts: dict[str, dict[str, Any]] = {"a": {}, "b": {}}
    for tensor in import_module("gguf").GGUFReader(gguf).tensors:  # a tool of this experiment, not a dependency
        name, data = tensor.name, np.asarray(tensor.data)
        part = "b" if name.startswith("blk.") and int(name.split(".")[1]) >= FIRST_OF_B else "a"
        if name == "token_embd.weight":
            data = data.reshape(int(tensor.shape[1]), -1)[cut]
        parts[part][f"{name}|{tensor.tensor_type.name}|{','.join(map(str, tensor.shape))}"] = data
    for part, tensors in parts.items():
        (out / part).mkdir(parents=True, exist_ok=True)
        np.savez(out / part / "weights.npz", **tensors)
    (out / "a" / "kept.json").write_text(json.dumps(cut))


def unpack(first: Path, second: Path, config: Path, out: Path) -> None:
    import torch
    from safetensors.torch import save_file

    kept, weights = torch.tensor(json.loads((first / "kept.json").read_text())), {}
    for part in (first, second):
        for key, data in np.load(part / "weights.npz").items():
            name, kind, sizes = key.split("|")
            shape = [int(size) for size in sizes.split(",")]
            values = torch.from_numpy(dequantise(data, kind, shape))
            if name == "token_embd.weight":
                rows = torch.zeros(shape[1], shape[0])
                rows[kept] = values
                weights["model.embed_tokens.weight"] = rows
            elif name == "output_norm.weight":
                weights["model.norm.weight"] = values
            else:
                _, layer, what, _ = name.split(".")
                if heads := HEADS.get(what):
                    values = values.reshape(heads, -1, 2, shape[0]).swapaxes(1, 2).reshape(-1, shape[0])
                weights[f"model.layers.{layer}.{NAMES[what]}.weight"] = values
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: w.to(torch.bfloat16).contiguous() for name, w in weights.items()}, out / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (out / name).write_bytes((config / name).read_bytes())


def dequantise(data: Any, kind: str, shape: list[int]) -> Any:
    if kind == "F32":
        return np.array(data, dtype=np.float32).reshape(shape[::-1])
    blocks = np.ascontiguousarray(data).view(np.uint8).reshape(-1, BLOCK_BYTES[kind])
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        return (scales * blocks[:, 2:].copy().view(np.int8)).astype(np.float32).reshape(-1, shape[0])
    lowest, packed = blocks[:, 2:4].copy().view(np.float16).astype(np.float32), blocks[:, 4:]
    nibbles = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)
    return (scales * nibbles + lowest).reshape(-1, shape[0])


if __name__ == "__main__":
    run = {"pack": pack, "unpack": unpack}[sys.argv[1]]
    run(*map(Path, sys.argv[2:]))
