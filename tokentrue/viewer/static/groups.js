// Tasks: the groups of the source, and the rollouts of one group side by side.
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { useAllRows, useAnswer } from "./api.js";
import { colourOf, surprise } from "./colours.js";
import { Notice, count, fixed, html, percent, plural, short, signed } from "./ui.js";

export function Groups({ index, go }) {
  const groups = new Map();
  for (const s of useAllRows(index)) if (s.group != null) groups.set(s.group, [...(groups.get(s.group) ?? []), s]);
  const [chosen, choose] = useState([]);
  const toggle = (name) => choose(chosen.includes(name) ? chosen.filter((one) => one !== name) : [...chosen, name].slice(-2));
  if (!groups.size) return html`<main class="page"><h1 class="sr-only">Groups</h1><${Notice}>No session belongs to a group.<//></main>`;
  return html`<main class="page"><h1 class="sr-only">Groups</h1>
    <p class="filters"><button disabled=${chosen.length < 2} onClick=${() => go("compare", ...chosen)}>Compare ${chosen.length < 2 ? "two groups" : `${chosen[0]} and ${chosen[1]}`}</button>
      <span class="soft">${chosen.length < 2 ? "tick two groups to see them side by side" : ""}</span></p>
    <div class="scroll-x" tabindex="0" role="region" aria-label="Groups"><table class="list"><thead><tr>
    <th scope="col"><span class="sr-only">compare</span></th><th scope="col">group</th><th scope="col">task</th><th scope="col" class="num">rollouts</th><th scope="col">rewards</th><th scope="col" class="num">mean</th><th scope="col" class="num">coverage</th><th scope="col" class="num">sampled tokens</th></tr></thead>
    <tbody>${[...groups].map(([name, rows]) => {
      const rewards = rows.map((s) => s.reward).filter((r) => r != null).sort((a, b) => b - a);
      const sum = (field) => rows.reduce((total, s) => total + s[field], 0);
      return html`<tr key=${name}><td><input type="checkbox" aria-label=${`compare ${name}`} checked=${chosen.includes(name)} onChange=${() => toggle(name)} /></td><td><a href=${`#/group/${encodeURIComponent(name)}`}>${name}</a></td><td class="c-task" title=${rows[0].task}>${rows[0].task}</td><td class="num">${count(rows.length)}</td>
        <td><${RewardDots} rewards=${rewards} /></td><td class="num">${rewards.length ? fixed(rewards.reduce((a, b) => a + b) / rewards.length) : "–"}</td>
        <td class="num">${percent(sum("trained"), sum("sampled"))}</td><td class="num">${count(sum("sampled"))}</td></tr>`;
    })}</tbody></table></div></main>`;
}

function RewardDots({ rewards }) {
  const low = Math.min(0, ...rewards);
  const high = Math.max(1, ...rewards);
  return html`<svg class="dots" viewBox="0 0 120 14" role="img" aria-label=${`rewards ${rewards.map((r) => fixed(r, 2)).join(", ")}`}><line x1="4" x2="116" y1="7" y2="7"></line>
    ${rewards.map((r, i) => html`<circle key=${i} cx=${4 + (112 * (r - low)) / (high - low)} cy="7" r="3"></circle>`)}</svg>`;
}

// `inside` is a part of another page.
export function Group({ live, name, go, inside = false }) {
  const { value, error } = useAnswer(live, "group", name);
  if (error && !value) return html`<main class="page"><${Notice} kind="error">${error}<//></main>`;
  if (!value) return html`<main class="page"><${Notice}>Loading group ${name}…<//></main>`;
  const rollouts = [...value.rollouts].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  const rewards = rollouts.map((r) => r.reward).filter((r) => r != null);
  const most = Math.max(1e-9, ...rollouts.map((r) => Math.abs(r.advantage ?? 0)));
  const longest = Math.max(1, ...rollouts.map((r) => r.sampled));
  const sum = (field) => rollouts.reduce((total, r) => total + r[field], 0);
  return html`<${inside ? "section" : "main"} class=${inside ? "half" : "page"}>
    ${inside ? html`<h2>${name}</h2>` : html`<h1>${name}</h1>`}
    <dl class="facts inline"><div><dt>rollouts</dt><dd class="num">${count(rollouts.length)}</dd></div>
      <div><dt>mean reward</dt><dd class="num">${rewards.length ? fixed(rewards.reduce((a, b) => a + b) / rewards.length) : "–"}</dd></div>
      <div><dt>best, worst</dt><dd class="num">${rewards.length ? `${fixed(Math.max(...rewards))}, ${fixed(Math.min(...rewards))}` : "–"}</dd></div>
      <div><dt>sampled tokens</dt><dd class="num">${count(value.sampled)}</dd></div><div><dt>turns</dt><dd class="num">${count(sum("turns"))}</dd></div>
      <div><dt>coverage</dt><dd class="num">${percent(value.trained, value.sampled)}</dd></div>
      <div><dt>advantage</dt><dd>(reward − mean) ÷ deviation, or the sample’s own</dd></div></dl>
    <ol class="rollouts" tabindex="0" aria-label=${`${plural(rollouts.length, "rollout")}, best first`}>${rollouts.map((r) => html`<li key=${r.sample_id}>
      <header><a href=${`#/session/${encodeURIComponent(r.session_id)}/${encodeURIComponent(r.sample_id)}`} onClick=${(e) => { e.preventDefault(); go("session", r.session_id, r.sample_id); }}>${short(r.session_id)}</a>
        <dl class="facts stacked"><div><dt>reward</dt><dd class="num">${fixed(r.reward)}</dd></div>
        <div><dt>advantage</dt><dd class="num">${signed(r.advantage)}</dd></div></dl>
        <span class="diverging" aria-hidden="true"><span class=${(r.advantage ?? 0) < 0 ? "minus" : "plus"} style=${{ width: `${(50 * Math.abs(r.advantage ?? 0)) / most}%` }}></span></span>
        <p class="soft num">${plural(r.turns, "turn")}, ${plural(r.sampled, "token")}, mean ${fixed(r.mean_logprob, 2)}${r.finish_reason === "stop" ? "" : `, ${r.finish_reason}`}</p>
        <${Strip} values=${r.strip} share=${r.sampled / longest} /></header>
      <div class="messages">${r.messages.map((m, i) => html`<${Message} key=${i} m=${m} />`)}
        ${r.messages.length === 0 && html`<p class="soft">No text: start the viewer with --model DIR.</p>`}</div></li>`)}</ol><//>`;
}

export function Message({ m }) {
  return html`<section class=${`m ${m.role}`}><h2>${m.role}</h2>
    ${m.reasoning && html`<p class="reasoning">${m.reasoning.trim()}</p>`}${m.content && html`<p>${m.content}</p>`}
    ${(m.calls ?? []).map((call, i) => html`<p key=${i} class="call">→ ${call.name}(${call.arguments})</p>`)}</section>`;
}

// Log-probabilities from first to last sampled token, as a strip of colour.
function Strip({ values, share }) {
  const canvas = useRef();
  useEffect(() => {
    const paint = () => {
      const element = canvas.current;
      element.width = 240;
      element.height = 1;
      const context = element.getContext("2d");
      const palette = Array.from({ length: 9 }, (_, i) => colourOf(`--q${i}`));
      const width = Math.max(1, 240 * share);
      values.forEach((value, i) => {
        context.fillStyle = palette[surprise(value) - 1];
        context.fillRect((i / values.length) * width, 0, Math.max(0.5, width / values.length), 1);
      });
    };
    paint();
    document.addEventListener("themechange", paint);
    return () => document.removeEventListener("themechange", paint);
  }, [values, share]);
  return html`<canvas class="strip" ref=${canvas} role="img" aria-label="log-probabilities of the sampled tokens"></canvas>`;
}
