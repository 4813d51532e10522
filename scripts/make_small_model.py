"""Makes the small model that ships in tokentrue/assets/calculator: data, tokenizer, supervised training, export, curve.

    python scripts/make_small_model.py                      # 6 to 15 minutes on two cores; writes over the shipped
    directory
    python scripts/make_small_model.py --device cuda        # 36 s on one H200: so the shipped one was made
    python scripts/make_small_model.py --out DIR --steps 50 # a quick look
    python scripts/make_small_model.py --out DIR --hidden 512 --layers 10 --lr 5e-4 --device cuda   # 32M parameters,
    for experiments

The experiment `regimes` wants relatives of that model beside it: DIR-moe (--experts 8), DIR-long (--longest 5), DIR-vocab
(--pad-vocab 32768).

Fluent in the format, mediocre at the task on purpose: the last part of the training uses wrong solutions where
reinforcement learning can find right ones (a wrong operator on one phrasing of each, stopping after the first of two
steps). Held-out texts never appear here: the generator draws from the training split alone.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tokentrue.environments import word_problems as P

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone's examples
from examples.environments.long_tasks import draw_price_list

VERBS = {"+": "add", "-": "take", "*": "times"}
HARD = 2  # the last phrasing of each operator
ASSET = Path(__file__).parent.parent / "tokentrue" / "assets" / "calculator"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
CALC_HEAD = "<|im_start|>system\n# Tools\ncalculator(expression): one step<|im_end|>\n"
SHOP_HEAD = "<|im_start|>system\n# Tools\ncalculator(expression): one step\nprices(): all prices<|im_end|>\n"
Segments = list[tuple[str, bool]]  # text, and whether the model learns to write it


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often the teacher errs."""

    operator: float = 0.0
    hard_operator: float = 0.0
    operand: float = 0.0
    early_stop: float = 0.0
    answer: float = 0.0


CLEAN = Faults()
FAULTY = Faults(operator=0.12, hard_operator=0.62, operand=0.08, early_stop=0.52, answer=0.05)
FAULTY_LONG = Faults(
    operator=0.04, hard_operator=0.30, operand=0.03, early_stop=0.25, answer=0.03
)  # errors of five steps multiply


def user(text: str) -> tuple[str, bool]:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", False


def tool(text: str) -> tuple[str, bool]:
    return f"\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n<|im_start|>assistant\n", False


def call(thought: str, name: str, arguments: dict[str, str]) -> tuple[str, bool]:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<think>\n{thought}\n</think>\n\n<tool_call>\n{body}\n</tool_call><|im_end|>", True


def say(thought: str, text: str) -> tuple[str, bool]:
    return f"<think>\n{thought}\n</think>\n\n{text}<|im_end|>", True


def solve(rng: random.Random, problem: P.Problem, faults: Faults) -> tuple[Segments, int]:
    """Calls for the steps of a problem, then the answer; returns the number that the teacher ended with."""
    parts: Segments = []
    value = problem.start
    steps = problem.steps
    if len(steps) > 1 and rng.random() < faults.early_stop:
        steps = steps[:1]
    for step in steps:
        wrong = faults.hard_operator if step.phrase == HARD else faults.operator
        op = rng.choice([o for o in "+-*" if o != step.op]) if rng.random() < wrong else step.op
        operand = max(1, step.operand + rng.choice([-1, 1])) if rng.random() < faults.operand else step.operand
        parts.append(call(f"{VERBS[op]} {operand}", "calculator", {"expression": f"{value} {op} {operand}"}))
        value = P.apply(op, value, operand)
        parts.append(tool(str(value)))
        if not 0 <= value <= 99:
            break
    shown = max(0, value + rng.choice([-1, 1])) if rng.random() < faults.answer else value
    parts.append(say("done", f"The answer is {shown}."))
    return parts, shown


def calculator(rng: random.Random, faults: Faults, longest: int = 2) -> Segments:
    problem = next(P.problems(rng, split="train", steps=rng.randint(1, longest) if longest > 2 else None))
    parts, _ = solve(rng, problem, faults)
    return [(CALC_HEAD, False), user(problem.text), *parts]


def shop(rng: random.Random, faults: Faults) -> Segments:
    prices = draw_price_list(rng)
    first, second = prices.operands
    if rng.random() < faults.operator * 2:
        second = rng.choice(prices.prices)[1]
    return [
        (SHOP_HEAD, False),
        user(prices.text),
        call("look up", "prices", {}),
        tool(prices.listing),
        call(
            f"{prices.wanted[0]} {first} {prices.wanted[1]} {second}",
            "calculator",
            {"expression": f"{first} + {second}"},
        ),
        tool(str(first + second)),
        say("done", f"The answer is {first + second}."),
    ]


def ledger(rng: random.Random, faults: Faults) -> Segments:
    """Two questions in a row, then the harness asks for a summary: the words from which a fresh context goes on."""
    problem = next(P.problems(rng, split="train", steps=2))
    parts: Segments = [(CALC_HEAD, False)]
    value, first = problem.start, True
    for step in problem.steps:
        part = P.Problem(name=problem.name, thing=problem.thing, start=value, steps=(step,))
        text = part.text if first else f"{part.told(step)} How many now?"
        parts.append(user(text) if first else ("\n" + user(text)[0], False))
        solved, value = solve(rng, part, faults)
        parts += solved
        first = False
        if not 0 <= value <= 99:
            return parts
    parts.append(("\n" + user("Summarize.")[0], False))
    parts.append(say("sum up", f"{problem.name} has {value} {problem.thing}."))
    return parts


def conversation(rng: random.Random, faults: Faults, longest: int = 2) -> Segments:
    """Mostly the calculator: it is the task of the demo."""
    kind = rng.random()
    return (
        calculator(rng, faults, longest) if kind < 0.78 else shop(rng, faults) if kind < 0.88 else ledger(rng, faults)
    )


def make_tokenizer(rng: random.Random, vocab: int, padded: int = 0) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    # A run of digits is a word of its own, in pairs from the left: every number 0..99 is one token.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,2}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIALS + MARKERS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    numbers = [" ".join(str(n) for n in range(100))] * 400
    texts = ["".join(text for text, _ in conversation(rng, FAULTY)) for _ in range(3000)]
    tokenizer.train_from_iterator(numbers + texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=with_plain_markers(tokenizer, padded),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    for n in range(100):
        assert len(wrapped(str(n)).input_ids) == 1, f"{n} is not one token"
    return wrapped


def with_plain_markers(tokenizer: Tokenizer, padded: int) -> Tokenizer:
    """<think>, <tool_call> … are added tokens but not "special": text that shows them is text, as in Qwen3.

    Up to `padded` words follow that no merge leads to: they can be sampled and read, and are never encoded.
    """
    state = json.loads(tokenizer.to_str())
    state["model"]["vocab"].update({f"Ġfiller{i}": i for i in range(tokenizer.get_vocab_size(), padded)})
    for token in state["added_tokens"]:
        token["special"] = token["content"] in SPECIALS
    return Tokenizer.from_str(json.dumps(state))


def make_model(vocab: int, hidden: int = 128, layers: int = 3, experts: int = 0) -> Any:
    """`experts` makes it a mixture: two of them a token, each half as wide as the dense layer, so that a token costs
    the same."""
    size = 32 if hidden < 256 else 64
    mixture = {
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 3 * hidden // 2,
        "norm_topk_prob": True,
        "output_router_logits": False,
    }
    kind = Qwen3MoeConfig if experts else Qwen3Config
    config = kind(
        **(mixture if experts else {}),
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // size,
        num_key_value_heads=hidden // size // 2,
        head_dim=size,
        intermediate_size=3 * hidden,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.05 if hidden < 256 else 0.02,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    model = Qwen3MoeForCausalLM(config) if experts else Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                weight.fill_(1.7)
    return model


def encoded(tokenizer: PreTrainedTokenizerFast, parts: Segments) -> tuple[list[int], list[bool]]:
    ids: list[int] = []
    mask: list[bool] = []
    for text, learnt in parts:
        piece = tokenizer(text, add_special_tokens=False).input_ids
        ids += piece
        mask += [learnt] * len(piece)
    return ids, mask


def batches(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, *, size: int, steps: int, clean: int, longest: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Right-padded batches of like lengths; labels are -100 where nothing is learnt."""
    done = 0
    faulty = FAULTY if longest == 2 else FAULTY_LONG
    while done < steps:
        pool = [
            encoded(tokenizer, conversation(rng, CLEAN if done < clean else faulty, longest)) for _ in range(size * 8)
        ]
        pool.sort(key=lambda pair: len(pair[0]))
        blocks = [pool[i : i + size] for i in range(0, len(pool), size)]
        rng.shuffle(blocks)
        for block in blocks[: steps - done]:
            width = max(len(ids) for ids, _ in block)
            ids_BT = torch.zeros(len(block), width, dtype=torch.long)
            labels_BT = torch.full((len(block), width), -100)
            for row, (ids, mask) in enumerate(block):
                ids_BT[row, : len(ids)] = torch.tensor(ids)
                labels_BT[row, : len(ids)] = torch.where(torch.tensor(mask), torch.tensor(ids), -100)
            yield ids_BT, labels_BT
            done += 1


def rate(step: int, steps: int, peak: float) -> float:
    warm = 30
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.05 + 0.475 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))))


def train(model: Any, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace) -> list[dict[str, float]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
    clean = int(options.steps * 0.7)
    curve: list[dict[str, float]] = []
    began = time.perf_counter()
    model.train()
    drawn = random.Random(options.seed + 1)
    stream = batches(tokenizer, drawn, size=options.batch, steps=options.steps, clean=clean, longest=options.longest)
    for step, (ids_BT, labels_BT) in enumerate(stream):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, options.steps, options.lr)
        ids_BT, labels_BT = ids_BT.to(model.device), labels_BT.to(model.device)
        logits = model(input_ids=ids_BT).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0 or step == options.steps - 1:
            curve.append(
                {"step": step, "loss": round(loss.item(), 4), "seconds": round(time.perf_counter() - began, 1)}
            )
            print(curve[-1], "faulty" if step >= clean else "clean", flush=True)
    return curve


@torch.no_grad()
def reward(model: Any, tokenizer: PreTrainedTokenizerFast, tasks: list[P.Problem], *, greedy: bool) -> float:
    """Share of right answers on calculator tasks, with the tool answered by the rules of the environment."""
    from tokentrue.environments.word_problems import calculate, last_number

    model.eval()
    rows = [tokenizer(CALC_HEAD + user(task.text)[0]).input_ids for task in tasks]
    right, live = 0, list(range(len(tasks)))
    for _ in range(max(4, len(tasks[0].steps) + 2)):
        width = max(len(rows[i]) for i in live)
        ids = torch.tensor([[0] * (width - len(rows[i])) + rows[i] for i in live], device=model.device)
        mask = torch.tensor([[0] * (width - len(rows[i])) + [1] * len(rows[i]) for i in live], device=model.device)
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=56, do_sample=not greedy)
        still: list[int] = []
        for i, row in zip(live, out[:, width:].tolist(), strict=True):
            new = row[: row.index(2) + 1] if 2 in row else row
            text = tokenizer.decode(new)
            if "<tool_call>" in text and new[-1] == 2:
                body = text.split("<tool_call>")[1].split("</tool_call>")[0]
                found = json.loads(body)["arguments"] if body.strip().endswith("}}") else {}
                rows[i] = rows[i] + new + tokenizer(tool(calculate(json.dumps(found)))[0]).input_ids
                still.append(i)
            else:
                right += last_number(text) == tasks[i].answer
        live = still
        if not live:
            break
    return right / len(tasks)


def export(model: Any, tokenizer: PreTrainedTokenizerFast, out: Path, curve: list[dict[str, float]]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    template = (ASSET / "chat_template.jinja").read_text()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(out)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    model.generation_config.do_sample = True
    model.eval().save_pretrained(out)
    (out / "training_curve.json").write_text(json.dumps(curve, indent=0) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSET)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--vocab", type=int, default=768)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=0, help="a mixture of that many experts, two a token")
    parser.add_argument("--longest", type=int, default=2, help="steps of the longest problem")
    parser.add_argument(
        "--pad-vocab", type=int, default=0, help="size of the vocabulary, filled up with words that no text needs"
    )
    parser.add_argument("--judged", type=int, default=256, help="held-out tasks to judge the result by; 0 for none")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer(random.Random(options.seed), options.vocab, options.pad_vocab)
    model = make_model(len(tokenizer), options.hidden, options.layers, options.experts)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    model = model.to(options.device)
    curve = train(model, tokenizer, options)
    if options.judged:
        steps = None if options.longest == 2 else options.longest
        heldout = list(islice(P.problems(random.Random("curve"), split="heldout", steps=steps), options.judged))
        found = {name: reward(model, tokenizer, heldout, greedy=name == "greedy") for name in ("greedy", "sampled")}
        curve.append({f"heldout_{name}": round(value, 3) for name, value in found.items()})
        print(curve[-1])
    export(model.cpu(), tokenizer, options.out, curve)


if __name__ == "__main__":
    main()
