// Preact bound to htm, number formats, and a value that components can watch.
import { h } from "./vendor/preact.js";
import htm from "./vendor/htm.js";
import { useEffect, useState } from "./vendor/hooks.js";

export const html = htm.bind(h);

const whole = new Intl.NumberFormat("en");
export const count = (n) => (n == null ? "–" : whole.format(n));
export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;
export const fixed = (x, digits = 3) => (x == null || Number.isNaN(x) ? "–" : x.toFixed(digits).replace("-", "−"));
export const signed = (x, digits = 3) => (x == null ? "–" : (x > 0 ? "+" : "") + fixed(x, digits));
export const compact = (x) =>
  x == null ? "–" : x === 0 ? "0" : (Math.abs(x) >= 0.001 && Math.abs(x) < 1e5 ? String(Number(x.toPrecision(4))) : x.toExponential(2)).replace(/-/g, "−");
export const percent = (part, all) => {
  if (!all) return "–";
  if (part === all) return "100.00%";
  return `${(Math.floor((10000 * part) / all) / 100).toFixed(2)}%`; // never rounded up to 100
};
export const versions = (v) => (v == null || v.length === 0 ? "–" : v[0] === v.at(-1) ? `v${v[0]}` : `v${v[0]}–${v.at(-1)}`);
export const short = (id) => (id.length > 14 ? `${id.slice(0, 8)}…${id.slice(-4)}` : id);
export const ago = (seconds) => {
  if (seconds == null) return "–";
  const age = Date.now() / 1000 - seconds;
  if (age < 90) return `${Math.max(0, Math.round(age))} s ago`;
  if (age < 5400) return `${Math.round(age / 60)} min ago`;
  if (age < 129600) return `${Math.round(age / 3600)} h ago`;
  return `${Math.round(age / 86400)} d ago`;
};

// Reasons are codes of the record; spaces read better than underscores.
export const reason = (code) => (code == null ? "" : String(code).replaceAll("_", " "));

export function createValue(initial) {
  let current = initial;
  const watchers = new Set();
  return {
    get: () => current,
    set(next) {
      if (next === current) return;
      current = next;
      for (const watcher of watchers) watcher(next);
    },
    watch(watcher) {
      watchers.add(watcher);
      return () => watchers.delete(watcher);
    },
  };
}

export function useValue(value) {
  const [current, set] = useState(value.get());
  useEffect(() => {
    set(value.get());
    return value.watch(set);
  }, [value]);
  return current;
}

// Rewards from low to high, as one of five classes; `low` and `high` are those of the list.
export const rewardClass = (reward, low, high) => (reward == null || high <= low ? "" : `r${Math.min(4, Math.floor((5 * (reward - low)) / (high - low)))}`);

export function Notice({ children, kind = "info" }) {
  return html`<p class=${`notice ${kind}`} role=${kind === "error" ? "alert" : "status"}>${children}</p>`;
}

export function Facts({ items }) {
  return html`<dl class="facts">${items.map(
    ([label, value, title]) => html`<div key=${label} title=${title}><dt>${label}</dt><dd>${value}</dd></div>`,
  )}</dl>`;
}

export function Coverage({ sampled, trained }) {
  if (!sampled) return html`<span class="num">–</span>`;
  const share = trained / sampled;
  const full = trained === sampled;
  return html`<span class=${full ? "coverage full" : "coverage"}>
    <span class="bar" aria-hidden="true"><span style=${{ width: `${100 * share}%` }}></span></span>
    <span class="num">${percent(trained, sampled)}</span>
  </span>`;
}
