// What would have broken: recorded tokens against a render of the same conversation, difference by difference.
import { useState } from "./vendor/hooks.js";
import { useAnswer } from "./api.js";
import { shown } from "./colours.js";
import { Notice, compact, count, html, percent, plural } from "./ui.js";

const CONTEXT = 6;
const SHOWN = 200;
const LONGEST = 160; // tokens of one side of a difference

export function Breaks({ id, head, show }) {
  const { value: found, error } = useAnswer(false, "breaks", id, head.sample_id);
  const [only, setOnly] = useState(null);
  const [limit, setLimit] = useState(SHOWN);
  if (error) return html`<${Notice} kind="error">${error}<//>`;
  if (!found) return html`<${Notice}>Rendering the conversation again…<//>`;
  const chosen = only === null ? found.breaks : found.breaks.filter((one) => one[0] === only);
  return html`<div class="breaks">
    <p class="soft lead">${found.mode === "render"
      ? `The messages of this conversation${found.dropped ? ", as the client sent them back (without their reasoning)," : ""} rendered by the chat template, and the last turn encoded from its text, beside the ids that were recorded: what a message-based pipeline would have trained on.`
      : "The recorded text encoded again, beside the ids that were recorded: what a text-based pipeline would have trained on."}
      ${found.why && html` <span>(${found.why}.)</span>`}</p>
    ${found.breaks.length === 0 ? html`<${Notice} kind=${found.mode === "render" ? "good" : "info"}>${found.mode === "render"
      ? `Nothing would have broken: both give the same ${plural(found.token_ids.length, "token")}.`
      : `The text alone gives the same ${plural(found.token_ids.length, "token")}. What a render of the messages would break cannot be said: this file holds no messages. View the store: tokentrue view sqlite:PATH.`}<//>` : html`
    <dl class="headline">
      <div class="bad"><dd class="num">${count(found.lost)}<small> of ${count(found.sampled)}</small></dd><dt>sampled tokens lost or replaced (${percent(found.lost, found.sampled)})</dt></div>
      <div class="bad"><dd class="num">${count(found.unsampled)}</dd><dt>tokens in their place that the model never sampled</dt></div>
      <div><dd class="num">${count(found.displaced)}</dd><dt>sampled tokens from the first difference on: scored in a context that the model never saw</dt></div>
      <div><dd class="num">${count(found.breaks.length)}</dd><dt>differences; the first at token ${count(found.first)}</dt></div>
    </dl>
    <div class="break-columns">
    <table class="list narrow"><caption class="sr-only">Differences by name</caption><thead><tr><th scope="col">difference</th><th scope="col">times</th><th scope="col">lost</th><th scope="col">never sampled</th></tr></thead>
      <tbody>${found.names.map((row) => html`<tr key=${row.name} class=${only === row.name ? "chosen" : ""}>
        <th scope="row"><button class="link" aria-pressed=${only === row.name} onClick=${() => setOnly(only === row.name ? null : row.name)}>${row.name}</button></th>
        <td class="num">${count(row.count)}</td><td class="num">${count(row.lost)}</td><td class="num">${count(row.unsampled)}</td></tr>`)}</tbody></table>
    <${Ribbon} found=${found} />
    </div>
    <table class="list diff"><caption class="sr-only">Differences, recorded and rendered side by side</caption>
      <thead><tr><th scope="col">where</th><th scope="col">recorded</th><th scope="col">rendered again</th></tr></thead>
      <tbody>${chosen.slice(0, limit).map((one) => html`<${Difference} key=${`${one[1]}-${one[3]}`} one=${one} found=${found} show=${show} />`)}</tbody></table>
    ${chosen.length > limit && html`<p><button onClick=${() => setLimit(limit + 5 * SHOWN)}>Show more (${count(chosen.length - limit)} left)</button></p>`}`}
  </div>`;
}

// The branch from left to right; marks where it differs.
function Ribbon({ found }) {
  const n = found.token_ids.length;
  return html`<figure class="ribbon"><svg viewBox="0 0 1000 26" preserveAspectRatio="none" role="img" aria-label=${`${plural(found.breaks.length, "difference")} along ${plural(n, "token")}`}>
    <rect class="base" x="0" y="4" width="1000" height="18"></rect>
    ${runs(found.rollout_logprobs).map(([a, b]) => html`<rect key=${a} class="sampled" x=${(1000 * a) / n} y="4" width=${(1000 * (b - a)) / n} height="18"></rect>`)}
    ${found.breaks.map((one) => html`<rect key=${one[1]} class="break" x=${(1000 * one[1]) / n} y="0" width=${Math.max(2, (1000 * (one[2] - one[1])) / n)} height="26"></rect>`)}
  </svg><figcaption class="soft">the branch from first to last token: <i class="key sampled"></i> sampled, <i class="key break"></i> different</figcaption></figure>`;
}

function runs(values) {
  const found = [];
  let start = -1;
  for (let i = 0; i <= values.length; i++) {
    const on = i < values.length && values[i] != null;
    if (on && start < 0) start = i;
    if (!on && start >= 0) {
      found.push([start, i]);
      start = -1;
    }
  }
  return found;
}

function Difference({ one: [name, start, end, otherStart, otherEnd, turn, sampled], found, show }) {
  const side = (ids, from, to, kind, clickable) => {
    const tokens = [];
    const put = (i, style) => tokens.push(html`<span key=${i} class=${`t ${style}`} title=${`id ${ids[i]}${clickable && found.rollout_logprobs[i] != null ? `, log-probability ${compact(found.rollout_logprobs[i])}` : ""}`}>${shown(found.pieces, ids[i])}</span>`);
    for (let i = Math.max(0, from - CONTEXT); i < from; i++) put(i, "context");
    if (from === to) tokens.push(html`<span key="gap" class="t gap">nothing</span>`);
    const cut = Math.min(to, from + LONGEST);
    for (let i = from; i < cut; i++) put(i, kind);
    if (cut < to) tokens.push(html`<span key="cut" class="soft"> … ${count(to - cut)} more </span>`);
    for (let i = to; i < Math.min(ids.length, to + CONTEXT); i++) put(i, "context");
    return html`<td class="tokens-cell">${tokens}<span class="ids num soft">${idsOf(ids, from, to)}</span></td>`;
  };
  return html`<tr>
    <th scope="row">${name}<br /><span class="soft"><button class="link" onClick=${() => show(start)}>token ${count(start)}</button>, turn ${turn + 1}, ${sampled ? "sampled" : "given"}</span></th>
    ${side(found.token_ids, start, end, sampled ? "lost" : "changed", true)}${side(found.other_ids, otherStart, otherEnd, sampled ? "never" : "changed", false)}
  </tr>`;
}

const idsOf = (ids, from, to) => (from === to ? "" : to - from > 12 ? `${ids.slice(from, from + 12).join(" ")} …` : ids.slice(from, to).join(" "));
