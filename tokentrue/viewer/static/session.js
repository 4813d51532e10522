// One session: its tree, a branch as tokens, and what would have broken.
import { useEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
import { useAnswer, useAnswerAt } from "./api.js";
import { Breaks } from "./breaks.js";
import { COLOURINGS, KIND_WORDS, prepare } from "./colours.js";
import { Inspector } from "./inspector.js";
import { Tokens } from "./tokens.js";
import { Tree } from "./tree.js";
import { Coverage, Notice, ago, count, createValue, fixed, html, plural, reason, short, signed, versions } from "./ui.js";

export function Session({ live, id, sampleId, tab, go }) {
  const open = useRef(true);
  const { value, error } = useAnswer(live && open.current, "session", id);
  if (value) open.current = value.session.state !== "ended";
  const heads = value?.branches ?? [];
  const head = heads.find((one) => one.sample_id === sampleId) ?? heads[0];
  const active = useMemo(() => createValue(null), [id]);
  const cursor = useMemo(() => createValue(0), [id]); // the turn of the token that is looked at
  const reveal = useRef(null);
  if (error && !value) return html`<${Notice} kind="error">${error}<//>`;
  if (!value) return html`<${Notice}>Loading session ${short(id)}…<//>`;
  const choose = (sample) => go("session", id, sample.sample_id, tab);
  const select = (node, turn) => {
    const path = heads.find((one) => pathOf(value.nodes, one.leaf).includes(node.id));
    if (!path) return;
    if (path.sample_id !== head?.sample_id) choose(path);
    active.set(-1 - turn); // resolved by the token view, which knows the blocks
  };
  return html`<div class="session">
    <${Header} session=${value.session} head=${head} go=${go} metadata=${value.metadata} />
    <nav class="tree-panel" aria-label="Turns of this session">
      ${heads.length > 1 && html`<label class="field">Branch <select value=${head.sample_id} onChange=${(e) => choose(heads.find((one) => one.sample_id === e.target.value))}>
        ${heads.map((one, i) => html`<option key=${one.sample_id} value=${one.sample_id}>${i + 1} of ${heads.length}: ${plural(one.turns, "turn")}${one.abandoned ? `, ${reason(one.abandoned)}` : ""}</option>`)}
      </select></label>`}
      <${Tree} nodes=${value.nodes} path=${head ? pathOf(value.nodes, head.leaf) : []} cursor=${cursor} onSelect=${select} />
    </nav>
    ${head ? html`<${BranchView} key=${head.sample_id} id=${id} head=${head} tab=${tab} go=${go} active=${active} reveal=${reveal} cursor=${cursor} nodes=${value.nodes} />`
           : html`<${Notice}>No turn has been recorded yet.<//>`}
  </div>`;
}

function pathOf(nodes, leaf) {
  const parents = new Map(nodes.map((node) => [node.id, node.parent]));
  const path = [];
  for (let node = leaf; node != null && parents.has(node); node = parents.get(node)) path.push(node);
  return path.reverse();
}

function Header({ session: s, head, go, metadata }) {
  const extra = Object.entries(metadata ?? {}).filter(([, value]) => typeof value !== "object").slice(0, 4);
  return html`<section class="session-head" aria-label="Session">
    <h1 title=${s.session_id}>${short(s.session_id)}</h1>
    <dl class="facts inline">
      ${s.group != null && html`<div><dt>group</dt><dd><a href="#" onClick=${(e) => { e.preventDefault(); go("group", s.group); }}>${s.group}</a></dd></div>`}
      <div><dt>state</dt><dd>${s.state === "open" ? html`<span class="dot" aria-hidden="true"></span>open` : s.state}</dd></div>
      <div><dt>reward</dt><dd class="num">${fixed(head?.reward ?? s.reward)}</dd></div>
      ${head?.advantage != null && html`<div><dt>advantage</dt><dd class="num">${signed(head.advantage)}</dd></div>`}
      <div><dt>coverage</dt><dd><${Coverage} sampled=${s.sampled} trained=${s.trained} /></dd></div>
      <div><dt>sampled</dt><dd class="num">${count(s.sampled)}</dd></div>
      <div><dt>turns</dt><dd class="num">${count(s.turns)}</dd></div>
      <div><dt>forks</dt><dd class="num">${count(s.forks)}</dd></div>
      <div><dt>policy</dt><dd class="num">${versions(s.versions)}</dd></div>
      ${s.created != null && html`<div><dt>created</dt><dd>${ago(s.created)}</dd></div>`}
      ${extra.map(([name, value]) => html`<div key=${name} class="extra"><dt>${name}</dt><dd>${String(value)}</dd></div>`)}
      ${Object.entries(s.untrained).map(([why, tokens]) => html`<div key=${why}><dt>not trained</dt><dd>${count(tokens)} ${reason(why)}</dd></div>`)}
    </dl>
  </section>`;
}

function BranchView({ id, head, tab, go, active, reveal, cursor, nodes }) {
  // Its tokens never change, and a turn that follows makes another branch: it is asked for again only when its reward or advantage changed.
  const { value, error } = useAnswerAt(JSON.stringify(head), false, "branch", id, head.sample_id);
  const branch = useMemo(() => value && prepare(value), [value]);
  const [wanted, setColouring] = useState(null);
  const hovered = useMemo(() => createValue(null), [head.sample_id]);
  // δ is what one looks for where the trainer's side is there.
  const preferred = wanted ?? COLOURINGS.find((one) => one.id === (value?.trainer_logprobs ? "delta" : "logprob"));
  const chosen = branch && preferred.has(branch) ? preferred : COLOURINGS[0];
  const index = useMemo(() => createValue(active.get() >= 0 ? active.get() : null), [head.sample_id]);
  useEffect(() => {
    const follow = (wanted) => {
      if (wanted == null || wanted >= 0 || !branch) return;
      const block = branch.blocks.find((one) => one.turn === -1 - wanted && one.kind === "sampled");
      if (block) {
        reveal.current = "top";
        index.set(block.body);
        active.set(null);
      }
    };
    follow(active.get());
    return active.watch(follow);
  }, [branch, active]);
  useEffect(() => {
    const follow = (i) => branch && i != null && branch.span[i] !== undefined && cursor.set(branch.spans[branch.span[i]]?.[4] ?? 0);
    follow(index.get());
    return index.watch(follow);
  }, [branch, index]);
  useEffect(() => {
    const onKey = (event) => {
      if (event.target.matches?.("input,select,textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
      const named = COLOURINGS[Number(event.key) - 1];
      if (named && branch && named.has(branch)) setColouring(named);
    };
    document.addEventListener("keydown", onKey);
    return () => document.removeEventListener("keydown", onKey);
  }, [branch]);
  const tabs = html`<div class="tabs" role="tablist" aria-label="View">
    ${[["tokens", "Tokens"], ["breaks", "What would have broken"]].map(
      ([name, label]) => html`<button key=${name} role="tab" id=${`tab-${name}`} aria-selected=${tab === name} onClick=${() => go("session", id, head.sample_id, name)}>${label}</button>`)}
  </div>`;
  if (tab === "breaks") {
    return html`<main class="branch wide">${tabs}<${Breaks} id=${id} head=${head} show=${(i) => { reveal.current = "top"; index.set(i); go("session", id, head.sample_id, "tokens"); }} /></main>`;
  }
  return html`<main class="branch">
    <div class="toolbar">${tabs}
      ${branch && html`<${Colouring} branch=${branch} chosen=${chosen} onChoose=${setColouring} />`}</div>
    ${error && !branch ? html`<${Notice} kind="error">${error}<//>` : !branch ? html`<${Notice}>Loading tokens…<//>`
      : html`<${Tokens} branch=${branch} colouring=${chosen} hovered=${hovered} active=${index} reveal=${reveal} />`}
  </main>
  ${branch && html`<aside class="side" tabindex="0" aria-label="Token and turns"><${Inspector} branch=${branch} hovered=${hovered} active=${index} /><${Legend} branch=${branch} colouring=${chosen} /><${Turns} nodes=${nodes} path=${pathOf(nodes, head.leaf)} /><${Certificate} branch=${branch} /></aside>`}`;
}

function Colouring({ branch, chosen, onChoose }) {
  return html`<fieldset class="segments"><legend>Colour</legend>
    ${COLOURINGS.map((one, i) => html`<label key=${one.id} title=${one.has(branch) ? `key ${i + 1}` : one.missing}>
      <input type="radio" name="colouring" value=${one.id} checked=${one === chosen} disabled=${!one.has(branch)} onChange=${() => onChoose(one)} /><span>${one.label}</span></label>`)}
  </fieldset>`;
}

function Legend({ branch, colouring }) {
  const [low, high, scale] = colouring.legend(branch);
  const steps = { q: 9, d: 9, v: Math.min(8, branch.versions.length) }[scale];
  return html`<section class="legend" aria-label="Legend"><h2>Legend</h2>
    <p><span class="scale" aria-hidden="true">${Array.from({ length: steps }, (_, i) => html`<i key=${i} class=${`${scale}${i}`}></i>`)}</span>
      <span class="ends"><span>${low}</span><span>${high}</span></span></p>
    <ul class="plain">${Object.entries(KIND_WORDS).map(([name, words]) => html`<li key=${name}><span class=${`t ${name} q3`}>abc</span> ${words}</li>`)}</ul>
  </section>`;
}

// Tokens of each turn of the branch, and the seconds since the turn before, where the record has its times.
function Turns({ nodes, path }) {
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const turns = path.map((id) => byId.get(id)).filter(Boolean);
  const most = Math.max(1, ...turns.map((node) => node.given_tokens + node.sampled_tokens));
  return html`<section aria-label="Turns"><h2>Tokens and time by turn</h2><table class="list turns"><thead><tr><th scope="col">turn</th><th scope="col">given, sampled</th><th scope="col" class="num">seconds</th></tr></thead>
    <tbody>${turns.map((node, i) => html`<tr key=${node.id}><td>${i + 1}</td>
      <td title=${`${count(node.given_tokens)} given, ${count(node.sampled_tokens)} sampled`}><span class="stack-bar" aria-hidden="true"><i style=${{ width: `${(100 * node.given_tokens) / most}%` }}></i><b style=${{ width: `${(100 * node.sampled_tokens) / most}%` }}></b></span><span class="sr-only">${node.given_tokens} and ${node.sampled_tokens}</span></td>
      <td class="num">${i && node.created != null && turns[i - 1].created != null ? fixed(node.created - turns[i - 1].created, 1) : "–"}</td></tr>`)}</tbody></table></section>`;
}

function Certificate({ branch: b }) {
  const cut = (hash) => (hash ? `${hash.slice(0, 15)}…` : "–");
  return html`<section aria-label="Certificate"><h2>Certificate</h2>
    <dl class="facts stacked">${["chain", "template", "tokenizer"].map(
      (name) => html`<div key=${name} title=${b.certificate[name]}><dt>${name}</dt><dd><code>${cut(b.certificate[name])}</code></dd></div>`)}
      <div><dt>finish</dt><dd>${b.finish_reason}</dd></div>
      ${b.malformed_calls.map((one, i) => html`<div key=${i}><dt>malformed call</dt><dd>turn ${one.turn + 1}: ${reason(one.status)}</dd></div>`)}
    </dl></section>`;
}
