// All that is known of one token: the one under the pointer, else the active one.
import { KINDS, KIND_WORDS } from "./colours.js";
import { compact, fixed, html, reason, signed, useValue } from "./ui.js";

export function Inspector({ branch, hovered, active }) {
  const under = useValue(hovered);
  const chosen = useValue(active);
  const at = under ?? chosen;
  const facts = at == null || at >= branch.token_ids.length ? null : tokenFacts(branch, at);
  return html`<section class="inspector" aria-label="Token">
    <h2>Token</h2>
    ${facts === null
      ? html`<p class="soft">Point at a token, or use the arrow keys in the token view.</p>`
      : html`<p class="glyph"><code>${facts.quoted}</code></p><dl class="facts stacked">${facts.rows.map(
          ([label, value]) => html`<div key=${label}><dt>${label}</dt><dd>${value}</dd></div>`)}</dl>`}
    <p class="sr-only" aria-live="polite">${chosen == null ? "" : describe(branch, chosen)}</p>
  </section>`;
}

export function tokenFacts(branch, i) {
  const id = branch.token_ids[i];
  const piece = branch.pieces[id];
  const [, , kind, role, turn, version, , why] = branch.spans[branch.span[i]] ?? [];
  const logprob = branch.rollout_logprobs[i];
  const trainer = branch.trainer_logprobs?.[i];
  const name = KINDS[branch.kind[i]];
  const rows = [["position", i], ["id", id]];
  if (piece) rows.push(["bytes", html`<code>${piece[1].replace(/(..)(?=.)/g, "$1 ")}</code>`]);
  rows.push(["kind", KIND_WORDS[name]], ["role, turn", `${role ?? "–"}, ${(turn ?? 0) + 1}`]);
  if (logprob != null) rows.push(["log-probability", fixed(logprob, 6)], ["probability", compact(Math.exp(logprob))]);
  if (version != null) rows.push(["policy version", version]);
  if (branch.entropy?.[i] != null) rows.push(["entropy", `${fixed(branch.entropy[i], 4)} nats`]);
  if (trainer != null && logprob != null) {
    rows.push(["trainer’s log-probability", fixed(trainer, 6)], ["δ", trainer === logprob ? "0, equal bits" : signed(trainer - logprob, 6)]);
    rows.push(["ratio", fixed(Math.exp(trainer - logprob), 5)]);
  }
  if (kind === "sampled" && branch.advantage != null) rows.push(["advantage", signed(branch.advantage)]);
  rows.push([kind === "sampled" ? "trained" : "reason", kind === "sampled" ? (name === "sampled" ? "yes" : `no: ${reason(why)}`) : reason(why)]);
  return { quoted: piece ? JSON.stringify(piece[0]) : String(id), rows };
}

// One sentence for screen readers.
export function describe(branch, i) {
  const id = branch.token_ids[i];
  const piece = branch.pieces[id];
  const logprob = branch.rollout_logprobs[i];
  const word = KINDS[branch.kind[i]];
  return `token ${i}, ${piece ? JSON.stringify(piece[0]) : ""} id ${id}, ${word}${logprob == null ? "" : `, log-probability ${logprob.toFixed(3)}`}`;
}
