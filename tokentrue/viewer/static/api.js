// The data API. In the one-file export the answers lie in the page; elsewhere they are fetched, and again while the source is live.
import { useEffect, useRef, useState } from "./vendor/hooks.js";

const POLL_MS = 2000;
const PARAMETERS = {
  index: ["offset"], session: ["session"], branch: ["session", "sample"], breaks: ["session", "sample"], group: ["group"], mismatch: [], report: [],
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
