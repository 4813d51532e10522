// Mismatch between rollout and trainer over all samples that have both sides.
import { useMemo } from "./vendor/hooks.js";
import { useAnswer } from "./api.js";
import { Chart } from "./charts.js";
import { Facts, Notice, compact, count, html, plural } from "./ui.js";

export function Mismatch() {
  const { value, error } = useAnswer(false, "mismatch");
  if (error) return html`<main class="page" tabindex="0"><h1 class="sr-only">Mismatch</h1><${Notice} kind="error">${error}<//></main>`;
  if (!value) return html`<main class="page" tabindex="0"><h1 class="sr-only">Mismatch</h1><${Notice}>Comparing log-probabilities…<//></main>`;
  return html`<main class="page" tabindex="0"><h1 class="sr-only">Mismatch</h1><${MismatchPlots} found=${value} /></main>`;
}

export function MismatchPlots({ found }) {
  const plots = useMemo(() => prepared(found), [found]);
  if (!found.tokens) return html`<${Notice}>No token has log-probabilities of both sides.<//>`;
  const exact = found.equal === found.tokens;
  return html`<${Notice} kind=${exact ? "good" : "info"}>${exact
      ? `Exact: all ${count(found.tokens)} log-probabilities of ${plural(found.samples, "sample")} are equal.`
      : `${count(found.tokens - found.equal)} of ${count(found.tokens)} log-probabilities differ, in ${plural(found.samples, "sample")}.`}<//>
    <${Facts} items=${Object.entries(found.numbers).map(([name, number]) => [name, compact(number)])} />
    ${!exact && html`<div class="charts">
      <${Chart} ...${plots.histogram} /><${Chart} ...${plots.tail} /><${Chart} ...${plots.position} />
      ${plots.contribution ? plots.contribution.map((one) => html`<${Chart} key=${one.title} ...${one} />`) : html`<${Notice}>No rewards, so no advantages: C(r) is not shown.<//>`}
    </div>`}`;
}

function prepared(found) {
  if (!found.tokens) return {};
  const { histogram: h, tail: t, position: p, contribution: c } = found;
  const sides = c && [["positive", "A > 0"], ["negative", "A < 0"]].filter(([name]) => c[name]);
  return {
    histogram: { title: "δ per token", note: h.outside ? `${plural(h.outside, "token")} beyond the ends` : "", x: h.x, xLabel: "δ = trainer − rollout log-probability", yLabel: "tokens", logY: true, series: [{ name: "tokens", values: h.count, bars: true }] },
    tail: { title: "Tail of |δ|", note: "share of tokens above", x: t.x, xLabel: "|δ|", yLabel: "share of tokens", logX: true, logY: true, series: [{ name: "share above", values: t.share }] },
    position: { title: "Ratio against position", note: "mean, and the range of 98% of the tokens", x: p.x, xLabel: "trained tokens before it", yLabel: "r = exp(δ)", series: [{ name: "99th percentile", values: p.high, band: true, thin: true }, { name: "1st percentile", values: p.low, thin: true }, { name: "mean", values: p.mean }] },
    contribution: c && sides.map(([name, sign]) => ({ title: `C(r) = −(r − 1)·A where ${sign}`, note: `mean ${compact(c[name].mean)}, skew ${compact(c[name].skew)}, ${plural(c[name].tokens, "token")}`, x: c[name].x, xLabel: "C(r)", yLabel: "tokens", logY: true, series: [{ name: sign, values: c[name].count, bars: true }] })),
  };
}
