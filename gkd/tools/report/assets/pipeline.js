"use strict";
// Gantt chart of a chosen step: a row per process, cut into lanes where its spans overlap.

function startPipeline() {
  const body = document.getElementById("pipeline-body");
  body.replaceChildren();
  const charts = DATA.runs[state.run].pipeline;
  if (charts === null) {
    body.append(element("p", { class: "missing" }, "The run has no spans.jsonl: trainer.spans_every above 0 writes it."));
    return;
  }
  if (!charts.length) {
    body.append(element("p", { class: "missing" }, "spans.jsonl has no step yet."));
    return;
  }
  const select = element("select", { id: "pipeline-step" }, ...charts.map((chart, i) =>
    element("option", { value: i }, `step ${chart.step}: ${chart.reason}, ${chart.duration.toPrecision(3)} s`)));
  const figure = element("figure", { class: "chart wide" }, element("div", { class: "plot", role: "img", "aria-label": "Spans of each process" }));
  body.append(element("div", { class: "bar" }, element("label", {}, "step ", select)), figure);
  const plot = figure.firstChild;
  const draw = () => drawPipeline(plot, charts[Number(select.value)]);
  select.addEventListener("change", draw);
  drawWhenVisible(plot, draw);
}

function drawPipeline(node, chart) {
  const labels = [];
  const centers = [];
  const byName = new Map();
  let top = 0;
  for (const process of chart.processes) {
    const lanes = [...new Set(process.spans.map((span) => span[3]))].sort((a, b) => a - b);
    const height = Math.min(1 + 0.15 * Math.max(lanes.length - 1, 0), 3); // many lanes become thin, not a long page
    const lane = (height - 0.25) / Math.max(lanes.length, 1);
    labels.push(`${process.process}  ${Math.round(100 * process.idle)}% idle`);
    centers.push(top + height / 2);
    for (const [name, start, duration, at, args] of process.spans) {
      if (!byName.has(name)) byName.set(name, { x: [], base: [], y: [], width: [], customdata: [] });
      const trace = byName.get(name);
      trace.x.push(duration);
      trace.base.push(start);
      trace.y.push(top + 0.125 + (lanes.indexOf(at) + 0.5) * lane);
      trace.width.push(0.94 * lane);
      const more = Object.entries(args).map(([key, value]) => `<br>${escapeHtml(key)} ${escapeHtml(String(value))}`).join("");
      trace.customdata.push([process.process, start, more]);
    }
    top += height;
  }
  const traces = [...byName.entries()].map(([name, trace], i) => ({
    type: "bar", orientation: "h", name, ...trace,
    marker: { color: nth(i), line: { width: 0.5, color: color("--panel") }, pattern: { shape: ["", "/", "."][Math.floor(i / LIGHT.length) % 3] } },
    hovertemplate: "%{customdata[0]}<br>from %{customdata[1]:.4~f} s, %{x:.4~f} s long%{customdata[2]}<extra>%{fullData.name}</extra>",
  }));
  node.style.height = `${110 + 36 * top}px`;
  Plotly.react(node, traces, layout({
    barmode: "overlay", showlegend: true, hovermode: "closest",
    legend: { orientation: "h", yref: "container", y: 1, yanchor: "top", traceorder: "normal" },
    margin: { l: 8, r: 8, t: 40, b: 8 },
    xaxis: { title: { text: "seconds since the step began", standoff: 4 }, range: [0, chart.duration] },
    yaxis: { tickvals: centers, ticktext: labels.map(escapeHtml), range: [top, 0], zeroline: false, showgrid: false, fixedrange: true },
  }), SETTINGS);
}
