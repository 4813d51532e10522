// The report of a command: the few numbers to read first, charts, tables.
import { useMemo } from "./vendor/hooks.js";
import { useAnswer } from "./api.js";
import { Chart } from "./charts.js";
import { MismatchPlots } from "./mismatch.js";
import { Facts, Notice, compact, html } from "./ui.js";

export function Report({ index }) {
  const { value, error } = useAnswer(false, "report");
  const charts = useMemo(() => (value?.charts ?? []).map(chartFrom), [value]);
  if (error) return html`<main class="page"><${Notice} kind="error">${error}<//></main>`;
  if (!value) return html`<main class="page"><${Notice}>Loading…<//></main>`;
  const { title, verdict, ok, facts, tables, note, highlights } = value;
  return html`<main class="page" tabindex="0"><h1>${title}</h1>
    ${verdict && html`<${Notice} kind=${ok ? "good" : "error"}>${verdict}<//>`}
    ${highlights.length > 0 && html`<dl class="headline">${highlights.map(([label, text]) => html`<div key=${label}><dd class="num">${text}</dd><dt>${label}</dt></div>`)}</dl>`}
    ${note && html`<p class="soft lead">${note}</p>`}
    <div class="charts">${charts.map((chart) => html`<${Chart} key=${chart.title} ...${chart} />`)}</div>
    ${index.has_trainer && html`<${Compared} />`}
    <${Facts} items=${facts} />
    ${tables.map((table) => html`<section key=${table.title}><h2>${table.title}</h2><div class="scroll-x" tabindex="0" role="region" aria-label=${table.title}><table class="list report">
      <thead><tr>${table.columns.map((column, i) => html`<th key=${column} scope="col" class=${isNumeric(table, i) ? "num" : ""}>${column}</th>`)}</tr></thead>
      <tbody>${table.rows.map((row, r) => html`<tr key=${r}>${row.map((cell, i) => html`<td key=${i} class=${isNumeric(table, i) ? "num" : ""}>${typeof cell === "number" ? compact(cell) : cell}</td>`)}</tr>`)}</tbody></table></div></section>`)}
  </main>`;
}

// Columns of text stay on the left; a figure may be a string ("0.52 [0.44, 0.60]", "–").
function isNumeric(table, column) {
  return column > 0 && table.rows.every((row) => typeof row[column] === "number" || /^([-+−]?[.\d]|[–-]?$)/.test(row[column] ?? ""));
}

function Compared() {
  const { value } = useAnswer(false, "mismatch");
  return value && html`<section class="stack"><h2>δ over all tokens</h2><${MismatchPlots} found=${value} /></section>`;
}

function chartFrom(chart) {
  const length = Math.max(0, ...Object.values(chart.series).map((values) => values.length));
  const x = chart.x.length ? chart.x : Array.from({ length }, (_, i) => i);
  return {
    title: chart.title, x, xLabel: chart.x_label, yLabel: chart.y_label, logY: chart.log_y,
    labels: chart.labels.length ? chart.labels : null, series: Object.entries(chart.series).map(([name, values]) => ({ name, values, bars: chart.kind === "bars" })),
  };
}
