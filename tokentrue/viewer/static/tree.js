// The session's tree: turns in order, indented only where the conversation forks.
import { useEffect, useRef } from "./vendor/hooks.js";
import { html, plural, reason, useValue } from "./ui.js";

export function Tree({ nodes, path, cursor, onSelect }) {
  const place = useRef();
  const at = path[useValue(cursor)];
  useEffect(() => place.current?.querySelector(".at")?.scrollIntoView?.({ block: "nearest" }), [at]);
  const children = new Map();
  for (const node of nodes) children.set(node.parent, [...(children.get(node.parent) ?? []), node]);
  const on = new Set(path);
  const rows = [];
  const walk = (node, depth, turn) => {
    for (let at = node; at; ) {
      rows.push({ node: at, depth, turn });
      const next = children.get(at.id) ?? [];
      turn += 1;
      if (next.length > 1) {
        next.forEach((child) => walk(child, depth + 1, turn));
        return;
      }
      at = next[0];
    }
  };
  const roots = children.get(null) ?? [];
  roots.forEach((root) => walk(root, roots.length > 1 ? 1 : 0, 0));
  const seconds = new Map(nodes.map((node) => [node.id, node.created]));
  return html`<ol class="tree" ref=${place}>${rows.map(({ node, depth, turn }) => html`<li key=${node.id} style=${{ "--depth": depth }}>
    <button class=${`${on.has(node.id) ? "on" : ""} ${node.id === at ? "at" : ""}`} aria-current=${on.has(node.id) ? "true" : undefined} onClick=${() => onSelect(node, turn)} title=${title(node)}>
      <span class="turn num">${turn + 1}</span>
      <span class="sizes num">${node.given_tokens} + <b>${node.sampled_tokens}</b></span>
      ${node.created != null && seconds.get(node.parent) != null && html`<span class="soft num" title="seconds from the end of the turn before to the end of this one: agent, tools, queue and engine">${took(node.created - seconds.get(node.parent))}</span>`}
      <span class="marks">${marks(node).map((mark) => html`<span key=${mark[0]} class=${`badge ${mark[1]}`}>${mark[0]}</span>`)}</span>
    </button></li>`)}</ol>
    <p class="soft note">given + <b>sampled</b> tokens${nodes.some((node) => node.created != null) ? ", seconds since the turn before" : ""}; ${plural(nodes.length, "turn")}</p>`;
}

const took = (s) => (s < 10 ? `${s.toFixed(1)} s` : s < 600 ? `${Math.round(s)} s` : `${Math.round(s / 60)} min`);

function marks(node) {
  const found = [];
  if (node.why && node.why !== "first") found.push([reason(node.why), "warn"]);
  if (node.projection && !["root", "exact"].includes(node.projection)) found.push([reason(node.projection).replaceAll("+", ", "), ""]);
  if (node.finish && node.finish !== "stop") found.push([node.finish, "warn"]);
  if (node.outcome === "disconnected") found.push(["disconnected", "warn"]);
  for (const status of node.malformed_calls ?? []) found.push([`call: ${reason(status)}`, "warn"]);
  if (node.untrained) found.push([`not trained: ${reason(node.untrained)}`, "bad"]);
  return found;
}

const title = (node) => [node.detail, node.policy_versions?.length ? `policy version ${[...new Set(node.policy_versions)].join(", ")}` : "", node.id].filter(Boolean).join("\n");
