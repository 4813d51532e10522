// Colourings: each turns a branch into one small number per token, which is a class of style.css.
// 0 is no colour; 1–9 a sequential scale; 10–17 categories; 18–26 a diverging scale with 22 in the middle.
export const CLASSES = [
  "", ...Array.from({ length: 9 }, (_, i) => `q${i}`), ...Array.from({ length: 8 }, (_, i) => `v${i}`), ...Array.from({ length: 9 }, (_, i) => `d${i}`),
];
const clamp = (x, low, high) => Math.min(high, Math.max(low, x));
const sequential = (x) => 1 + clamp(Math.floor(9 * x), 0, 8);
const diverging = (x) => 18 + clamp(Math.round(4 + 4 * x), 0, 8); // x from -1 to 1

const LOGPROB_REACH = 6;
// A square root keeps the differences between likely tokens visible.
export const surprise = (logprob) => sequential(Math.sqrt(-logprob / LOGPROB_REACH));
const ENTROPY_REACH = 3;

export const COLOURINGS = [
  {
    id: "logprob", label: "log-probability", has: () => true,
    legend: () => ["likely, 0", `unlikely, −${LOGPROB_REACH} and below`, "q"],
    code: (b, i) => (b.rollout_logprobs[i] == null ? 0 : surprise(b.rollout_logprobs[i])),
  },
  {
    id: "version", label: "policy version", has: () => true,
    legend: (b) => [b.versions.map((v) => `v${v}`).join("  "), "", "v"],
    code: (b, i) => (b.version[i] < 0 ? 0 : 10 + (b.versions.indexOf(b.version[i]) % 8)),
  },
  {
    id: "entropy", label: "entropy", has: (b) => b.entropy != null,
    missing: "the engine reported no alternatives and the trainer file has no entropy",
    legend: () => ["certain, 0", `${ENTROPY_REACH} nats and above`, "q"],
    code: (b, i) => (b.entropy[i] == null ? 0 : sequential(b.entropy[i] / ENTROPY_REACH)),
  },
  {
    id: "delta", label: "δ", has: (b) => b.trainer_logprobs != null,
    missing: "no trainer log-probabilities: start with --trainer-logprobs FILE",
    legend: (b) => [`trainer less likely, δ ≤ −${b.deltaReach}`, `more likely, ≥ ${b.deltaReach}`, "d"],
    code: (b, i) => {
      if (b.rollout_logprobs[i] == null || b.trainer_logprobs[i] == null) return 0;
      return diverging((b.trainer_logprobs[i] - b.rollout_logprobs[i]) / b.deltaReach);
    },
  },
  {
    id: "advantage", label: "advantage", has: (b) => b.advantage != null,
    missing: "the sample has no reward",
    legend: () => ["−2", "+2", "d"],
    code: (b, i) => (b.kind[i] === 2 ? diverging(b.advantage / 2) : 0),
  },
];

export const KINDS = ["given", "inserted", "sampled", "masked"];
export const KIND_WORDS = {
  given: "given: came with the request",
  inserted: "inserted: put there by the chat template",
  sampled: "sampled and trained",
  masked: "sampled, not trained",
};

// Adds what the views need to a branch as the data API gives it.
export function prepare(b) {
  const n = b.token_ids.length;
  b.kind = new Uint8Array(n);
  b.version = new Int32Array(n).fill(-1);
  b.span = new Int32Array(n).fill(-1);
  b.spans.forEach(([start, end, kind, , , version, trainable], at) => {
    for (let i = start; i < end; i++) {
      b.span[i] = at;
      if (kind === "sampled") {
        b.kind[i] = trainable ? 2 : 3;
        if (version != null) b.version[i] = version;
      }
    }
  });
  for (const [start, end] of b.inserted) for (let i = start; i < end; i++) if (b.kind[i] === 0) b.kind[i] = 1;
  for (const [start, end] of b.untrained) for (let i = start; i < end; i++) if (b.kind[i] === 2) b.kind[i] = 3;
  b.deltaReach = 0.5;
  if (b.trainer_logprobs) {
    let most = 0;
    for (let i = 0; i < n; i++) {
      if (b.rollout_logprobs[i] != null && b.trainer_logprobs[i] != null) most = Math.max(most, Math.abs(b.trainer_logprobs[i] - b.rollout_logprobs[i]));
    }
    b.deltaReach = Number(Math.min(2, most || 0.5).toPrecision(1));
  }
  return b;
}

export function codes(colouring, b) {
  const found = new Uint8Array(b.token_ids.length);
  for (let i = 0; i < found.length; i++) found[i] = colouring.code(b, i);
  return found;
}

// What a token looks like: blanks and controls are made visible, half characters are their bytes.
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060\ufeff]/g;
const cache = new Map();
export function shown(pieces, id) {
  let text = cache.get(pieces)?.get(id);
  if (text !== undefined) return text;
  const piece = pieces[id];
  if (piece === undefined) text = String(id);
  else if (piece[0].includes("\ufffd")) text = `⟨${piece[1]}⟩`;
  else text = piece[0].replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(CONTROLS, "·");
  if (!cache.has(pieces)) cache.set(pieces, new Map());
  cache.get(pieces).set(id, text);
  return text;
}

export function colourOf(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
