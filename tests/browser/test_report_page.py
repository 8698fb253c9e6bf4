"""Test the report in a real browser: numbers equal metrics.jsonl, tooltips, comparison, color schemes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from gkd.tools.report.page import page as report
from gkd.tools.report.read import read_runs
from tests.browser.conftest import Open
from tests.processes import wait_until
from tests.report_run import WORDS, add_images, make_run
from tests.structure import ROOT
from tests.vision_models import picture

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("report") / "forward")


@pytest.fixture(scope="module")
def single(run: Path) -> Path:
    return written(run / "single.html", run)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = ("distill.loss=reverse_kl", "trainer.scheduler=stream")
    return make_run(tmp_path_factory.mktemp("report") / "reverse", *changes, seed=1)


def written(file: Path, *runs: Path, reload_s: float = 0) -> Path:
    file.write_text(report(read_runs(runs), reload_s))
    return file


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def curves(page: Page, chart: str) -> dict[str, dict[int, float | None]]:
    """Return what a chart draws: name of the curve -> step -> value."""
    plot = page.locator(f"#{chart} .plot")
    plot.scroll_into_view_if_needed()
    expect(plot).to_have_attribute("data-drawn", re.compile("step|hours"), timeout=20_000)
    code = "node => node.data.map(t => [t.name, Array.from(t.customdata), Array.from(t.y)])"
    return {name: dict(zip(steps, values, strict=True)) for name, steps, values in plot.evaluate(code)}


def column(run: Path, key: str) -> dict[int, float | None]:
    """Return step -> value of a key, as exact as the page has it."""
    found = {line["step"]: line[key] for line in metrics(run) if key in line}
    return {step: None if value is None else pytest.approx(value, rel=1e-5) for step, value in found.items()}


def test_the_numbers_are_those_of_the_metrics_file(run: Path, single: Path, open_page: Open) -> None:
    """Fails if any chart draws other numbers than metrics.jsonl has, or one of its charts is missing."""
    page = open_page(single)
    sections = page.evaluate("DATA.sections")
    charts = {chart["id"]: chart for section in sections for chart in section["charts"]}
    assert len(charts) == page.locator("figure.chart").count() - 1  # the chart of any key
    for name, chart in charts.items():
        drawn = curves(page, name)
        if len(chart["keys"]) == 1 and not chart["stacked"]:
            assert drawn == {"forward": column(run, chart["keys"][0])}, name
        else:
            short = {key.rpartition("/")[2]: key for key in chart["keys"]} | {key: key for key in chart["keys"]}
            assert drawn, name
            for label, values in drawn.items():
                key = short.get(label) or next(
                    key for key in chart["keys"] if f"/{label}" in key or key.startswith(f"{label}/")
                )
                assert values == column(run, key), f"{name}: {label}"
    lines = metrics(run)
    assert lines[6]["optim/grad_norm"] is None and curves(page, "chart-optim-grad-norm")["forward"][6] is None
    first, last = lines[0]["eval/kl"], lines[-1]["eval/kl"]
    expect(page.locator('td[data-key="eval/kl"]')).to_contain_text(f"{first:.4g} → {last:.4g}")


def test_any_key_can_be_drawn_with_its_meaning(run: Path, single: Path, open_page: Open) -> None:
    """Fails if a key has no curve on the page, or its description is missing."""
    page = open_page(single)
    keys = {key for line in metrics(run) for key in line} - {"step"}
    assert set(page.locator("#any-key option").all_inner_texts()) == keys
    page.select_option("#any-key", "rollout/sequences")
    assert curves(page, "any-chart") == {"forward": column(run, "rollout/sequences")}
    expect(page.locator("#any-chart figcaption")).to_contain_text("Sequences of the batch")
    page.select_option("#axis", "hours")
    code = "() => Math.max(...document.querySelector('#any-chart .plot').data[0].x)"
    assert page.evaluate(code) == pytest.approx(12 * 10 / 3600, rel=1e-3)


def test_buttons_need_a_mouse_and_a_ratio_has_no_unit(single: Path, open_page: Open) -> None:
    """Fails if Plotly's buttons lie over the newest points without a mouse, or an axis is named "1"; or a table makes
    the page of a phone scroll sideways.
    """
    page = open_page(single)
    assert page.evaluate("SETTINGS.displayModeBar") == "hover"
    assert "1" not in page.evaluate("DATA.sections.flatMap(s => s.charts.map(c => c.unit))")
    page = open_page(single, has_touch=True, is_mobile=True, viewport={"width": 390, "height": 800})
    assert page.evaluate("SETTINGS.displayModeBar") is False
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_small_constant_is_above_zero(tmp_path: Path, open_page: Open) -> None:
    """Fails if a constant learning rate is drawn at 0, on an axis from -1 to 1."""
    run = make_run(tmp_path / "constant")
    lines = [{**each, "optim/lr": 5e-5} if "optim/lr" in each else each for each in metrics(run)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    page = open_page(written(run / "page.html", run))
    curves(page, "chart-optim-lr")
    low, high = page.evaluate("document.querySelector('#chart-optim-lr .plot').layout.yaxis.range")
    assert (low, high) == (0, pytest.approx(1e-4))


def test_changed_words_are_marked(single: Path, open_page: Open) -> None:
    """Fails if the page does not show which words of a response have changed since the first evaluation."""
    page = open_page(single)
    # Not by a click: the table moves while the charts above it are drawn, and a click may miss it.
    page.locator("details", has_text="What changed in the responses").evaluate("details => { details.open = true; }")
    expect(page.locator(".texts del").first).to_be_visible()
    expect(page.locator(".texts ins").first).to_be_visible()


def test_a_token_shows_the_teachers_choices(run: Path, single: Path, open_page: Open) -> None:
    """Fails if hovering or the arrow keys do not show the choices, or a token's text becomes markup."""
    page = open_page(single)
    record = json.loads((run / "token_losses" / "step_00000012.jsonl").read_text().splitlines()[1])
    page.select_option("#sample-response", "101/1")
    spans = page.locator(".tokens span")
    assert spans.all_inner_texts() == [WORDS[i].replace("\n", "↵\n") for i in record["response_ids"]]
    assert page.evaluate("window.broken") is None and "</script>" in page.locator(".prompt").inner_text()
    spans.first.scroll_into_view_if_needed()
    spans.nth(0).hover()
    tip = page.locator("#tip")
    expect(tip).to_be_visible()
    rows = [row.split("\t") for row in tip.locator("tr").all_inner_texts()]
    token, second = (WORDS[one[0]] for one in record["choices"][0])
    assert rows == [["teacher's choices", "teacher", "student"], [token, "50.0%", "25.0%"], [second, "12.5%", "6.3%"]]
    assert tip.locator("tr.chosen").count() == 1
    assert float(re.findall(r": ([\d.]+) nats", tip.inner_text())[0]) == pytest.approx(
        record["values"]["token_kl"][0], rel=1e-3
    )
    page.mouse.move(0, 0)
    expect(tip).to_be_hidden()
    page.locator(".tokens").focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    expect(tip).to_contain_text("id " + str(record["response_ids"][1]))


def test_a_prompt_shows_its_images(open_page: Open, tmp_path: Path) -> None:
    """Fails if the browser refuses an image, it has no text for a screen reader, or a name or text becomes markup."""
    root = make_run(tmp_path / "run")
    add_images(root, ["a.png", None, "<img src=x onerror=window.broken=1>"], a=picture(90, 30))
    page = open_page(written(tmp_path / "r.html", root))
    for place in (".prompt", ".texts tr:nth-child(1) td:nth-child(2)"):
        image = page.locator(place).first.locator("img")
        assert image.evaluate("n => [n.naturalWidth, n.naturalHeight, n.alt]") == [30, 90, "[image 1: 3 tokens]"]
    text = page.locator(".prompt").inner_text()
    assert WORDS[3] in text and "not shown; images/<img src=x onerror=window.broken=1> cannot be shown" in text
    assert page.evaluate("window.broken") is None


def test_tokens_are_colored_by_their_kl(run: Path, single: Path, open_page: Open) -> None:
    """Fails if the color of a token does not follow its KL, or another step shows the same numbers."""
    page = open_page(single)
    alpha = (
        "nodes => nodes.map(n => Number((getComputedStyle(n).backgroundColor.match(/, ([\\d.]+)\\)/) ?? [0, 1])[1]))"
    )
    seen = []
    for step in (12, 0):
        page.select_option("#sample-step", str(step))
        file = run / "token_losses" / f"step_{step:08d}.jsonl"
        kl = json.loads(file.read_text().splitlines()[0])["values"]["token_kl"]
        drawn = page.locator(".tokens span").evaluate_all(alpha)
        order = sorted(range(len(kl)), key=lambda i: kl[i])
        assert [drawn[i] for i in order] == sorted(drawn) and len(set(drawn)) > 2
        seen.append(drawn)
    assert seen[0] != seen[1]


def test_a_token_without_a_pair_has_no_color(other: Path, open_page: Open, tmp_path: Path) -> None:
    """Fails if a token that a teacher with another tokenizer cannot compare is shown as one with a KL of 0."""
    root = Path(shutil.copytree(other, tmp_path / "run"))
    for file in (root / "token_losses").iterdir():
        records = [json.loads(line) for line in file.read_text().splitlines()]
        for record in records:
            record["values"]["paired"] = [1.0, 0.0, *[1.0] * (len(record["response_ids"]) - 2)]
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    page = open_page(written(tmp_path / "r.html", root))
    drawn = page.locator(".tokens span").evaluate_all("nodes => nodes.map(n => n.style.backgroundColor !== '')")
    assert drawn == [i != 1 for i in range(len(drawn))]
    page.locator(".tokens span").nth(1).hover()
    assert "not compared" in page.locator("#tip").inner_text() and "nats" not in page.locator("#tip").inner_text()


def test_two_runs_are_compared(run: Path, other: Path, open_page: Open, tmp_path: Path) -> None:
    """Fails if a user cannot find what differs, mixes up the runs, or is not warned about different losses."""
    page = open_page(written(tmp_path / "r.html", run, other))
    assert page.locator("main > section").first.get_attribute("id") == "differences"
    rows = [row.split("\t") for row in page.locator("#differences tbody tr").all_inner_texts()]
    differs = {key: values for key, *values in rows}
    assert differs["distill.loss"] == ["forward_kl", "reverse_kl"] and differs["trainer.scheduler"] == [
        "sync",
        "stream",
    ]
    expect(page.locator("#losses-differ")).to_be_visible()
    assert curves(page, "chart-eval-kl") == {"forward": column(run, "eval/kl"), "reverse": column(other, "eval/kl")}
    terms = curves(page, "chart-loss--loss-")
    assert terms["forward: forward_kl"] == column(run, "loss/forward_kl")
    assert terms["reverse: reverse_kl"] == column(other, "loss/reverse_kl")
    stages = curves(page, "chart-time--stage--s")
    page.select_option("#run", "1")
    page.locator("#chart-time--stage--s").scroll_into_view_if_needed()
    assert stages["train_s"] == column(run, "time/train_s")
    assert curves(page, "chart-time--stage--s")["train_s"] == column(other, "time/train_s")
    expect(page.locator("#configuration .of-run").nth(0)).to_be_hidden()
    expect(page.locator("#configuration .of-run").nth(1)).to_contain_text("reverse_kl")
    expect(page.locator("#gpus")).to_contain_text("GPU <b>X</b>")
    expect(page.locator("#environment")).to_contain_text("2.13.0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_color_schemes_can_be_read(single: Path, open_page: Open, tmp_path: Path, scheme: str) -> None:
    """Fails if text or a curve has too little contrast on a light or a dark screen (WCAG: 4.5 and 3)."""
    page = open_page(single, color_scheme=scheme)
    names = ("--bg", "--panel", "--fg", "--muted", "--link", "--good", "--bad")
    colors = {name: page.evaluate("name => color(name)", name) for name in names}
    assert (luminance(colors["--bg"]) > 0.5) == (scheme == "light")
    for name in names[2:]:
        assert min(contrast(colors[name], colors[back]) for back in names[:2]) >= 4.5, name
    for shade in page.evaluate("[0, 1, 2].map(nth)"):
        assert contrast(shade, colors["--panel"]) >= 3, shade
    curves(page, "chart-eval-kl")
    image = page.screenshot(path=tmp_path / f"{scheme}.png")
    assert len(image) > 20_000, "the charts are drawn"


def luminance(color: str) -> float:
    """Return the relative luminance of #rrggbb (WCAG 2)."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_a_watched_run_reloads_itself(open_page: Open, tmp_path: Path) -> None:
    """Fails if the page of a run in progress stays as it was, forgets a choice, or Ctrl-C does not end the command."""
    root = make_run(tmp_path / "run", steps=4)
    file = root / "report.html"
    command = [sys.executable, "-m", "gkd.tools.report", str(root), "--watch", "1.5"]
    watching = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        wait_until(file.exists, 60.0, "the report")
        page = open_page(file)
        page.select_option("#sample-step", "0")
        with (root / "metrics.jsonl").open("a") as lines:
            lines.write('{"step": 5, "eval/kl": 0.125}\n')
        expect(page.locator('td[data-key="eval/kl"]')).to_contain_text("0.125", timeout=20_000)
        assert page.locator("#sample-step").input_value() == "0"
        watching.send_signal(signal.SIGINT)
        out, _ = watching.communicate(timeout=30)
    finally:
        watching.kill()
    assert watching.returncode == 0 and out.count("report.html") >= 3
    assert '"reload_s":0}' in file.read_text(), "the last page does not reload itself"
