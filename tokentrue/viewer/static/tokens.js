// The token view: a branch as tokens beside the messages they came from. Only the rows in sight are in the document.
import { h } from "./vendor/preact.js";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
import { CLASSES, KINDS, codes, shown } from "./colours.js";
import { ask } from "./api.js";
import { PICTURE_ROWS, layOut, rowOf } from "./layout.js";
import { Minimap } from "./minimap.js";
import { count, html, plural, reason } from "./ui.js";

export const ROW = 20;
const OVERSCAN = 3;
const STEP = 2; // rows per re-render while scrolling
const MESSAGE_SHARE = 0.36;
const MESSAGE_CELL = 0.93; // messages are in proportional type
const PADDING = 28;

export function Tokens({ branch, colouring, hovered, active, reveal }) {
  const scroller = useRef();
  const size = useSize(scroller);
  const [first, setFirst] = useState(0);
  const rows = useMemo(() => {
    if (!size.width) return null;
    const messages = branch.blocks.some((block) => block.message);
    const messageWidth = messages ? Math.floor(size.width * MESSAGE_SHARE) : 0;
    const laid = layOut(branch, Math.floor((size.width - messageWidth - PADDING) / size.cell), Math.floor((messageWidth - PADDING) / (size.cell * MESSAGE_CELL)));
    return { ...laid, messageWidth };
  }, [branch, size.width, size.cell]);
  const colours = useMemo(() => codes(colouring, branch), [branch, colouring]);
  const current = useActive(active, scroller, rows, reveal);
  const pictures = usePictures(branch);

  const onScroll = () => setFirst(Math.floor(scroller.current.scrollTop / ROW / STEP) * STEP);
  const visible = Math.ceil((size.height || 600) / ROW);
  const held = visible + STEP + 2 * OVERSCAN; // rows in the document; a row that leaves lends its elements to one that comes
  const start = Math.max(0, first - OVERSCAN);
  const end = rows ? Math.min(rows.length, start + held) : 0;
  const lines = [];
  for (let row = start; row < end; row++) {
    const slot = row % held;
    lines.push(rows.from[row] < 0 ? head(branch, rows, row, slot) : line(branch, rows, row, slot, colours, current, pictures));
  }

  const token = (event) => event.target.closest?.("[data-i]")?.dataset.i;
  const onMove = (event) => {
    const at = token(event);
    if (at !== undefined) hovered.set(Number(at));
  };
  const onClick = (event) => {
    const at = token(event);
    if (at !== undefined) active.set(Number(at));
  };
  return html`<div class="token-area">
    <div class="scroller" ref=${scroller} tabindex="0" role="grid" aria-label="Tokens of this branch" aria-rowcount=${rows?.length ?? -1}
      aria-activedescendant=${current == null ? undefined : `t${current}`} onScroll=${onScroll} onMouseMove=${onMove} onMouseLeave=${() => hovered.set(null)}
      onClick=${onClick} onKeyDown=${(event) => rows && onKey(event, branch, rows, active, hovered, scroller.current)}>
      <div class="spacer" role="presentation" style=${{ height: `${(rows?.length ?? 0) * ROW}px` }}>
        <div role="presentation" class="window" style=${{ transform: `translateY(${start * ROW}px)`, "--message": `${rows?.messageWidth ?? 0}px` }}>${lines}</div>
      </div>
    </div>
    <${Minimap} rows=${rows} branch=${branch} colours=${colours} scroller=${scroller} height=${size.height} />
  </div>`;
}

function head(branch, rows, row, slot) {
  const block = branch.blocks[rows.block[row]];
  const sampled = block.kind === "sampled";
  const span = branch.spans[branch.span[block.body]] ?? [];
  const extras = [];
  const [oldest, newest] = [branch.version[block.body], branch.version[block.end - 1]];
  if (sampled && oldest >= 0) extras.push(oldest === newest ? `v${oldest}` : `v${oldest}–${newest}`);
  if (sampled && !span[6]) extras.push(`not trained: ${reason(span[7])}`);
  return html`<div key=${`h${slot}`} class=${`row head ${sampled ? "is-sampled" : ""}`} role="row" aria-rowindex=${row + 1}>
    <span role="gridcell"><b class="role">${block.role}</b> <span class="soft">turn ${block.turn + 1}</span>
    ${extras.map((text) => html` <span class="badge">${text}</span>`)}</span>
    <span role="gridcell" class="soft num">${count(block.start)}–${count(block.end)} · ${plural(block.end - block.body, "token")}</span>
  </div>`;
}

function line(branch, rows, row, slot, colours, current, pictures) {
  const { token_ids: ids, kind, pieces } = branch;
  const isPicture = rows.picture[row] >= 0;
  const spans = isPicture ? [picture(branch, rows.picture[row], current, pictures)] : [];
  for (let i = rows.from[row]; i < rows.to[row] && !isPicture; i++) {
    const style = `t ${KINDS[kind[i]]} ${CLASSES[colours[i]]}${i === current ? " active" : ""}`;
    spans.push(h("span", { role: "gridcell", id: i === current ? `t${i}` : undefined, "data-i": i, class: style }, shown(pieces, ids[i])));
  }
  const text = rows.message[row] < 0 ? null : rows.texts[rows.block[row]][rows.message[row]];
  return html`<div key=${slot} class=${`row ${branch.blocks[rows.block[row]].kind === "sampled" ? "is-sampled" : ""}`} role="row" aria-rowindex=${row + 1}>
    <span class=${`message ${text ? text[1] : ""}`} role="gridcell">${text ? text[0] : ""}</span><span class="line" role="presentation">${spans}</span>
  </div>`;
}

// One line of an image's block: its name and count, or a slice of the picture.
function picture(branch, place, current, pictures) {
  const [start, length, sha256, grid] = branch.images[Math.floor(place / PICTURE_ROWS)];
  const row = place % PICTURE_ROWS;
  const url = pictures[sha256];
  if (row) {
    const style = url && { backgroundImage: `url("${url}")`, backgroundPosition: `0 ${(1 - row) * ROW}px`, backgroundSize: `auto ${(PICTURE_ROWS - 1) * ROW}px` };
    return html`<span class="picture" role="gridcell" aria-label=${row === 1 ? `picture ${sha256.slice(0, 12)}` : undefined} style=${style}></span>`;
  }
  const isActive = current != null && current >= start && current < start + length;
  const missing = url === null ? " · its file is not here" : "";
  return html`<span class=${`t given image${isActive ? " active" : ""}`} role="gridcell" id=${isActive ? `t${current}` : undefined} data-i=${start} title=${sha256}
    >image ${sha256.slice(0, 12)} · ${plural(length, "token")} · grid ${grid.join("×")}${missing}</span>`;
}

// Data URLs by hash; null for a file that the source does not have.
function usePictures(branch) {
  const [found, set] = useState({});
  useEffect(() => {
    let stopped = false;
    const load = async () => {
      for (const name of new Set(branch.images.map((image) => image[2]))) {
        const url = await ask("image", branch.session_id, name).then((answer) => answer.url, () => null);
        if (stopped) return;
        set((before) => ({ ...before, [name]: url }));
      }
    };
    load();
    return () => { stopped = true; };
  }, [branch]);
  return found;
}

function useSize(element) {
  const [size, set] = useState({ width: 0, height: 0, cell: 7.5 });
  useLayoutEffect(() => {
    const measure = () => {
      const probe = document.createElement("span");
      probe.className = "t";
      probe.textContent = "0".repeat(100);
      element.current.append(probe);
      const cell = probe.getBoundingClientRect().width / 100;
      probe.remove();
      set({ width: element.current.clientWidth, height: element.current.clientHeight, cell });
    };
    const watcher = new ResizeObserver(measure);
    watcher.observe(element.current);
    measure();
    return () => watcher.disconnect();
  }, []);
  return size;
}

// Follows the active token: scrolls it into sight when the keyboard or another view moves it.
function useActive(active, scroller, rows, reveal) {
  const [current, set] = useState(active.get());
  useEffect(() => {
    set(active.get());
    return active.watch(set);
  }, [active]);
  useEffect(() => {
    if (rows && current != null) show(rowOf(rows, current), scroller.current, reveal.current ?? "nearest");
    reveal.current = null;
  }, [current, rows]);
  return current;
}

function show(row, scroller, how) {
  const top = row * ROW;
  if (how === "top") scroller.scrollTop = Math.max(0, top - 2 * ROW);
  else if (top < scroller.scrollTop + ROW) scroller.scrollTop = Math.max(0, top - 3 * ROW);
  else if (top + 2 * ROW > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = top - scroller.clientHeight + 4 * ROW;
}

function onKey(event, branch, rows, active, hovered, scroller) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const last = branch.token_ids.length - 1;
  const at = active.get() ?? firstInSight(rows, scroller);
  const page = Math.max(1, Math.floor(scroller.clientHeight / ROW) - 2);
  const moves = {
    ArrowRight: () => at + 1, ArrowLeft: () => at - 1, ArrowDown: () => vertical(rows, at, 1), ArrowUp: () => vertical(rows, at, -1),
    PageDown: () => vertical(rows, at, page), PageUp: () => vertical(rows, at, -page), Home: () => 0, End: () => last,
    n: () => branch.blocks.find((block) => block.kind === "sampled" && block.body > at)?.body ?? at,
    p: () => branch.blocks.findLast((block) => block.kind === "sampled" && block.body < at)?.body ?? at,
  };
  if (!moves[event.key]) return;
  event.preventDefault();
  hovered.set(null); // the inspector follows the keyboard until the pointer moves
  active.set(Math.min(last, Math.max(0, moves[event.key]())));
}

function firstInSight(rows, scroller) {
  let row = Math.ceil(scroller.scrollTop / ROW);
  while (row < rows.length - 1 && rows.to[row] <= rows.from[row]) row++;
  return Math.max(0, rows.from[row]);
}

// The token above or below, at about the same place in its row.
function vertical(rows, at, by) {
  const row = rowOf(rows, at);
  const share = (at - rows.from[row]) / Math.max(1, rows.to[row] - rows.from[row]);
  const step = Math.sign(by);
  let target = row;
  for (let left = Math.abs(by); left > 0; left--) {
    let next = target + step;
    while (next > 0 && next < rows.length - 1 && !(rows.to[next] > rows.from[next] && rows.from[next] >= 0)) next += step;
    if (next < 0 || next >= rows.length || rows.from[next] < 0) break;
    target = next;
  }
  return rows.from[target] + Math.floor(share * (rows.to[target] - rows.from[target]));
}

