"use strict";
// Controls, and what outlives a reload of the page (--watch): position and choices, per file.

const STORE = `gkd-report ${location.pathname}`;

function saveState() {
  sessionStorage.setItem(STORE, JSON.stringify({ state, samples: SAMPLES, scroll: scrollY }));
}

function startRun() {
  for (const node of document.querySelectorAll(".of-run")) node.hidden = Number(node.dataset.run) !== state.run;
  for (const node of document.querySelectorAll(".run-name")) node.textContent = DATA.runs[state.run].name;
  startSamples();
}

function start() {
  const saved = JSON.parse(sessionStorage.getItem(STORE) ?? "null");
  if (saved) {
    Object.assign(state, saved.state);
    Object.assign(SAMPLES, saved.samples);
    state.run = Math.min(state.run, DATA.runs.length - 1);
  }
  const run = document.getElementById("run");
  const axis = document.getElementById("axis");
  const log = document.getElementById("log");
  if (run) {
    run.value = state.run;
    run.addEventListener("change", () => { state.run = Number(run.value); startRun(); redrawVisible(); saveState(); });
  }
  axis.value = state.axis;
  log.checked = state.log;
  axis.addEventListener("change", () => { state.axis = axis.value; redrawVisible(); saveState(); });
  log.addEventListener("change", () => { state.log = log.checked; redrawVisible(); saveState(); });
  dark.addEventListener("change", redrawVisible);
  startCharts();
  startAnyChart();
  startRun();
  if (saved) scrollTo(0, saved.scroll);
  addEventListener("pagehide", saveState);
  if (DATA.reload_s) setTimeout(() => location.reload(), 1000 * DATA.reload_s);
  document.documentElement.dataset.ready = "true";
}

start();
