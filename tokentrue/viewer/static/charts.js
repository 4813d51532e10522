// uPlot in the page's own colours and type.
import uPlot from "./vendor/uplot.js";
import { useEffect, useRef } from "./vendor/hooks.js";
import { colourOf } from "./colours.js";
import { compact, html } from "./ui.js";

const SERIES = ["--chart-a", "--chart-b", "--chart-c", "--chart-d", "--chart-e", "--chart-f", "--chart-g", "--chart-h"];
const FONT = "11px system-ui, sans-serif";

// series: [{name, values, bars?, band?}], one value per x; a band fills between this series and the one after it.
export function Chart({ title, note, x, xLabel, yLabel, series, logX = false, logY = false, labels = null, yRange = null, height = 230 }) {
  const place = useRef();
  useEffect(() => {
    let plot;
    const element = place.current; // still there when a late resize is reported
    const width = () => Math.max(240, element.clientWidth);
    const build = () => {
      plot?.destroy();
      plot = new uPlot(options({ x, xLabel, yLabel, series, logX, logY, labels, yRange, height, width: width() }), [x, ...series.map((s) => clean(s.values, logY))], element);
    };
    build();
    const watcher = new ResizeObserver(() => plot.width !== width() && plot.setSize({ width: width(), height }));
    watcher.observe(element);
    document.addEventListener("themechange", build);
    return () => {
      watcher.disconnect();
      document.removeEventListener("themechange", build);
      plot.destroy();
    };
  }, [x, series, logX, logY]);
  return html`<figure class="chart"><figcaption><b>${title}</b>${note && html` <span class="soft">${note}</span>`}</figcaption>
    <div class="plot" ref=${place} role="img" aria-label=${`${title}: ${series.map((s) => s.name).join(", ")} by ${xLabel}`}></div></figure>`;
}

const clean = (values, log) => values.map((v) => (v == null || (log && v <= 0) ? null : v));

function options({ x, xLabel, yLabel, series, logX, logY, labels, yRange, height, width }) {
  const [ink, grid] = [colourOf("--soft"), colourOf("--line")];
  const axis = (label, extra = {}) => ({
    label, stroke: ink, font: FONT, labelFont: FONT, labelSize: 18, labelGap: 0, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1, size: 4 }, gap: 4, ...extra,
  });
  const shade = (name, strength = 0.16) => colourOf(name).replace("rgb(", "rgba(").replace(")", `, ${strength})`);
  const bars = series.some((s) => s.bars);
  return {
    width, height, padding: [8, 12, 0, 0], cursor: { y: false, drag: { x: false, y: false } }, legend: { live: true },
    scales: {
      x: { time: false, distr: logX ? 3 : 1, range: bars || x.length < 2 ? (u, low, high) => padded(x, low, high) : undefined },
      y: { distr: logY ? 3 : 1, range: yRange ?? (bars ? (u, low, high) => (logY ? [0.5, Math.max(2, high * 1.5)] : [Math.min(0, 1.05 * low), Math.max(0, 1.05 * high) || 1]) : undefined) },
    },
    axes: [
      axis(xLabel, labels ? { values: (u, at) => at.map((v) => labels[v] ?? ""), splits: () => x, size: 34 } : { size: 34, values: (u, at) => at.map((v) => (v == null ? "" : compact(v))) }),
      axis(yLabel, { size: 58, values: (u, at) => at.map((v) => (v == null ? "" : compact(v))) }),
    ],
    series: [
      { label: xLabel, value: (u, v) => (v == null ? "–" : (labels?.[v] ?? compact(v))) },
      ...series.map((s, i) => ({
        label: s.name, stroke: colourOf(SERIES[i % SERIES.length]), width: s.thin ? 1 : 1.75, points: { show: !bars && x.length < 40 && !s.thin, size: 5 },
        value: (u, v) => compact(v), spanGaps: false,
        ...(s.bars ? { paths: uPlot.paths.bars({ size: [0.85, 64] }), width: 0, fill: shade(SERIES[i % SERIES.length], 0.75), points: { show: false } } : {}),
      })),
    ],
    bands: series.flatMap((s, i) => (s.band ? [{ series: [i + 1, i + 2], fill: shade(SERIES[i % SERIES.length]) }] : [])),
  };
}

function padded(x, low, high) {
  const step = x.length > 1 ? (x.at(-1) - x[0]) / (x.length - 1) : 1;
  return [low - step / 2, high + step / 2];
}
