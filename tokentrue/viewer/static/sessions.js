// The list of sessions: totals of all of them, curves over time, filters that live in the address, sorting, search in messages.
import { useEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
import { ask, askFirstBreak, isExport, isUnread, useAllRows } from "./api.js";
import { Chart } from "./charts.js";
import { Coverage, ago, count, fixed, html, plural, reason, rewardClass, short, versions } from "./ui.js";

const COLUMNS = [
  ["session_id", "session", (s) => s.session_id], ["task", "task", (s) => s.task], ["group", "group", (s) => s.group ?? ""], ["state", "state", (s) => s.state],
  ["reward", "reward", (s) => s.reward ?? -Infinity], ["coverage", "coverage", (s) => (s.sampled ? s.trained / s.sampled : 1)], ["first_break", "first break", (s) => s.fork ?? ""],
  ["turns", "turns", (s) => s.turns], ["forks", "forks", (s) => s.forks], ["branches", "samples", (s) => s.branches], ["tokens", "tokens", (s) => s.tokens],
  ["sampled", "sampled", (s) => s.sampled], ["versions", "policy", (s) => s.versions?.[1] ?? -1], ["created", "created", (s) => s.created ?? 0],
];
const NUMBERS = new Set(["reward", "coverage", "turns", "forks", "branches", "tokens", "sampled", "versions", "created"]);
const PAGE = 500; // rows in the document, and as many again for each click
const NO_FILTER = { text: "", state: "", partial: "", forked: "", low: "", high: "", sort: "", note: "" };

export function Sessions({ index, go, query }) {
  const [filter, setFilter] = useState({ ...NO_FILTER, ...Object.fromEntries([...query].filter(([name]) => name in NO_FILTER)) });
  const [shown, setShown] = useState(PAGE);
  const [found, setFound] = useState(null);
  const search = useRef();
  useEffect(() => {
    const onKey = (event) => {
      if (event.key === "/" && !event.target.matches("input,select,textarea")) {
        event.preventDefault();
        search.current.focus();
      }
    };
    document.addEventListener("keydown", onKey);
    return () => document.removeEventListener("keydown", onKey);
  }, []);
  const all = useAllRows(index);
  const sort = { column: filter.sort.replace(/^-/, "") || null, down: filter.sort.startsWith("-") };
  const named = new Set(found?.matches.map((m) => m.session_id)); // sessions whose messages hold the text stay in the list
  const rows = sorted(all.filter((s) => passes(s, filter, named)), sort);
  const states = [...new Set(all.map((s) => s.state))];
  const rewards = all.map((s) => s.reward).filter((r) => r != null);
  const range = [Math.min(0, ...rewards), Math.max(1, ...rewards)];
  // The address carries filters, order and note: it can be kept or sent to somebody.
  const set = (change) => {
    const next = { ...filter, ...change };
    setFilter(next);
    const given = new URLSearchParams(Object.entries(next).filter(([, value]) => value));
    history.replaceState(null, "", `#/sessions${String(given) ? `?${given}` : ""}`);
  };
  const sortBy = (id) => set({ sort: filter.sort === `-${id}` ? id : `-${id}` });
  const look = async () => {
    if (!filter.text || isExport) return;
    const matches = [];
    for (let at = 0; at != null && matches.length < 50; ) {
      const part = await ask("search", filter.text, String(at));
      matches.push(...part.matches);
      at = part.next;
      setFound({ text: filter.text, matches: [...matches], searched: part.searched, total: part.total, done: at == null || matches.length >= 50 });
    }
  };
  const unfiltered = rows.length === all.length;
  return html`<main class="page">
    <h1 class="sr-only">Sessions</h1>
    ${filter.note && html`<p class="notice note-text">${filter.note}</p>`}
    <${Totals} total=${add(rows)} of=${unfiltered ? "all sessions" : "the sessions below"} />
    <${Curves} rows=${rows} />
    <form class="filters" role="search" onSubmit=${(e) => e.preventDefault()}>
      <label class="grow"><span class="sr-only">Filter by session, group or task; Enter searches messages</span><input ref=${search} type="search" placeholder=${isExport ? "session, group or task  ( / )" : "session or group or task  ( / ); Enter searches messages"} value=${filter.text} onKeyDown=${(e) => e.key === "Enter" && look()} onInput=${(e) => { set({ text: e.target.value }); setFound(null); }} /></label>
      <label>state <select value=${filter.state} onChange=${(e) => set({ state: e.target.value })}><option value="">any</option>${states.map((s) => html`<option key=${s}>${s}</option>`)}</select></label>
      <label>reward from <input class="small" inputmode="decimal" value=${filter.low} onInput=${(e) => set({ low: e.target.value })} /></label>
      <label>to <input class="small" inputmode="decimal" value=${filter.high} onInput=${(e) => set({ high: e.target.value })} /></label>
      <label><input type="checkbox" checked=${Boolean(filter.partial)} onChange=${(e) => set({ partial: e.target.checked ? "1" : "" })} /> coverage below 100%</label>
      <label><input type="checkbox" checked=${Boolean(filter.forked)} onChange=${(e) => set({ forked: e.target.checked ? "1" : "" })} /> forked</label>
      <label>note <input placeholder="kept in the address" value=${filter.note} onInput=${(e) => set({ note: e.target.value })} /></label>
      <span class="soft" role="status">${unfiltered ? plural(all.length, "session") : `${count(rows.length)} of ${plural(all.length, "session")}`}${all.length < index.total && !isExport ? `; reading ${count(index.total)}` : ""}${rows.length > shown ? `, ${count(shown)} in the list` : ""}</span>
    </form>
    ${found && html`<${Found} found=${found} />`}
    <div class="scroll-x" tabindex="0" role="region" aria-label="Sessions">
    <table class="list sessions"><thead><tr>${COLUMNS.map(([id, label]) => html`<th key=${id} scope="col" class=${`c-${id} ${NUMBERS.has(id) ? "num" : ""}`} aria-sort=${sort.column === id ? (sort.down ? "descending" : "ascending") : undefined}>
      <button class="plain" onClick=${() => sortBy(id)}>${label}${sort.column === id ? (sort.down ? " ↓" : " ↑") : ""}</button></th>`)}</tr></thead>
      <tbody onKeyDown=${onRowKey}>${rows.slice(0, shown).map((s) => html`<${Row} key=${s.session_id} s=${s} go=${go} range=${range} breaks=${index.has_text && index.source.kind !== "gateway"} />`)}</tbody></table></div>
    ${rows.length === 0 && (all.length ? html`<p class="soft empty">No session passes these filters.</p>` : html`<${Empty} source=${index.source} />`)}
    ${rows.length > shown && html`<p><button onClick=${() => setShown(shown + PAGE)}>${sort.column ? "More" : "Older"} sessions</button></p>`}
    ${index.left_out > 0 && html`<p class="soft">${plural(index.left_out, "more session")} of the source ${index.left_out === 1 ? "is" : "are"} not in this file.</p>`}
  </main>`;
}

function Empty({ source }) {
  return html`<div class="notice empty"><p><b>No session has been recorded yet.</b> What to do next:</p>
    <ol>${source.kind === "gateway" ? html`<li>Open a session: <code>curl -X POST …/sessions -H "Authorization: Bearer $TOKENTRUE_ADMIN_KEY"</code></li><li>Give its <code>base_url</code> and <code>api_key</code> to any OpenAI, Anthropic or Google client.</li><li>This page shows the turns as they come.</li>`
      : source.kind === "store" ? html`<li>Start a gateway on this store: <code>tokentrue serve --store sqlite:${source.name}</code></li><li>Or view the store of your run: <code>tokentrue view sqlite:PATH</code>; <code>tokentrue serve</code> prints which one it uses.</li>`
      : html`<li>The file has no sample yet. Export some: <code>tokentrue samples STORE_OR_URL -o ${source.name}</code></li>`}</ol></div>`;
}

function Row({ s, go, range, breaks }) {
  const row = useRef();
  const [first, setFirst] = useState(null);
  useEffect(() => {
    if (!breaks || !s.tokens) return undefined;
    const watcher = new IntersectionObserver(([seen]) => seen.isIntersecting && (watcher.disconnect(), askFirstBreak(s).then(setFirst)));
    watcher.observe(row.current);
    return () => watcher.disconnect();
  }, [s.session_id, s.tokens, breaks]);
  const open = (event) => {
    if (event.target.closest?.("a, button")?.dataset.stay) return;
    event.preventDefault();
    go("session", s.session_id);
  };
  const waiting = s.turns === 0 && s.state === "open";
  const at = encodeURIComponent;
  return html`<tr ref=${row} onClick=${open}>
    <td><a href=${`#/session/${at(s.session_id)}`} onClick=${open} title=${s.session_id}>${short(s.session_id)}</a></td>
    <td class="c-task" title=${s.task}>${s.task || html`<span class="soft">–</span>`}</td>
    <td>${s.group ?? html`<span class="soft">–</span>`}</td>
    <td>${s.state === "open" ? html`<span class="dot" aria-hidden="true"></span>` : ""}${s.state}</td>
    <td class="num"><span class=${`reward ${rewardClass(s.reward, ...range)}`}>${fixed(s.reward)}</span></td>
    <td class="num" title=${Object.entries(s.untrained).map(([why, n]) => `${n} ${reason(why)}`).join("\n")}>${waiting ? "–" : html`<${Coverage} sampled=${s.sampled} trained=${s.trained} />`}</td>
    <td class="c-break">${first ? html`<a data-stay="1" href=${`#/session/${at(s.session_id)}/${at(first.sample_id)}/breaks`} title=${`a render of the messages would lose ${plural(first.lost, "sampled token")}`}>${first.name}</a>` : s.fork ? html`<span class="soft">fork: ${reason(s.fork)}</span>` : html`<span class="soft">–</span>`}</td>
    <td class="num">${count(s.turns)}</td><td class="num">${s.forks ? count(s.forks) : html`<span class="soft">0</span>`}</td><td class="num">${count(s.branches)}</td>
    <td class="num">${count(s.tokens)}</td><td class="num">${count(s.sampled)}</td><td class="num">${versions(s.versions)}</td><td class="num soft">${ago(s.created)}</td>
  </tr>`;
}

function Found({ found }) {
  return html`<section class="found" aria-label="Messages"><h2>${plural(found.matches.length, "message")} with “${found.text}” <span class="soft">${found.done ? "" : "… "}in ${count(found.searched)} of ${plural(found.total, "session")}, first match of each</span></h2>
    <ul class="plain">${found.matches.map((m) => html`<li key=${m.session_id}><a href=${`#/session/${encodeURIComponent(m.session_id)}/${encodeURIComponent(m.sample_id)}`}>${short(m.session_id)}</a> <span class="soft">${m.role}, turn ${m.turn + 1}</span> …${m.text}…</li>`)}</ul></section>`;
}

function add(rows) {
  const sum = (name) => rows.reduce((total, s) => total + s[name], 0);
  const scored = rows.filter((s) => s.reward != null);
  return {
    sessions: rows.length, sampled: sum("sampled"), trained: sum("trained"), forks: sum("forks"), open: rows.filter((s) => s.state === "open").length, unread: rows.filter(isUnread).length,
    reward: scored.length ? scored.reduce((t, s) => t + s.reward, 0) / scored.length : null,
  };
}

function Totals({ total, of }) {
  return html`<dl class="totals" aria-label=${`Totals of ${of}`}>
    <div><dt>sessions</dt><dd class="num">${count(total.sessions)}</dd></div>
    <div><dt>sampled tokens</dt><dd class="num">${count(total.sampled)}</dd></div>
    <div><dt>coverage</dt><dd><${Coverage} sampled=${total.sampled} trained=${total.trained} /></dd></div>
    <div><dt>mean reward</dt><dd class="num">${fixed(total.reward)}</dd></div>
    <div><dt>forks</dt><dd class="num">${count(total.forks)}</dd></div>
    <div><dt>open</dt><dd class="num">${count(total.open)}</dd></div>
    ${total.unread > 0 && html`<div><dt>still to be read</dt><dd class="num soft">${plural(total.unread, "session")}</dd></div>`}
  </dl>`;
}

// Reward and coverage from the oldest to the newest session, in up to sixty parts, once there are a few.
function Curves({ rows }) {
  const parts = [];
  const oldest = [...rows].reverse().filter((s) => !isUnread(s));
  for (let part = 0; part < Math.min(60, oldest.length); part++) {
    const [from, until] = [part, part + 1].map((n) => Math.floor((oldest.length * n) / Math.min(60, oldest.length)));
    parts.push({ until, ...add(oldest.slice(from, until)) });
  }
  const key = JSON.stringify(parts);
  const made = useMemo(() => {
    const share = (p) => (p.sampled ? p.trained / p.sampled : null);
    return [["Reward over time", "mean reward", (p) => p.reward, null], ["Coverage over time", "trained ÷ sampled", share, [Math.min(0.9, ...parts.map((p) => share(p) ?? 1)), 1.005]]].map(
      ([title, label, value, yRange]) => ({ title, xLabel: "session, oldest first", yLabel: label, x: parts.map((p) => p.until), series: [{ name: label, values: parts.map(value) }], yRange, height: 150 }));
  }, [key]);
  if (parts.length < 3) return null;
  return html`<div class="charts curves">${made.map((chart) => html`<${Chart} key=${chart.title} ...${chart} />`)}</div>`;
}

function passes(s, f, named) {
  if (f.text && !named.has(s.session_id) && !`${s.session_id} ${s.group ?? ""} ${s.task}`.toLowerCase().includes(f.text.toLowerCase())) return false;
  if (f.state && s.state !== f.state) return false;
  if (f.partial && s.trained === s.sampled) return false;
  if (f.forked && s.forks === 0) return false;
  if (f.low !== "" && !(s.reward != null && s.reward >= Number(f.low))) return false;
  return f.high === "" || (s.reward != null && s.reward <= Number(f.high));
}

function sorted(rows, { column, down }) {
  if (column === null) return rows;
  const key = COLUMNS.find(([id]) => id === column)?.[2];
  if (!key) return rows;
  const sign = down ? -1 : 1;
  return [...rows].sort((a, b) => sign * (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0));
}

// j, k and the arrows move from row to row.
function onRowKey(event) {
  const step = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const links = [...event.currentTarget.querySelectorAll("td:first-child a")];
  links[links.indexOf(document.activeElement) + step]?.focus();
}
