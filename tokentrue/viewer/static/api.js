// The data API. In the one-file export the answers lie in the page; elsewhere they are fetched, and again while the source is live.
import { useEffect, useRef, useState } from "./vendor/hooks.js";

const POLL_MS = 2000;
const PARAMETERS = {
  index: ["offset"], search: ["text", "offset"], session: ["session"], branch: ["session", "sample"], breaks: ["session", "sample"], group: ["group"], image: ["session", "sha256"], mismatch: [], report: [],
};
const held = document.getElementById("answers");
const answers = held ? JSON.parse(held.textContent) : null;
export const isExport = answers !== null;

export async function ask(view, ...args) {
  if (answers) {
    const found = answers[JSON.stringify([view, ...args])];
    if (found === undefined) throw new Error("this is not part of the exported file");
    return found;
  }
  const query = new URLSearchParams(PARAMETERS[view].map((name, i) => [name, args[i]]));
  const response = await fetch(`data/${view}?${query}`);
  const body = await response.json();
  if (!response.ok) throw new Error(body.error ?? body.detail ?? `HTTP ${response.status}`);
  return body;
}

// `live` asks again every two seconds; an answer that has not changed re-renders nothing.
export const useAnswer = (live, view, ...args) => useAnswerAt("", live, view, ...args);

// Asks again, too, whenever `version` changes.
export function useAnswerAt(version, live, view, ...args) {
  const key = JSON.stringify([view, ...args]);
  const [state, setState] = useState({ key, value: null, error: null });
  const last = useRef("");
  useEffect(() => {
    let stopped = false;
    let timer;
    last.current = "";
    const run = async () => {
      try {
        const value = await ask(view, ...args);
        const text = isExport ? key : JSON.stringify(value);
        if (!stopped && text !== last.current) {
          last.current = text;
          setState({ key, value, error: null });
        }
      } catch (error) {
        if (!stopped) setState((before) => ({ key, value: before.key === key ? before.value : null, error: error.message }));
      }
      if (!stopped && live && !isExport) timer = setTimeout(run, POLL_MS);
    };
    run();
    return () => {
      stopped = true;
      clearTimeout(timer);
    };
  }, [key, live, version]);
  return state.key === key ? state : { key, value: null, error: null };
}

// Every session row of the source: the first page as it is polled, the others once, and again while their summaries are still being read.
export function useAllRows(index) {
  const [others, set] = useState([]);
  useEffect(() => {
    let stopped = false;
    const load = async () => {
      const rows = [];
      while (!stopped && !isExport && index.sessions.length + rows.length < index.total) {
        const page = (await ask("index", String(index.sessions.length + rows.length))).sessions;
        if (!page.length) break;
        rows.push(...page);
        set([...rows]);
      }
      if (!stopped && rows.some(isUnread)) setTimeout(load, POLL_MS);
    };
    load().catch(() => {});
    return () => { stopped = true; };
  }, [index.total]);
  const known = new Set(index.sessions.map((s) => s.session_id));
  return [...index.sessions, ...others.filter((s) => !known.has(s.session_id))];
}

export const isUnread = (s) => s.turns === 0 && s.state !== "open";

// The first difference of a session's first branch, asked for one session after the other.
const firstBreaks = new Map();
let asking = Promise.resolve();
export function askFirstBreak(s) {
  const key = `${s.session_id} ${s.tokens}`;
  if (!firstBreaks.has(key)) {
    asking = asking.then(async () => {
      const head = (await ask("session", s.session_id)).branches[0];
      const found = head && (await ask("breaks", s.session_id, head.sample_id));
      return found?.breaks.length ? { sample_id: head.sample_id, name: found.breaks[0][0], lost: found.lost } : null;
    }).catch(() => null);
    firstBreaks.set(key, asking);
  }
  return firstBreaks.get(key);
}
