"""The trainer's model on the CPU, what an engine reported, and trials that change one thing of the model.

Many trials run in one batch, each in rows of its own: of a small model that takes as long as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from tokentrue.engine.adapters import merge_low_rank, read_directory, read_pairs
from tokentrue.errors import ConfigError
from tokentrue.hub import load_causal_model, load_config
from tokentrue.numerics import KeptRows, remove_filtered
from tokentrue.records import record
from tokentrue.types import Completion

Rounding = Callable[[Tensor], Tensor]
GROUPS_KEPT = 8  # of observations that run together


@record
class Observation:
    """`logprobs[k]` is the engine's, of `token_ids[positions[k]]`, given everything before it."""

    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int = 0  # of `token_ids`, how many were sent rather than sampled
    temperatures: tuple[float, ...] = ()  # that each position was sampled at, where it is known; else 1
    kept: tuple[tuple[int, ...], ...] = ()  # ids that filters kept at each position; an empty one keeps all
    tops: tuple[Mapping[int, float], ...] = ()  # the engine's likeliest ids at each position

    @staticmethod
    def from_completion(prompt_ids: Sequence[int], completion: Completion) -> Observation:
        ids, sent = (*prompt_ids, *completion.token_ids), len(prompt_ids)
        tops = tuple(completion.top_logprobs or ())
        pairs = list(zip(completion.token_ids, completion.logprobs, tops, strict=False))
        if len(tops) != len(completion.token_ids) or any(
            token in top and abs(top[token] - value) > 1e-6 for token, value, top in pairs
        ):
            tops = ()  # the lists say something else than the values: only those reach a trainer
        positions, logprobs = tuple(range(sent, len(ids))), completion.logprobs
        return Observation(token_ids=ids, positions=positions, logprobs=logprobs, prompt_tokens=sent, tops=tops)

    @staticmethod
    def from_prompt(prompt_ids: Sequence[int], logprobs: Sequence[float]) -> Observation:
        """`logprobs` are of `prompt_ids[1:]`."""
        ids, sent = tuple(prompt_ids), len(prompt_ids)
        return Observation(token_ids=ids, positions=tuple(range(1, sent)), logprobs=tuple(logprobs), prompt_tokens=sent)

    @property
    def targets(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row, token id and reported log-probability of every entry: chosen tokens, then the likeliest others."""
        chosen = [self.token_ids[at] for at in self.positions]
        entries = list(zip(range(len(chosen)), chosen, self.logprobs, strict=True))
        for row, top in enumerate(self.tops):
            # A filtered engine may list tokens that it cannot draw.
            entries += [(row, token, value) for token, value in top.items() if token != chosen[row] and value > -1e3]
        rows, ids, values = zip(*entries, strict=True)
        return torch.tensor(rows), torch.tensor(ids), torch.tensor(values, dtype=torch.float64)

    def first(self, count: int) -> Observation:
        kept = self.positions[:count]
        own = {name: getattr(self, name)[:count] for name in ("logprobs", "temperatures", "kept", "tops")}
        return replace(self, token_ids=self.token_ids[: kept[-1] + 1], positions=kept, **own)

    @property
    def is_prompt(self) -> bool:
        return not self.positions or self.positions[0] < self.prompt_tokens

    def edit(self, start: int, drop: int, insert: tuple[int, ...] = ()) -> Observation:
        """The observation after a change of the prompt; a position that loses its context has the next one."""
        end, by = start + drop, len(insert) - drop
        return replace(
            self,
            token_ids=(*self.token_ids[:start], *insert, *self.token_ids[end:]),
            positions=tuple(max(1, at + by if at >= end else min(at, start)) for at in self.positions),
            prompt_tokens=self.prompt_tokens + by,
        )


class Change(Struct):
    values: dict[str, Any] = {}  # parameters, buffers and attributes
    before: list[Callable[[Any, Any], tuple[Any, Any]]] = []  # of args, keyword arguments
    after: list[Callable[[Any, Any], Any]] = []  # of args, output


class Trial:
    """One change of the reference, which stays as it is: `compute_batch` runs some rows of a batch under a trial."""

    def __init__(self, model: Any, saved: Mapping[str, Tensor]) -> None:
        self.model, self.saved = model, saved
        self.changes: dict[nn.Module, Change] = {}
        self.positions: Callable[[Tensor, Tensor], Tensor] | None = None  # of places `[1, L]`, prompt lengths `[B, 1]`
        self.cache: Callable[[], Any] | None = None  # the prompt, then the rest, go through this cache
        self.inputs: Callable[[Observation], Observation] = lambda seen: seen
        self.outputs: Callable[[Tensor, Observation], Tensor] | None = None  # logits before temperature and filters
        # What is said in place of log-probabilities of the entries; by the logits, too.
        self.reports: Callable[[Tensor, Observation, Tensor], Tensor] | None = None
        self.align = 0  # each log-probability is that of the token so many places on
        self.span: Callable[[Observation], tuple[int, int]] | None = None  # of tokens under the change; others are not
        self.kept: KeptStates | None = None
        self.sent = torch.zeros(1, 1, dtype=torch.long)  # prompt lengths of the rows that run
        self.wanted: list[int] = []  # places whose logits are computed
        self.inside: Tensor | None = None  # `[B, L]`, tokens of these rows in the span

    def _change(self, module: nn.Module) -> Change:
        return self.changes.setdefault(module, Change())

    def get(self, module: nn.Module, name: str) -> Any:
        values = self.changes[module].values if module in self.changes else {}
        value = values.get(name, getattr(module, name))
        return _widen(value.data if isinstance(value, nn.Parameter) else value)

    def set(self, module: nn.Module, name: str, value: Any) -> None:
        before = getattr(module, name)
        value = value.to(before.dtype) if isinstance(before, Tensor) else value
        is_parameter = isinstance(before, nn.Parameter)
        self._change(module).values[name] = nn.Parameter(value, requires_grad=False) if is_parameter else value

    def hook(self, module: nn.Module, change: Callable[[Any, Any], Any], *, is_whole: bool = False) -> None:
        """`change(inputs, output)` replaces the module's output; the first of several, unless `is_whole`."""

        def run(inputs: Any, out: Any) -> Any:
            inputs, wide = tree_map(_widen, (inputs, out))
            is_plain = is_whole or not isinstance(wide, tuple)
            changed = change(inputs, wide) if is_plain else (change(inputs, wide[0]), *wide[1:])
            return tree_map(_as_before, changed, out)

        self._change(module).after.append(run)

    def hook_inputs(self, module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        def run(inputs: Any, given: Any) -> tuple[Any, Any]:
            return (_as_before(change(_widen(inputs[0])), inputs[0]), *inputs[1:]), given

        self._change(module).before.append(run)

    def give(self, module: nn.Module, name: str, change: Callable[[Any], Any]) -> None:
        self._change(module).before.append(lambda inputs, given: (inputs, {**given, name: change(given[name])}))

    def hide(self, attention: nn.Module, is_hidden: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        """`is_hidden(query, key, sent)`: places that this attention does not see, the later keys included."""

        def mask(inputs: Any, given: Any) -> tuple[Any, Any]:
            states = inputs[0] if inputs else given["hidden_states"]
            at = torch.arange(states.shape[1])
            hidden = is_hidden(at[:, None], at, self.sent[:, :, None]).expand(len(self.sent), len(at), len(at))
            mask = torch.zeros(hidden.shape, dtype=states.dtype).masked_fill(hidden, torch.finfo(states.dtype).min)
            return inputs, {**given, "attention_mask": mask[:, None]}

        self._change(attention).before.append(mask)

    def call(self, module: nn.Module, forward: Callable[..., Any], inputs: Any, given: Any, plain: Any = None) -> Any:
        """What `module` returns under this trial; `plain`: without it, if that is known."""
        change = self.changes.get(module)
        if change is None:
            return forward(*inputs, **given)
        if plain is None and self.inside is not None:
            plain = forward(*inputs, **given)
        out = plain
        if out is None or change.before or change.values:
            for edit in change.before:
                inputs, given = edit(inputs, given)
            own = {name: getattr(module, name) for name in change.values}
            try:
                for name, value in change.values.items():
                    setattr(module, name, value)
                out = forward(*inputs, **given)
            finally:
                for name, value in own.items():
                    setattr(module, name, value)
        for edit in change.after:
            out = edit(inputs, out)
        return out if self.inside is None else _choose(self.inside, self.wanted, out, plain)


class KeptStates:
    """Hidden states of the unchanged model: a trial computes no layer before the first one that it changes. The same
    shapes give the same bits; the first trial that begins so is computed both ways, and where they differ none does.
    With this, and no set of parts computed twice, a search in 30 layers of 135M takes 10.4 s instead of 18.8."""

    def __init__(self, model: Any) -> None:
        inner = getattr(model, "model", None)
        self.layers: list[nn.Module] = [*(getattr(inner, "layers", None) or ())]
        self._place: dict[Any, int] = {part: at for at, layer in enumerate(self.layers) for part in layer.modules()}
        for one in (getattr(inner, "norm", None), model.get_output_embeddings()):
            self._place[one] = len(self.layers)
        self._outputs: dict[tuple[int, ...], list[Any]] = {}  # of layers, by the ids of a group
        self.is_right: bool | None = None

    @contextmanager
    def skip(self, ids: Tensor, trial: Trial) -> Iterator[bool]:
        end = 0 if trial.positions else min((self._place.get(one, 0) for one in trial.changes), default=0)
        if self.is_right is False or not end:
            yield False
            return
        if len(self._outputs) > GROUPS_KEPT:
            self._outputs.clear()
        outputs = self._outputs.setdefault((len(ids), *ids.flatten().tolist()), [])
        known = min(len(outputs), end)

        def run(at: int, forward: Callable[..., Any], *inputs: Any, **given: Any) -> Any:
            if at >= known:
                outputs.append(forward(*inputs, **given))
            return outputs[max(at, known - 1)]

        with ExitStack() as undo:
            for at, layer in enumerate(self.layers[:end]):
                undo.callback(delattr, layer, "forward")
                layer.forward = partial(run, at, layer.forward)
            yield known > 0


def _choose(inside: Tensor, wanted: list[int], changed: Any, plain: Any) -> Any:
    def choose(one: Any, other: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        rows = inside if len(one) == len(inside) else inside.flatten()
        if len(one) == len(inside) and one.shape[1] != inside.shape[1]:
            rows = inside[:, wanted]  # the output layer sees these alone
        return torch.where(rows.view(*rows.shape, *[1] * (one.dim() - rows.dim())), one, other)

    return tree_map(choose, changed, plain)


class Reference:
    """A model in float32 on the CPU; `source`: the directory or hub id that it is from."""

    def __init__(self, model: Any, *, source: str | Path | None = None, adapter: Path | None = None) -> None:
        self.model: Any = model.eval()
        self.config: Any = model.config.get_text_config()
        self.source, self.adapter = source, adapter
        self._logits: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
        self.kept = KeptStates(model)
        self.on_progress: Callable[[str], None] = lambda _: None  # of a search that takes minutes
        self.saved: dict[str, Tensor] = {}  # weights before `expect` rounded them: engines quantise these
        # What engines serve by default; a loaded model's configuration has the dtype of loading instead.
        saved = getattr(self.config if source is None else load_config(source), "dtype", None)
        self.dtype = str(saved or "float32").removeprefix("torch.")

    @staticmethod
    def load(source: str | Path, *, adapter: Path | None = None) -> Reference:
        """With `adapter`, the policy is the model with that adapter merged in."""
        model = load_model(source)
        return Reference(model if adapter is None else merge_adapter(model, adapter), source=source, adapter=adapter)

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def max_positions(self) -> int:
        return int(getattr(self.config, "max_position_embeddings", 2048))

    def expect(self, dtype: str) -> None:
        """Rounds the weights as an engine of that dtype loads them; computation stays in float32."""
        for name, parameter in self.model.named_parameters():
            rounded = parameter.data.to(getattr(torch, dtype)).float()
            if not torch.equal(rounded, parameter.data):
                self.saved[name] = parameter.data
            parameter.data = rounded
        self._logits.clear()
        self.kept = KeptStates(self.model)

    @contextmanager
    def in_dtype(self, dtype: str, *, are_tables_wide: bool = False, are_norms_wide: bool = False) -> Iterator[None]:
        """The model computes in that dtype, but for the sums in a product; rotary frequencies may stay in float32, and
        norms may round once, after their weights."""
        tensors = [*self.model.parameters(), *([] if are_tables_wide else self.model.buffers())]
        own = [(one, one.data) for one in tensors if one.is_floating_point()]
        norms = [one for one in self.model.modules() if are_norms_wide and "Norm" in type(one).__name__]
        try:
            for one, value in own:
                one.data = value.to(getattr(torch, dtype))
            with ExitStack() as undo:
                for norm in norms:
                    for one in norm.parameters():
                        one.data = one.data.float()
                    norm.forward = partial(_round_once, norm.forward)
                    undo.callback(delattr, norm, "forward")
                undo.enter_context(WideSums() if dtype != "float32" else nullcontext())
                yield
        finally:
            for one, value in own:
                one.data = value

    def trial(self) -> Trial:
        return Trial(self.model, self.saved)

    def plain_logits(self, seen: Observation) -> Tensor:
        """Computed once for each observation: several probes ask for the same."""
        key = (seen.token_ids, seen.positions)
        if key not in self._logits:
            self._logits[key] = compute_logits(self.model, seen)
        return self._logits[key]

    def logprobs(self, observations: Sequence[Observation]) -> Tensor:
        """Of the chosen tokens, at each one's temperature, over the ids that were kept."""
        found = [read_entries(seen, compute_logits(self.model, seen))[: len(seen.positions)] for seen in observations]
        return torch.cat([torch.zeros(0, dtype=torch.float64), *found])


def load_model(source: str | Path) -> Any:
    return load_causal_model(source, dtype="float32").eval()


def _round_once(forward: Callable[..., Tensor], states: Tensor, *inputs: Any, **given: Any) -> Tensor:
    return forward(states.float(), *inputs, **given).to(states.dtype)


class WideSums(TorchFunctionMode):
    """Products of a 16-bit model add up in float32 and are rounded once, as on a GPU. torch's emulation on processors
    without such products is a hundred times slower."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        given = {name: _widen(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widen, args), **given).to(args[0].dtype)


PRODUCTS = frozenset({linear, torch.matmul, torch.Tensor.matmul, torch.bmm, scaled_dot_product_attention})


def _widen(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _as_before(value: Any, before: Any) -> Any:
    return value.to(before.dtype) if isinstance(value, Tensor) and isinstance(before, Tensor) else value


def compute_logits(model: Any, seen: Observation, *, is_cached: bool = False) -> Tensor:
    """float32 `[positions, V]`. With a cache the prompt runs first, another order of rounding."""
    return _compute_cached(model, seen, rounding_cache()) if is_cached else compute_batch(model, [seen])[0]


@torch.no_grad()
def _compute_cached(model: Any, seen: Observation, cache: Any) -> Tensor:
    sent, end, recent = seen.prompt_tokens, len(seen.token_ids), cache.recent
    # Within one forward pass, the same tokens are old.
    cuts = [at for at in range(recent - 1, end, recent) if at > sent] if recent else []
    ids, edges = torch.tensor([seen.token_ids]), [0, sent, *cuts, end]
    parts = [ids[:, start:stop] for start, stop in pairwise(edges) if start < stop]
    found = [model(part, past_key_values=cache, use_cache=True).logits[0] for part in parts]
    return torch.cat(found)[torch.tensor(seen.positions) - 1].float()


@torch.no_grad()
def compute_batch(
    model: Any, observations: Sequence[Observation], trials: Sequence[Trial | None] | None = None
) -> list[Tensor]:
    """Logits `[positions, V]` under each trial; observations of about the same length run together."""
    trials = [None] * len(observations) if trials is None else trials
    observations = [
        seen if trial is None else trial.inputs(seen) for seen, trial in zip(observations, trials, strict=True)
    ]
    found: dict[int, Tensor] = {}
    for n, (seen, trial) in enumerate(zip(observations, trials, strict=True)):
        if trial is not None and trial.cache is not None:
            found[n] = _compute_cached(model, seen, trial.cache())
    waiting = sorted({*range(len(observations))} - {*found}, key=lambda n: len(observations[n].token_ids))
    while waiting:
        lengths = [len(observations[n].token_ids) for n in waiting]
        count = max(n for n in range(1, len(waiting) + 1) if n * lengths[n - 1] <= 1.3 * sum(lengths[:n]))
        group, waiting = waiting[:count], waiting[count:]
        chosen = [observations[n] for n in group]
        parts: dict[Trial, list[int]] = {}
        for row, n in enumerate(group):
            if (trial := trials[n]) is not None:
                parts.setdefault(trial, []).append(row)
        for n, logits in zip(group, _compute_group(model, chosen, parts), strict=True):
            found[n] = logits
    return [found[n] for n in range(len(observations))]


def _compute_group(model: Any, chosen: Sequence[Observation], parts: Mapping[Trial, list[int]]) -> list[Tensor]:
    """`parts`: the rows of each trial."""
    length = max(len(seen.token_ids) for seen in chosen)
    ids = torch.tensor([[*seen.token_ids, *[0] * (length - len(seen.token_ids))] for seen in chosen])
    places = torch.arange(length)[None]
    positions = places.repeat(len(chosen), 1)
    wanted = sorted({at - 1 for seen in chosen for at in seen.positions})
    for trial, rows in parts.items():
        trial.wanted = wanted
        trial.sent = torch.tensor([[chosen[row].prompt_tokens] for row in rows])
        if trial.positions is not None:
            positions[rows] = trial.positions(places, trial.sent).expand(len(rows), -1).clamp(0)
        if trial.span is not None:
            first, end = torch.tensor([trial.span(chosen[row]) for row in rows]).T[:, :, None]
            trial.inside = (places >= first) & (places < end)
    # Without a mask, positions that do not rise by 1 are taken for several texts in one row.
    given: dict[str, Any] = {"use_cache": False, "position_ids": positions, "attention_mask": torch.ones_like(ids)}
    is_whole = "logits_to_keep" not in signature(model.forward).parameters
    if not is_whole:
        given["logits_to_keep"] = torch.tensor(wanted)
    alone = next((trial for trial, rows in parts.items() if len(rows) == len(chosen)), None)
    kept = None if alone is None else alone.kept
    skip = nullcontext(False) if alone is None or kept is None else kept.skip(ids, alone)
    with skip as is_short, _run_under(parts, len(chosen)):
        logits = model(ids, **given).logits
    if kept is not None and is_short and kept.is_right is None:
        with _run_under(parts, len(chosen)):
            whole = model(ids, **given).logits
        kept.is_right, logits = torch.equal(logits, whole), whole
    row = {place: place if is_whole else number for number, place in enumerate(wanted)}
    return [
        rows[torch.tensor([row[at - 1] for at in seen.positions])].float()
        for seen, rows in zip(chosen, logits, strict=True)
    ]


@contextmanager
def _run_under(parts: Mapping[Trial, list[int]], count: int) -> Iterator[None]:
    """Each module first runs on the whole batch, then what a trial changes in it on the trial's rows."""
    is_alone = len(parts) == 1 and all(len(rows) == count for rows in parts.values())
    active = [*parts] if is_alone else list[Trial]()

    def run(module: nn.Module, forward: Callable[..., Any], *inputs: Any, **given: Any) -> Any:
        if active:
            return active[0].call(module, forward, inputs, given)
        out = _copy(forward(*inputs, **given))
        for trial, rows in parts.items():
            if module in trial.changes:
                own, named, plain = _take((inputs, given, out), rows, count)
                active.append(trial)
                try:
                    _put(out, rows, trial.call(module, forward, own, named, plain), count)
                finally:
                    active.clear()
        return out

    with ExitStack() as undo:
        for module in {module: None for trial in parts for module in trial.changes}:
            undo.callback(delattr, module, "forward")
            module.forward = partial(run, module, module.forward)
        yield


def _copy(value: Any) -> Any:
    return tree_map(lambda one: one.clone() if isinstance(one, Tensor) else one, value)


def _rows(value: Tensor, count: int) -> Tensor:
    return value if len(value) == count else value.unflatten(0, (count, -1))  # mixtures see all tokens in a row


def _take(value: Any, rows: list[int], count: int) -> Any:
    def take(one: Any) -> Any:
        if not isinstance(one, Tensor) or one.dim() < 2 or len(one) % count:
            return one
        own = _rows(one, count)[rows]
        return own if len(one) == count else own.flatten(0, 1)

    return tree_map(take, value)


def _put(out: Any, rows: list[int], value: Any, count: int) -> None:
    for one, part in zip(tree_leaves(out), tree_leaves(value), strict=True):
        if isinstance(one, Tensor):
            _rows(one, count)[rows] = _rows(part, len(rows))


def rounding_cache(
    keys: Rounding | None = None, values: Rounding | None = None, *, prefill: bool = True, recent: int = 0
) -> Any:
    """Rounds keys and values; without `prefill`, the prompt's own attention reads them unrounded. `recent`: so many
    tokens and more stay as they are, older ones are rounded page by page of this size."""
    from transformers import DynamicCache

    class RoundingCache(DynamicCache):
        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            is_first = self.get_seq_length(layer_idx) == 0

            def store(states: Tensor, rounding: Rounding | None) -> Tensor:
                if rounding is None or recent:
                    return states
                # Decoding stores one token at a time: a scale over several tokens is one of the prompt's.
                wide = states if is_first else states.transpose(0, 2)
                found = rounding(wide.float()).to(states.dtype)
                return found if is_first else found.transpose(0, 2)

            def read(states: Tensor, rounding: Rounding | None) -> Tensor:
                old = max(states.shape[2] - recent, 0) // recent * recent
                if rounding is None or not old:
                    return states
                return torch.cat((rounding(states[:, :, :old].float()).to(states.dtype), states[:, :, old:]), dim=2)

            new = store(key_states, keys), store(value_states, values)
            stored = super().update(*new, layer_idx, *args, **kwargs)
            if is_first and (recent or not prefill):
                return key_states, value_states
            return (read(stored[0], keys), read(stored[1], values)) if recent else stored

    cache: Any = RoundingCache()
    cache.recent = recent
    return cache


def read_entries(
    seen: Observation, logits: Tensor, outputs: Callable[[Tensor, Observation], Tensor] | None = None
) -> Tensor:
    """float64: what an engine with these logits reports for every target."""
    if outputs is not None:
        logits = outputs(logits, seen)
    if any(seen.kept):
        offsets = torch.tensor([0, *(len(row) for row in seen.kept)]).cumsum(0)
        kept = torch.tensor([one for row in seen.kept for one in row])
        logits = remove_filtered(logits, KeptRows(token_ids=kept, offsets=offsets))
    if seen.temperatures:
        logits = logits / torch.tensor(seen.temperatures, dtype=logits.dtype).unsqueeze(1)
    rows, ids, _ = seen.targets
    return logits[rows, ids].double() - logits.double().logsumexp(dim=-1)[rows]


def adapter_deltas(model: Any, directory: Path) -> dict[str, Tensor]:
    modules, found = dict(model.named_modules()), dict[str, Tensor]()
    for name, low in read_pairs(directory.name, *read_directory(directory)).items():
        target = modules.get(name)
        if not isinstance(target, nn.Linear):
            raise ConfigError(f"--adapter: {name} is no linear layer of the model")
        found[name] = merge_low_rank(torch.zeros_like(target.weight.data), low)
    return found


def merge_adapter(model: Any, directory: Path) -> Any:
    for name, delta in adapter_deltas(model, directory).items():
        model.get_submodule(name).weight.data += delta
    return model
