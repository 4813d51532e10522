// The list of sessions: totals, filters, sorting; groups are the same list folded by task.
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { ask, isExport } from "./api.js";
import { Coverage, ago, count, fixed, html, plural, reason, short, versions } from "./ui.js";

const COLUMNS = [
  ["session_id", "session", (s) => s.session_id], ["group", "group", (s) => s.group ?? ""], ["state", "state", (s) => s.state],
  ["reward", "reward", (s) => s.reward ?? -Infinity], ["coverage", "coverage", (s) => (s.sampled ? s.trained / s.sampled : 1)],
  ["turns", "turns", (s) => s.turns], ["forks", "forks", (s) => s.forks], ["branches", "branches", (s) => s.branches], ["tokens", "tokens", (s) => s.tokens],
  ["sampled", "sampled", (s) => s.sampled], ["versions", "policy", (s) => s.versions?.[1] ?? -1], ["created", "created", (s) => s.created ?? 0],
];
const NUMBERS = new Set(["reward", "coverage", "turns", "forks", "branches", "tokens", "sampled", "versions", "created"]);
const NO_FILTER = { text: "", state: "", partial: false, forked: false, low: "", high: "" };

export function Sessions({ index, go }) {
  const [filter, setFilter] = useState(NO_FILTER);
  const [sort, setSort] = useState({ column: null, down: true });
  const [older, setOlder] = useState([]);
  const search = useRef();
  useEffect(() => {
    const onKey = (event) => {
      if (event.key === "/" && !event.target.matches("input,select")) {
        event.preventDefault();
        search.current.focus();
      }
    };
    document.addEventListener("keydown", onKey);
    return () => document.removeEventListener("keydown", onKey);
  }, []);
  const known = new Set(index.sessions.map((s) => s.session_id));
  const all = [...index.sessions, ...older.filter((s) => !known.has(s.session_id))];
  const rows = sorted(all.filter((s) => passes(s, filter)), sort);
  const states = [...new Set(all.map((s) => s.state))];
  const set = (change) => setFilter({ ...filter, ...change });
  const more = async () => setOlder([...older, ...(await ask("index", String(all.length))).sessions]);
  return html`<main class="page">
    <h1 class="sr-only">Sessions</h1>
    <${Totals} rows=${rows} />
    <form class="filters" role="search" onSubmit=${(e) => e.preventDefault()}>
      <label class="grow"><span class="sr-only">Filter by session or group</span><input ref=${search} type="search" placeholder="session or group  ( / )" value=${filter.text} onInput=${(e) => set({ text: e.target.value })} /></label>
      <label>state <select value=${filter.state} onChange=${(e) => set({ state: e.target.value })}><option value="">any</option>${states.map((s) => html`<option key=${s}>${s}</option>`)}</select></label>
      <label>reward from <input class="small" inputmode="decimal" value=${filter.low} onInput=${(e) => set({ low: e.target.value })} /></label>
      <label>to <input class="small" inputmode="decimal" value=${filter.high} onInput=${(e) => set({ high: e.target.value })} /></label>
      <label><input type="checkbox" checked=${filter.partial} onChange=${(e) => set({ partial: e.target.checked })} /> coverage below 100%</label>
      <label><input type="checkbox" checked=${filter.forked} onChange=${(e) => set({ forked: e.target.checked })} /> forked</label>
      <span class="soft" role="status">${rows.length === all.length ? plural(all.length, "session") : `${count(rows.length)} of ${plural(all.length, "session")}`}${all.length < index.total && !isExport ? `, ${count(index.total)} in all` : ""}</span>
    </form>
    <div class="scroll-x" tabindex="0" role="region" aria-label="Sessions">
    <table class="list sessions"><thead><tr>${COLUMNS.map(([id, label]) => html`<th key=${id} scope="col" class=${NUMBERS.has(id) ? "num" : ""} aria-sort=${sort.column === id ? (sort.down ? "descending" : "ascending") : undefined}>
      <button class="plain" onClick=${() => setSort({ column: id, down: sort.column === id ? !sort.down : true })}>${label}${sort.column === id ? (sort.down ? " ↓" : " ↑") : ""}</button></th>`)}</tr></thead>
      <tbody onKeyDown=${onRowKey}>${rows.map((s) => html`<${Row} key=${s.session_id} s=${s} go=${go} />`)}</tbody></table></div>
    ${rows.length === 0 && html`<p class="soft empty">${all.length ? "No session passes these filters." : "No session has been recorded yet."}</p>`}
    ${all.length < index.total && !isExport && html`<p><button onClick=${more}>Older sessions</button></p>`}
    ${index.left_out > 0 && html`<p class="soft">${plural(index.left_out, "more session")} of the source ${index.left_out === 1 ? "is" : "are"} not in this file.</p>`}
  </main>`;
}

function Row({ s, go }) {
  const open = (event) => {
    event.preventDefault();
    go("session", s.session_id);
  };
  const waiting = s.turns === 0 && s.state === "open";
  return html`<tr onClick=${open}>
    <td><a href=${`#/session/${encodeURIComponent(s.session_id)}`} onClick=${open} title=${s.session_id}>${short(s.session_id)}</a></td>
    <td>${s.group ?? html`<span class="soft">–</span>`}</td>
    <td>${s.state === "open" ? html`<span class="dot" aria-hidden="true"></span>` : ""}${s.state}${s.in_flight ? html` <span class="badge">${s.in_flight} in flight</span>` : ""}</td>
    <td class="num">${fixed(s.reward)}</td>
    <td class="num" title=${Object.entries(s.untrained).map(([why, n]) => `${n} ${reason(why)}`).join("\n")}>${waiting ? "–" : html`<${Coverage} sampled=${s.sampled} trained=${s.trained} />`}</td>
    <td class="num">${count(s.turns)}</td><td class="num">${s.forks ? count(s.forks) : html`<span class="soft">0</span>`}</td><td class="num">${count(s.branches)}</td>
    <td class="num">${count(s.tokens)}</td><td class="num">${count(s.sampled)}</td><td class="num">${versions(s.versions)}</td><td class="num soft">${ago(s.created)}</td>
  </tr>`;
}

export function Totals({ rows }) {
  const sum = (name) => rows.reduce((total, s) => total + s[name], 0);
  const scored = rows.filter((s) => s.reward != null);
  const [sampled, trained] = [sum("sampled"), sum("trained")];
  return html`<dl class="totals">
    <div><dt>sessions</dt><dd class="num">${count(rows.length)}</dd></div>
    <div><dt>sampled tokens</dt><dd class="num">${count(sampled)}</dd></div>
    <div><dt>coverage</dt><dd><${Coverage} sampled=${sampled} trained=${trained} /></dd></div>
    <div><dt>mean reward</dt><dd class="num">${scored.length ? fixed(scored.reduce((t, s) => t + s.reward, 0) / scored.length) : "–"}</dd></div>
    <div><dt>forks</dt><dd class="num">${count(sum("forks"))}</dd></div>
    <div><dt>open</dt><dd class="num">${count(rows.filter((s) => s.state === "open").length)}</dd></div>
  </dl>`;
}

function passes(s, f) {
  if (f.text && !`${s.session_id} ${s.group ?? ""}`.toLowerCase().includes(f.text.toLowerCase())) return false;
  if (f.state && s.state !== f.state) return false;
  if (f.partial && s.trained === s.sampled) return false;
  if (f.forked && s.forks === 0) return false;
  if (f.low !== "" && !(s.reward != null && s.reward >= Number(f.low))) return false;
  return f.high === "" || (s.reward != null && s.reward <= Number(f.high));
}

function sorted(rows, { column, down }) {
  if (column === null) return rows;
  const key = COLUMNS.find(([id]) => id === column)[2];
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
