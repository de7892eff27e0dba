"use strict";
// Draws the report from the JSON beside it. Charts are SVG; nothing is loaded from anywhere.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const tip = $("tip");
const W = 440, H = 200, LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 20;

function el(name, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "rect", "circle"].includes(name);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function format(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e6 && size < 1e12) return size < 1e9 ? `${+(value / 1e6).toPrecision(4)}M` : `${+(value / 1e9).toPrecision(4)}G`;
  if (size !== 0 && (size < 1e-3 || size >= 1e12)) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(+value.toPrecision(4));
}

function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
}
const hideTip = () => { tip.hidden = true; };

// Scales and axes

function ticks(low, high) {
  const raw = (high - low) / 4 || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const out = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-9; t += step) out.push(+t.toPrecision(12));
  return out;
}

function logTicks(low, high) {  // powers of ten, and steps between where there are few
  const range = high - low, every = Math.ceil(range / 5), out = [];
  const within = range < 1 ? [1, 1.2, 1.5, 2, 3, 5, 7] : range < 3 ? [1, 2, 5] : [1];
  for (let p = Math.floor(low); p <= high; p += every) for (const m of within) out.push(p + Math.log10(m));
  const inside = out.filter((t) => t >= low && t <= high);
  return inside.length > 1 ? inside : [low, high];
}

function xScale(xs) {
  const low = Math.min(...xs), high = Math.max(...xs);
  const at = (x) => LEFT + (W - LEFT - RIGHT) * (high > low ? (x - low) / (high - low) : 0.5);
  return { low, high, at };
}

function yScale(values, log) {
  let low = Math.min(...values), high = Math.max(...values);
  if (!log && low > 0 && low < high / 3) low = 0;
  const pad = low < high ? (high - low) / 20 : log ? 0.5 : Math.abs(low) / 2 || 0.5;
  high += pad;
  if (low !== 0 || log) low -= pad;
  const at = (y) => H - BOTTOM - (H - TOP - BOTTOM) * (y - low) / (high - low);
  return { low, high, at };
}

function axes(svg, x, y, log) {
  for (const t of log ? logTicks(y.low, y.high) : ticks(y.low, y.high)) {
    svg.append(el("line", { class: "grid-line", x1: LEFT, x2: W - RIGHT, y1: y.at(t), y2: y.at(t) }),
      el("text", { x: LEFT - 5, y: y.at(t) + 4, "text-anchor": "end" }, format(log ? 10 ** t : t)));
  }
  stepAxis(svg, x);
}

function stepAxis(svg, x) {
  for (const t of ticks(x.low, x.high)) if (Number.isInteger(t))
    svg.append(el("text", { x: x.at(t), y: H - 4, "text-anchor": "middle" }, String(t)));
}

function smooth(ys, weight) {
  let mean = 0, norm = 0;  // without the bias towards a start at 0
  return ys.map((y) => {
    if (y === null) return null;
    mean = weight * mean + (1 - weight) * y;
    norm = weight * norm + (1 - weight);
    return mean / norm;
  });
}

function path(xs, ys) {
  let out = "", pen = "M";
  xs.forEach((x, i) => {
    if (ys[i] === null) { pen = "M"; return; }
    out += `${pen}${x.toFixed(1)} ${ys[i].toFixed(1)}`;
    pen = "L";
  });
  return out;
}

// Charts: each draws into svg and returns what the pointer at index i of the steps is told

function lines(svg, chart, weight) {
  const log = chart.kind === "log";
  const put = (y) => (y === null || (log && y <= 0) ? null : log ? Math.log10(y) : y);
  const shown = chart.series.map((s) => s.y.map(put));
  const all = shown.flat().filter((y) => y !== null);
  if (!all.length) { svg.append(el("text", { x: W / 2, y: H / 2, "text-anchor": "middle" }, log ? "0 throughout" : "no number")); return; }
  const x = xScale(chart.series.flatMap((s) => s.x)), y = yScale(all, log);
  axes(svg, x, y, log);
  chart.series.forEach((s, k) => {
    const xs = s.x.map(x.at), stroke = { fill: "none", stroke: `var(--c${k % 8})`, "stroke-width": 1.6 };
    const trend = weight > 0 && !s.eval ? smooth(shown[k], weight) : null;
    const at = (ys) => ys.map((v) => (v === null ? null : y.at(v)));
    svg.append(el("path", { ...stroke, d: path(xs, at(shown[k])), class: trend ? "raw" : "curve" }));
    if (trend) svg.append(el("path", { ...stroke, d: path(xs, at(trend)), class: "curve" }));
    if (s.eval || xs.length === 1) at(shown[k]).forEach((cy, i) => {
      if (cy !== null) svg.append(el("circle", { cx: xs[i], cy, r: 3, fill: `var(--c${k % 8})` }));
    });
  });
  pointer(svg, x, (step) => chart.series.map((s) => [s.name, s.y[nearest(s.x, step)]]));
}

function areas(svg, chart) {
  const steps = chart.series[0].x, x = xScale(steps);
  const tops = [steps.map(() => 0)];
  for (const s of chart.series) tops.push(s.y.map((v, i) => tops.at(-1)[i] + (v || 0)));
  const y = yScale([0, ...tops.at(-1)], false);
  axes(svg, x, y, false);
  chart.series.forEach((s, k) => {
    const there = steps.map(x.at), back = [...there].reverse();
    const upper = path(there, tops[k + 1].map(y.at)), lower = path(back, tops[k].map(y.at).reverse());
    svg.append(el("path", { d: `${upper}L${lower.slice(1)}Z`, fill: `var(--c${k % 8})`, "fill-opacity": 0.75, class: "curve" }));
  });
  pointer(svg, x, (step) => chart.series.map((s) => [s.name, s.y[nearest(s.x, step)]]));
}

function heat(svg, chart) {
  const steps = chart.series[0].x, x = xScale(steps), rows = chart.series.length;
  const wide = (W - LEFT - RIGHT) / steps.length, tall = (H - TOP - BOTTOM) / rows;
  const upper = chart.series.map((s) => s.name.split("_").at(-1));
  chart.series.forEach((s, k) => {
    const top = H - BOTTOM - (k + 1) * tall;
    if (k % 2 === 0 && upper[k] !== "inf") svg.append(el("text", { x: LEFT - 5, y: top + 4, "text-anchor": "end" }, upper[k]));
    s.y.forEach((share, i) => {
      if (share > 0) svg.append(el("rect", { x: LEFT + i * wide, y: top, width: wide + 0.3, height: tall,
        fill: "var(--c0)", "fill-opacity": Math.max(0.04, 1 + Math.log10(share) / 4).toFixed(3) }));
    });
  });
  if (data.band) for (const edge of data.band) {  // the band of DIS, where it is an edge of the histogram
    const k = upper.findIndex((u) => Math.abs(u - edge) < 1e-9);
    const at = H - BOTTOM - (k + 1) * tall;
    if (k >= 0) svg.append(el("line", { x1: LEFT, x2: W - RIGHT, y1: at, y2: at, stroke: "var(--c1)", "stroke-dasharray": "5 3" }));
  }
  stepAxis(svg, { ...x, at: (t) => LEFT + (nearest(steps, t) + 0.5) * wide });
  pointer(svg, x, (step) => chart.series.map((s, k) => [`${k ? upper[k - 1] : 0} … ${upper[k]}`, s.y[nearest(s.x, step)]])
    .filter(([, share]) => share > 0).reverse());
}

function nearest(xs, x) {
  let best = 0;
  xs.forEach((candidate, i) => { if (Math.abs(candidate - x) < Math.abs(xs[best] - x)) best = i; });
  return best;
}

function pointer(svg, x, tell) {
  const cross = el("line", { class: "cross", y1: TOP, y2: H - BOTTOM, visibility: "hidden" });
  svg.append(cross);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), share = ((event.clientX - box.left) / box.width * W - LEFT) / (W - LEFT - RIGHT);
    const step = Math.round(x.low + Math.min(1, Math.max(0, share)) * (x.high - x.low));
    cross.setAttribute("x1", x.at(step)); cross.setAttribute("x2", x.at(step));
    cross.setAttribute("visibility", "visible");
    showTip(event, `step ${step}\n` + tell(step).map(([name, value]) => `${name}  ${format(value)}`).join("\n"));
  });
  svg.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); hideTip(); });
}

function commonPrefix(names) {  // up to a "/" or "_"
  let n = 0;
  while (names.length > 1 && n < names[0].length && names.every((name) => name[n] === names[0][n])) n += 1;
  return names[0].slice(0, n).match(/^(.*[/_])?/)[0];
}

function figure(chart, weight) {
  const svg = el("svg", { viewBox: `0 0 ${W} ${H}`, role: "img" });
  ({ area: areas, heat }[chart.kind] || lines)(svg, chart, weight);
  const legend = el("ul");
  const own = chart.kind === "area" ? commonPrefix(chart.series.map((s) => s.name)).length : 0;
  if (chart.kind !== "heat") chart.series.forEach((s, k) =>
    legend.append(el("li", { style: `--colour: var(--c${k % 8})` }, `${s.name.slice(own)} ${format(s.y.at(-1))}`)));
  else legend.append("share of action tokens, stronger is more; the dashed lines are DIS's band");
  return el("figure", {}, el("figcaption", {}, chart.title), svg, legend);
}

const still = (chart) => chart.series.every((s) => s.y.every((y) => y === s.y[0]));

function drawSection(section, n, weight) {  // of what no chart was made for, that which never changes is only listed
  const listed = section.title.startsWith("Everything else") ? section.charts.filter(still) : [];
  const drawn = section.charts.filter((chart) => !listed.includes(chart));
  const parts = [el("h2", { id: `section-${n}` }, section.title)];
  parts.push(el("div", { class: "grid" }, ...drawn.map((chart) => figure(chart, weight))));
  const names = listed.map((chart) => el("span", {}, `${chart.title} ${format(chart.series[0].y[0])}`));
  if (names.length) parts.push(el("p", { class: "still" }, "always the same: ", ...names));
  return parts;
}

function drawCharts() {
  const weight = +$("smoothing").value;
  $("charts").replaceChildren(...data.sections.flatMap((section, n) => drawSection(section, n, weight)));
}

// Samples

function rejected(sample, n) {
  const rho = Math.exp(sample.logprobs[n] - sample.rollout_logprobs[n]);
  return sample.rollout_logprobs[n] === null || (data.band && !(rho > data.band[0] && rho < data.band[1]));
}

function series(sample, what) {
  if (what !== "shift") return sample[what] || [];
  return sample.logprobs.map((l, n) => (l === null || sample.rollout_logprobs[n] === null ? null : l - sample.rollout_logprobs[n]));
}

function renderTokens(sample, what) {
  const values = series(sample, what), largest = Math.max(1e-12, ...values.map((v) => Math.abs(v || 0)));
  const pre = el("pre");
  let n = -1;
  sample.pieces.forEach((piece, position) => {
    const text = piece.replaceAll("\n", "⏎\n");
    if (!sample.mask[position]) { pre.append(el("span", { class: "tok masked" }, text)); return; }
    const k = ++n, value = values[k];
    const span = el("span", { class: "tok action" + (rejected(sample, k) ? " rejected" : ""), "data-n": k }, text);
    if (value) span.style.background = `rgba(var(${value > 0 ? "--pos" : "--neg"}), ${(0.08 + 0.72 * Math.abs(value) / largest).toFixed(2)})`;
    pre.append(span);
  });
  pre.addEventListener("pointermove", (event) => {
    const k = event.target.dataset.n;
    if (k === undefined) { hideTip(); return; }
    const rho = Math.exp(sample.logprobs[k] - sample.rollout_logprobs[k]);
    const rows = { advantage: sample.advantages[k], value: sample.values?.[k], "log-prob, trainer": sample.logprobs[k],
      "log-prob, engine": sample.rollout_logprobs[k], ratio: rho, reward: sample.rewards[k] };
    showTip(event, Object.entries(rows).map(([name, v]) => `${name}  ${format(v)}`).join("\n") + (rejected(sample, k) ? "\nrejected by DIS" : ""));
  });
  pre.addEventListener("pointerleave", hideTip);
  return pre;
}

function matches(sample, query) {
  return query.toLowerCase().split(/\s+/).filter(Boolean).every((word) => {
    const [key, value] = word.split(":");
    if (["step", "success"].includes(key) && value !== undefined) return String(sample[key]) === value;
    return `${sample.id} ${sample.task_id} ${sample.pieces.join("")}`.toLowerCase().includes(word);
  });
}

function card(sample) {
  const cut = sample.num_tokens > sample.pieces.length ? `, the first ${sample.pieces.length} are shown` : "";
  const versions = [...new Set(sample.versions.map(([label]) => label))].join(", ");
  const details = el("details", {}, el("summary", {}, `step ${sample.step} · task ${sample.task_id} · reward ${format(sample.reward)}`,
    el("small", {}, `${sample.num_tokens} tokens${cut} · weights ${versions}${sample.truncated ? " · ended by a limit" : ""} · ${sample.id}`)));
  details.addEventListener("toggle", () => { if (details.open) fill(details); });
  details.sample = sample;
  return details;
}

function fill(details) {
  details.querySelector("pre")?.remove();
  details.append(renderTokens(details.sample, $("colour").value));
}

function search() {
  let found = 0;
  for (const details of $("list").children) {
    details.hidden = !matches(details.sample, $("search").value);
    found += !details.hidden;
  }
  $("count").textContent = data.samples.length ? `${found} of ${data.samples.length} trajectories`
    : "the run has written none (logging.samples_every)";
}

function openFirst() {
  const first = [...$("list").children].find((details) => !details.hidden);
  if (first) { first.open = true; fill(first); }
}

function start() {
  for (const [name, value] of data.run.facts) $("facts").append(el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  data.sections.forEach((section, n) => $("contents").append(el("a", { href: `#section-${n}` }, section.title)));
  $("contents").append(el("a", { href: "#samples" }, "Sample trajectories"));
  drawCharts();
  $("list").replaceChildren(...data.samples.map(card));
  $("smoothing").addEventListener("input", drawCharts);
  $("search").addEventListener("input", search);
  $("colour").addEventListener("input", () => document.querySelectorAll("details[open]").forEach(fill));
  const linked = decodeURIComponent(location.hash).match(/^#search=(.*)/);  // report.html#search=WORDS can be passed on
  if (linked) $("search").value = linked[1];
  search();
  openFirst();
  if (linked) $("samples").scrollIntoView();
}
start();
