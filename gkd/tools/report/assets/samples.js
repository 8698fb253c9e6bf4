"use strict";
// Responses: each token colored by its KL, the teacher's choices in a tooltip, the same prompt at several steps.

const SAMPLES = { step: null, response: null };

function startSamples() {
  const body = document.getElementById("samples-body");
  const samples = DATA.runs[state.run].samples;
  body.replaceChildren();
  hideTip();
  if (!samples.steps.length) {
    body.append(element("p", { class: "missing" }, "The run has no token_losses/: each evaluation, with data.val_files, writes them."));
  } else {
    body.append(tokenBrowser(samples));
  }
  const steps = Object.keys(samples.texts);
  if (!steps.length) body.append(element("p", { class: "missing" }, "The run has no samples/ yet: each evaluation writes responses as text; without data.val_files the last step does."));
  else body.append(textTable(samples, steps));
  if (samples.changes.length) body.append(changeTable(samples, steps));
}

// A prompt: its texts, and marks of image tokens with thumbnails behind them.
function promptNodes(samples, prompt) {
  const image = (part) => (name) => element("img", { src: samples.images[name], alt: part.text });
  return [prompt].flat().flatMap((part) => part.images ? [element("b", {}, part.text), ...part.images.map(image(part))] : part);
}

function stepSelect(id, steps, chosen) {
  const made = element("select", { id }, ...steps.map((step) => element("option", { value: step }, step)));
  made.value = String(steps.map(String).includes(String(chosen)) ? chosen : steps[steps.length - 1]);
  return made;
}

function tokenBrowser(samples) {
  const steps = stepSelect("sample-step", samples.steps, SAMPLES.step);
  const responses = element("select", { id: "sample-response" });
  const names = [...new Set(samples.steps.flatMap((step) => Object.keys(samples.responses[step])))];
  responses.append(...names.map((name) => element("option", { value: name }, `prompt ${name.split("/")[0]}, sample ${name.split("/")[1]}`)));
  if (names.includes(SAMPLES.response)) responses.value = SAMPLES.response;
  const legend = element("span", { class: "legend" });
  const body = element("div", { class: "response" });
  const draw = () => {
    SAMPLES.step = steps.value;
    SAMPLES.response = responses.value;
    hideTip();
    drawResponse(body, legend, samples);
    saveState();
  };
  steps.addEventListener("change", draw);
  responses.addEventListener("change", draw);
  const bar = element("div", { class: "bar" }, element("label", {}, "response ", responses), element("label", {}, "step ", steps), legend);
  const made = element("div", {}, bar, body);
  if (!samples.has_tokenizer) made.prepend(element("p", { class: "missing" }, "Neither export/ nor model.path has a tokenizer.json: tokens are shown as ids."));
  draw();
  return made;
}

// Full color at the 95th percentile of this prompt's tokens over all steps, so that steps can be compared.
function fullColor(samples, name) {
  const values = samples.steps.flatMap((step) => samples.responses[step][name]?.color ?? []).filter((v) => v !== null).map(Math.abs);
  values.sort((a, b) => a - b);
  return Math.max(values[Math.floor(0.95 * (values.length - 1))] ?? 0, 0.01);
}

function drawResponse(body, legend, samples) {
  const record = samples.responses[SAMPLES.step][SAMPLES.response];
  body.replaceChildren();
  legend.replaceChildren();
  if (!record) {
    body.append(element("p", { class: "missing" }, "This evaluation has not kept the response."));
    return;
  }
  const full = fullColor(samples, SAMPLES.response);
  legend.append(`${record.kind}, nats: 0`, element("i"), `${full.toPrecision(2)} and more`);
  body.append(element("p", { class: "prompt" }, ...promptNodes(samples, record.prompt ?? "The prompt is not in this file.")));
  const observed = new Set(record.observed), unpaired = new Set(record.unpaired);
  if (observed.size) legend.append(element("span", { class: "observed" }, "text of the environment"));
  const tokens = element("div", { class: "tokens", tabindex: "0", "aria-label": "Tokens of the response; arrow keys move between them" });
  record.ids.forEach((id, i) => {
    const text = samples.vocabulary[id];
    const special = /^<.*>$|^\[\d+\]$/.test(text) ? "special" : "";
    const span = element("span", { "data-i": i, class: observed.has(i) ? `observed ${special}` : special }, text.replace(/\n/g, "\u21b5\n"));
    if (!observed.has(i) && !unpaired.has(i)) {
      const share = (record.color[i] ?? null) === null ? 1 : Math.min(Math.abs(record.color[i]) / full, 1);
      span.style.backgroundColor = `rgba(var(--heat), ${(0.75 * share).toFixed(3)})`;
    }
    tokens.append(span);
  });
  body.append(tokens);
  if (record.n_tokens > record.ids.length) body.append(element("p", { class: "note" }, `${record.n_tokens - record.ids.length} more tokens are not shown.`));
  const show = (span) => span && showTip(span, tipOf(samples, record, Number(span.dataset.i)));
  tokens.addEventListener("mouseover", (event) => show(event.target.closest("span")));
  tokens.addEventListener("mouseleave", hideTip);
  tokens.addEventListener("blur", hideTip);
  tokens.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const at = tokens.querySelector(".current");
    const next = at ? (move > 0 ? at.nextSibling : at.previousSibling) : tokens.firstChild;
    if (next) show(next);
  });
}

function percent(p) {
  return p < 0.0005 ? "<0.1%" : `${(100 * p).toFixed(1)}%`;
}

function quoted(text) {
  return text.replace(/ /g, "\u00b7").replace(/\n/g, "\u21b5");
}

function tipOf(samples, record, i) {
  const value = record.color[i];
  const lines = [element("div", {}, element("b", {}, quoted(samples.vocabulary[record.ids[i]])), ` id ${record.ids[i]}, token ${i + 1}`)];
  if (record.observed.includes(i)) return [...lines, element("div", { class: "note" }, "The environment wrote this token. It is read, and carries no loss.")];
  if (record.unpaired.includes(i)) return [...lines, element("div", { class: "note" }, "The teacher's tokens have no pair for it: it is not compared.")];
  lines.push(element("div", {}, `${record.kind}: ${value === null ? "not finite" : value} nats`));
  if (record.entropy.length) lines.push(element("div", {}, `entropy of the student: ${record.entropy[i]} nats`));
  const choices = record.choices[i];
  if (choices && choices.length) {
    const head = element("tr", {}, element("th", {}, "teacher's choices"), element("th", {}, "teacher"), element("th", {}, "student"));
    const rows = choices.map(([id, p, q]) => element("tr", { class: id === record.ids[i] ? "chosen" : "" },
      element("td", {}, quoted(samples.vocabulary[id])), element("td", {}, percent(p)), element("td", {}, percent(q))));
    lines.push(element("table", {}, head, ...rows));
    if (!choices.some(([id]) => id === record.ids[i])) lines.push(element("div", { class: "note" }, "The student's token is not among them."));
  } else {
    lines.push(element("div", { class: "note" }, "Without the teacher's choices: it sent no distribution."));
  }
  return lines;
}

function showTip(target, content) {
  const tip = document.getElementById("tip");
  document.querySelectorAll(".tokens .current").forEach((node) => node.classList.remove("current"));
  target.classList.add("current");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const box = target.getBoundingClientRect();
  const below = box.bottom + 8 + tip.offsetHeight <= innerHeight;
  tip.style.top = `${scrollY + (below ? box.bottom + 8 : Math.max(box.top - 8 - tip.offsetHeight, 0))}px`;
  tip.style.left = `${scrollX + Math.max(Math.min(box.left, innerWidth - tip.offsetWidth - 24), 8)}px`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
  document.querySelectorAll(".tokens .current").forEach((node) => node.classList.remove("current"));
}

function textTable(samples, steps) {
  const select = stepSelect("text-step", steps, SAMPLES.text);
  const body = element("tbody");
  const draw = () => {
    SAMPLES.text = select.value;
    body.replaceChildren(...samples.texts[select.value].map((sample) => element("tr", {},
      element("td", { class: sample.correct ? "better" : sample.correct === false ? "worse" : "" }, sample.correct ? "correct" : sample.correct === false ? "wrong" : ""),
      element("td", {}, element("pre", {}, ...promptNodes(samples, sample.prompt))), element("td", {}, element("pre", {}, sample.text)), element("td", {}, element("pre", {}, sample.answer)))));
    saveState();
  };
  select.addEventListener("change", draw);
  draw();
  const head = element("thead", {}, element("tr", {}, ...["", "prompt", "response", "reference answer"].map((text) => element("th", {}, text))));
  return element("details", { class: "texts" }, element("summary", {}, "Responses as text"),
    element("div", { class: "bar" }, element("label", {}, "step ", select)), element("table", {}, head, body));
}

// The same prompts at the first and the last step: removed and added words.
function changeTable(samples, steps) {
  const rows = samples.changes.map((sample) => element("tr", {}, element("td", {}, element("pre", {}, ...promptNodes(samples, sample.prompt))),
    element("td", {}, element("pre", {}, ...sample.parts.map(([kind, text]) => element(kind || "span", {}, text))))));
  const head = element("thead", {}, element("tr", {}, element("th", {}, "prompt"), element("th", {}, `words removed and added from step ${steps[0]} to ${steps[steps.length - 1]}`)));
  return element("details", { class: "texts" }, element("summary", {}, "What changed in the responses"), element("table", {}, head, element("tbody", {}, ...rows)));
}
