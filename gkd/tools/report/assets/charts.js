"use strict";
// Curves of metrics.jsonl, drawn with Plotly when they come into view.

const DATA = JSON.parse(document.getElementById("data").textContent);
// Okabe and Ito's colors, which people with any color vision tell apart, then similar ones for long lists; the same hues
// lighter on a dark screen.
const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999933", "#882255", "#44aa99", "#a6761d", "#7f7f7f"];
const DARK = ["#4aa3e0", "#f5803e", "#2bc79a", "#e5a3c8", "#f2b63c", "#8fd0f5", "#b79ad6", "#c4c45c", "#d16a9c", "#6fd0c0", "#cfa04a", "#aaaaaa"];
const dark = matchMedia("(prefers-color-scheme: dark)");
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const state = { run: 0, axis: "step", log: false };

function nth(i) {
  return (dark.matches ? DARK : LIGHT)[i % LIGHT.length];
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function layout(extra = {}) {
  const axis = { gridcolor: color("--grid"), linecolor: color("--line"), zerolinecolor: color("--line"), automargin: true };
  return {
    margin: { l: 8, r: 8, t: 8, b: 8 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: color("--fg"), size: 12, family: "system-ui, Segoe UI, DejaVu Sans, sans-serif" },
    hoverlabel: { bgcolor: color("--bg"), bordercolor: color("--line"), font: { color: color("--fg") }, namelength: -1 },
    ...extra,
    xaxis: { ...axis, ...extra.xaxis },
    yaxis: { ...axis, ...extra.yaxis },
  };
}

// Its buttons lie over the newest points: they are shown only while a mouse is over the chart.
const SETTINGS = { displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false, displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"] };

// Hours since the run's first line, at any step; time/unix_s never decreases, so interpolation between its points is enough.
function hoursOf(run, steps) {
  const curve = run.curves["time/unix_s"];
  if (!curve || !curve[0].length) return steps.map(() => null);
  const [xs, ys] = curve;
  let i = 0;
  return steps.map((step) => {
    while (i + 1 < xs.length && xs[i + 1] <= step) i += 1;
    const next = Math.min(i + 1, xs.length - 1);
    const share = next === i || step <= xs[i] ? 0 : (step - xs[i]) / (xs[next] - xs[i]);
    return (ys[i] + share * (ys[next] - ys[i]) - ys[0]) / 3600;
  });
}

// A short name of a key within a chart of several: without the part that all keys share.
function shortNames(keys) {
  if (keys.length < 2) return keys;
  const parts = keys.map((key) => key.split("/"));
  let from = 0;
  while (parts.every((p) => p.length > from + 1 && p[from] === parts[0][from])) from += 1;
  let until = 0;
  while (parts.every((p) => p.length - until > from + 1 && p[p.length - 1 - until] === parts[0][parts[0].length - 1 - until])) until += 1;
  return parts.map((p) => p.slice(from, p.length - until).join("/"));
}

function traces(chart) {
  const found = [];
  const names = shortNames(chart.keys);
  const runs = chart.stacked ? [DATA.runs[state.run]] : DATA.runs;
  runs.forEach((run, r) => {
    chart.keys.forEach((key, k) => {
      const curve = (chart.stacked ? run.means : run.curves)[key];
      if (!curve) return;
      const several = chart.keys.length > 1;
      const dash = DASHES[(several ? r : 0) % DASHES.length];
      const name = several ? (runs.length > 1 ? `${run.name}: ${names[k]}` : names[k]) : run.name;
      found.push({
        type: "scatter",
        x: state.axis === "hours" ? hoursOf(run, curve[0]) : curve[0],
        y: curve[1],
        customdata: curve[0],
        name,
        mode: curve[0].length <= 60 && !chart.stacked ? "lines+markers" : "lines",
        line: { color: nth(several ? k : r), dash, width: chart.stacked ? 0.5 : 1.8 },
        marker: { size: 5 },
        ...(chart.stacked ? { stackgroup: "one" } : {}),
        hovertemplate: `step %{customdata}: %{y:.6~g} ${chart.unit}<extra>${escapeHtml(name)}</extra>`,
      });
    });
  });
  return found;
}

// The largest area at the bottom; areas below 0.1% of the sum are not drawn.
function byArea(shown) {
  const area = (trace) => trace.y.reduce((sum, value) => sum + (value ?? 0), 0);
  const total = shown.reduce((sum, trace) => sum + area(trace), 0);
  const kept = shown.filter((trace) => area(trace) >= 0.001 * total).sort((a, b) => area(b) - area(a));
  const few = Math.max(0, ...kept.map((trace) => trace.x.length)) <= 150; // as bars: an area slopes towards its neighbors
  kept.forEach((trace, i) => {
    trace.line.color = nth(i);
    if (few) Object.assign(trace, { type: "bar", stackgroup: undefined, mode: undefined, line: undefined, marker: { color: nth(i) } });
  });
  return kept;
}

// Plotly reads some HTML in names.
function escapeHtml(text) {
  return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

// How many entries of a legend fit side by side: Plotly makes them as wide as the longest one.
function columnsOf(shown, width) {
  const longest = Math.max(...shown.map((trace) => trace.name.length));
  return Math.max(Math.floor(width / (55 + 7.2 * longest)), 1);
}

// Plotly draws a curve of one value on an axis from value - 1 to value + 1, where a small one looks like 0.
function rangeOf(shown) {
  const values = shown.flatMap((trace) => trace.y).filter((value) => value !== null);
  const one = values[0];
  return one && values.every((value) => value === one) ? { range: [Math.min(0, 2 * one), Math.max(0, 2 * one)] } : {};
}

function drawChart(node, chart) {
  const shown = chart.stacked ? byArea(traces(chart)) : traces(chart);
  // The legend is below the plot and has rows of its own, so the plot keeps its height.
  const legend = shown.length > 1 ? 20 * Math.ceil(shown.length / columnsOf(shown, node.clientWidth)) + 8 : 0;
  node.style.height = `${250 + legend}px`;
  const isLog = state.log && !chart.stacked;
  const extra = {
    showlegend: shown.length > 1,
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, itemwidth: 30, traceorder: "normal" },
    margin: { l: 8, r: 8, t: 8, b: 46 + legend },
    hovermode: "closest",
    barmode: "stack",
    bargap: 0.05,
    xaxis: { title: { text: state.axis, standoff: 4 } },
    yaxis: { title: { text: chart.unit, standoff: 4 }, type: isLog ? "log" : "linear", ...(isLog || chart.stacked ? {} : rangeOf(shown)) },
  };
  Plotly.react(node, shown, layout(extra), SETTINGS);
}

// Draw what is in view, and what comes into view.
const drawers = new Map();
const visible = new Set();
const observer = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) visible.delete(entry.target);
    else if (!visible.has(entry.target)) {
      visible.add(entry.target);
      if (entry.target.dataset.drawn !== version()) redraw(entry.target);
    }
  }
}, { rootMargin: "300px" });

function version() {
  return JSON.stringify([state, dark.matches]);
}

function redraw(node) {
  drawers.get(node)(node);
  node.dataset.drawn = version();
}

function drawWhenVisible(node, draw) {
  drawers.set(node, draw);
  observer.observe(node);
}

function redrawVisible() {
  for (const node of visible) redraw(node);
}

function startCharts() {
  for (const section of DATA.sections) {
    for (const chart of section.charts) {
      drawWhenVisible(document.querySelector(`#${chart.id} .plot`), (node) => drawChart(node, chart));
    }
  }
}

// One chart of any key, with its meaning.
function startAnyChart() {
  const select = document.getElementById("any-key");
  const keys = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.curves)))].sort();
  select.append(...keys.map((key) => element("option", { value: key }, key)));
  const figure = document.getElementById("any-chart");
  const plot = figure.querySelector(".plot");
  const draw = () => {
    const key = select.value;
    const row = DATA.meanings[key];
    const parts = row ? [row.meaning, row.healthy && `Healthy: ${row.healthy}`, row.problem && `Otherwise: ${row.problem}`] : ["This version has no description of the key."];
    figure.querySelector("figcaption").textContent = parts.filter(Boolean).join(" ").replace(/`/g, "").replace(/\[([^\]]*)\]\([^)]*\)/g, "$1");
    drawChart(plot, { keys: [key], unit: row ? row.unit : "", stacked: false });
  };
  select.addEventListener("change", draw);
  if (keys.length) drawWhenVisible(plot, draw);
}
