// The page: top bar, routes by hash, theme, help. Every view gets its data from api.js.
import { render } from "./vendor/preact.js";
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { isExport, useAnswer } from "./api.js";
import { Group, Groups } from "./groups.js";
import { Mismatch } from "./mismatch.js";
import { Report } from "./report.js";
import { Session } from "./session.js";
import { Sessions } from "./sessions.js";
import { Notice, html } from "./ui.js";

const KEYS = [
  ["/", "filter sessions"], ["j k ↑ ↓", "next and previous row of a list"], ["Enter", "open"], ["← → ↑ ↓", "move through tokens"], ["n p", "next and previous sampled turn"],
  ["Home End PgUp PgDn", "jump in the tokens"], ["1 – 5", "colouring"], ["t", "light or dark"], ["?", "this help"],
];

function parse(hash) {
  const [path, query] = hash.replace(/^#\/?/, "").split("?");
  const [view, ...rest] = path.split("/").map(decodeURIComponent);
  return { view, rest, query: new URLSearchParams(query) };
}

function go(view, ...rest) {
  location.hash = `#/${[view, ...rest.filter((part) => part != null)].map(encodeURIComponent).join("/")}`;
}

function App() {
  const [route, setRoute] = useState(parse(location.hash));
  const help = useRef();
  const [theme, setTheme] = useTheme();
  const { value: index, error } = useAnswer(true, "index", "0");
  const live = Boolean(index?.source.live);
  useEffect(() => {
    const follow = () => setRoute(parse(location.hash));
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  useEffect(() => {
    const onKey = (event) => {
      if (event.target.matches?.("input,select,textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "?") help.current.showModal();
      if (event.key === "t") setTheme();
    };
    document.addEventListener("keydown", onKey);
    return () => document.removeEventListener("keydown", onKey);
  }, [theme]);
  const view = route.view || (index?.has_report ? "report" : "sessions");
  useEffect(() => {
    document.title = `${{ session: route.rest[0], group: route.rest[0] }[view] ?? view} · ${index?.source.name ?? ""} · tokentrue`;
  }, [view, route, index]);
  const places = [["report", "Report", index?.has_report], ["sessions", "Sessions", !index?.has_report || index.sessions.length > 0], ["groups", "Groups", index?.sessions.some((s) => s.group != null)], ["mismatch", "Mismatch", index?.has_trainer || !isExport]];
  const here = { session: "sessions", group: "groups", compare: "groups" }[view] ?? view;
  return html`<a class="skip" href="#content" onClick=${(e) => { e.preventDefault(); document.getElementById("content").focus(); }}>Skip to content</a>
    <header class="top"><span class="mark">tokentrue</span>
      <nav aria-label="Views">${places.filter(([, , there]) => there).map(([id, label]) => html`<a key=${id} href=${`#/${id}`} aria-current=${here === id ? "page" : undefined}>${label}</a>`)}</nav>
      <span class="grow"></span>
      ${index && html`<span class="source soft"><span class="kind">${index.source.kind}</span> ${index.source.name}</span>`}
      ${live && html`<span class=${error ? "live lost" : index.source.active ? "live" : "soft"} role="status">${error ? "connection lost" : index.source.active ? "live" : "no change"}</span>`}
      <button class="plain" onClick=${setTheme} aria-label="Light or dark" title="Light or dark (t)">${theme === "dark" ? "☾" : "☀"}</button>
      <button class="plain" onClick=${() => help.current.showModal()} aria-label="Keyboard help" title="Keyboard help (?)">?</button>
    </header>
    <div id="content" tabindex="-1" class=${`view-${view}`}>${!index ? html`<main class="page"><h1 class="sr-only">Viewer</h1><${Notice} kind=${error ? "error" : "info"}>${error ?? "Loading…"}<//></main>` : content(view, route, index, live)}</div>
    <dialog ref=${help} aria-labelledby="help-title"><h2 id="help-title">Keyboard</h2><dl class="facts stacked">${KEYS.map(([key, text]) => html`<div key=${key}><dt><kbd>${key}</kbd></dt><dd>${text}</dd></div>`)}</dl>
      <button onClick=${() => help.current.close()}>Close</button></dialog>`;
}

function content(view, { rest: [first, second, third], query }, index, live) {
  if (view === "session" && first) return html`<${Session} key=${first} live=${live} id=${first} sampleId=${second} tab=${third === "breaks" ? "breaks" : "tokens"} go=${go} />`;
  if (view === "group" && first) return html`<${Group} live=${live} name=${first} go=${go} />`;
  if (view === "groups") return html`<${Groups} index=${index} go=${go} />`;
  if (view === "compare" && first && second) return html`<main class="page compare"><h1 class="sr-only">Two groups</h1>${[first, second].map((name) => html`<${Group} key=${name} live=${live} name=${name} go=${go} inside />`)}</main>`;
  if (view === "mismatch") return html`<${Mismatch} />`;
  if (view === "report") return html`<${Report} index=${index} />`;
  return html`<${Sessions} index=${index} go=${go} query=${query} />`;
}

function useTheme() {
  const wanted = () => {
    try {
      return localStorage.getItem("tokentrue-theme");
    } catch {
      return null; // a file opened from disk may have no storage
    }
  };
  const system = matchMedia("(prefers-color-scheme: dark)");
  const [theme, set] = useState(wanted() ?? (system.matches ? "dark" : "light"));
  useEffect(() => {
    document.documentElement.style.colorScheme = theme;
    document.dispatchEvent(new Event("themechange"));
  }, [theme]);
  useEffect(() => {
    const follow = () => wanted() === null && set(system.matches ? "dark" : "light");
    system.addEventListener("change", follow);
    return () => system.removeEventListener("change", follow);
  }, []);
  const toggle = () => {
    const next = theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("tokentrue-theme", next);
    } catch {
      // the choice lasts as long as the page
    }
    set(next);
  };
  return [theme, toggle];
}

if (isExport) document.documentElement.classList.add("export");
render(html`<${App} />`, document.getElementById("app"));
