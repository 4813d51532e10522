// The whole branch beside the scroll bar, one pixel row for some rows of tokens: where the colour is, and where one looks.
import { useEffect, useRef } from "./vendor/hooks.js";
import { CLASSES, colourOf } from "./colours.js";
import { html } from "./ui.js";

const WIDTH = 56;
const ROW = 20;

export function Minimap({ rows, branch, colours, scroller, height }) {
  const canvas = useRef();
  const frame = useRef();
  useEffect(() => {
    if (!rows || !height) return undefined;
    const paint = () => draw(canvas.current, rows, branch, colours, height);
    paint();
    document.addEventListener("themechange", paint);
    return () => document.removeEventListener("themechange", paint);
  }, [rows, branch, colours, height]);
  useEffect(() => {
    const element = scroller.current;
    const follow = () => {
      const total = Math.max(element.scrollHeight, 1);
      const mapped = Math.min(height, rows ? rows.length * 3 : height);
      frame.current.style.transform = `translateY(${(element.scrollTop / total) * mapped}px)`;
      frame.current.style.height = `${Math.max(6, (element.clientHeight / total) * mapped)}px`;
    };
    follow();
    element.addEventListener("scroll", follow, { passive: true });
    return () => element.removeEventListener("scroll", follow);
  }, [rows, height]);
  const jump = (event) => {
    if (event.buttons !== 1 || !rows) return;
    const box = canvas.current.getBoundingClientRect();
    const mapped = Math.min(height, rows.length * 3);
    const share = Math.min(1, Math.max(0, (event.clientY - box.top) / mapped));
    scroller.current.scrollTop = share * rows.length * ROW - scroller.current.clientHeight / 2;
  };
  return html`<div class="minimap" aria-hidden="true" onMouseDown=${jump} onMouseMove=${jump}>
    <canvas ref=${canvas} style=${{ width: `${WIDTH}px`, height: `${height}px` }}></canvas><div class="frame" ref=${frame}></div>
  </div>`;
}

function draw(canvas, rows, branch, colours, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = WIDTH * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const palette = CLASSES.map((name) => (name ? colourOf(`--${name}`) : null));
  const given = colourOf("--map-given");
  const masked = colourOf("--map-masked");
  const mapped = Math.min(height, rows.length * 3);
  const thick = Math.max(1, mapped / rows.length - 0.5);
  const every = Math.max(1, Math.floor(rows.length / (mapped * 2)));
  for (let row = 0; row < rows.length; row += every) {
    if (rows.from[row] < 0) continue;
    const y = (row / rows.length) * mapped;
    const size = rows.to[row] - rows.from[row];
    const step = Math.max(1, Math.ceil(size / 14));
    for (let i = rows.from[row]; i < rows.to[row]; i += step) {
      const kind = branch.kind[i];
      context.fillStyle = kind === 3 ? masked : (palette[colours[i]] ?? given);
      context.fillRect(4 + ((i - rows.from[row]) / size) * (WIDTH - 8), y, Math.max(1.5, ((WIDTH - 8) * step) / size), thick);
    }
  }
}
