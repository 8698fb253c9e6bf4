"""Test what the report reads and computes; tests/browser checks the page itself."""

from __future__ import annotations

import base64
import json
import random
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gkd.errors import CheckpointError, ClusterError, ConfigError
from gkd.tools.report import headline, samples
from gkd.tools.report.__main__ import main
from gkd.tools.report.page import (
    CHARTS,
    ROWS,
    chart_sections,
    differences,
    extremes,
    from_defaults,
    means,
    page,
    row_of,
    trained_loss,
)
from gkd.tools.report.read import Curve, read_runs
from teacher_server.vision.images import image_size
from tests.refusals import refuses
from tests.report_run import WORDS, add_images, make_run
from tests.structure import ROOT
from tests.vision_models import picture


@pytest.mark.parametrize("n", [1, 7, 1000, 1001, 4999, 20_000])
def test_a_decimated_curve_keeps_its_extremes(n: int) -> None:
    """Fails if a peak, a value that is not finite or an end of a curve is lost, or points are invented."""
    generator = random.Random(n)
    values: list[float | None] = [generator.gauss(0, 1) for _ in range(n)]
    values[n // 2] = 1e6
    values[n // 3] = -1e6 if n > 7 else values[n // 3]
    if n > 7:
        values[n // 5] = None
    curve = Curve(list(range(10, 10 + n)), values)
    found = extremes(curve, 1000)
    assert len(found.steps) <= (n if n <= 1000 else 1000 + 3) and list(found.steps) == sorted(set(found.steps))
    assert all(curve.values[step - 10] == value for step, value in zip(found.steps, found.values, strict=True))
    assert {found.steps[0], found.steps[-1]} == {10, 9 + n}
    assert 1e6 in found.values and (n <= 7 or (-1e6 in found.values and None in found.values))


def test_a_stacked_curve_shows_means() -> None:
    """Fails if stacked areas do not add up: their curves need the same steps and the mean of each bucket."""
    curve = Curve(range(10), [1.0, 3.0, None, 5.0, 1.0, 1.0, None, None, 7.0, 9.0])
    found = means(curve, 5)
    assert list(found.steps) == [0, 2, 4, 6, 8] and list(found.values) == [2.0, 5.0, 1.0, None, 8.0]
    assert means(curve, 10) == curve


def test_a_stage_that_few_steps_have_is_stacked_on_the_others(tmp_path: Path) -> None:
    """Fails if an evaluation every 50 steps is drawn 50 times as large as it is, and the other stages as 0 there."""
    lines = [
        {"step": step, "time/train_s": 1.0} | ({"time/eval_s": 5.0} if step % 50 == 0 else {}) for step in range(3000)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = data_of(page(read_runs([tmp_path])))["runs"][0]
    (steps, train), (same, evals) = run["means"]["time/train_s"], run["means"]["time/eval_s"]
    assert steps == same and sum(evals) / sum(train) == pytest.approx(5 / 50, rel=1e-3)


def test_charts_show_keys_of_the_catalog() -> None:
    """Fails if a chart names a key that no longer exists, so that it silently disappears from the page."""
    known = {row.key for row in ROWS}
    named = [name for charts in CHARTS.values() for chart in charts for name in chart.rows]
    assert set(named) <= known and len(named) == len(set(named))
    (section,) = chart_sections(["time/step_s", "time/train_s", "no/such_key"])
    assert {chart["title"]: chart["keys"] for chart in section["charts"]} == {
        "Time per stage": ["time/train_s"],
        "Duration of a step": ["time/step_s"],
    }
    assert row_of("time/step_s").key == "time/step_s" and row_of("no/such_key") is None


def test_differences_are_found_whatever_a_number_is_written_as(tmp_path: Path) -> None:
    """Fails if a setting that differs between runs is missing, or one that does not is listed."""
    a = make_run(tmp_path / "a", "distill.loss=reverse_kl", "actor.optim.lr=1e-3")
    b = make_run(tmp_path / "b", "trainer.scheduler=stream")
    text = (b / "config.yaml").read_text().replace("temperature: 1.0", "temperature: 1") + "old:\n  key: 1\n"
    (b / "config.yaml").write_text(text)
    runs = read_runs([a, b])
    found = {row["key"]: row["values"] for row in differences(runs)}
    assert found.pop("trainer.run_dir") == [str(a), str(b)]
    assert found == {
        "distill.loss": ["reverse_kl", "forward_kl"],
        "actor.optim.lr": ["0.001", "1e-06"],
        "trainer.scheduler": ["sync", "stream"],
        "old.key": ["(no such key)", "1"],
    }
    assert list(found)[-1] == "old.key"
    assert trained_loss(runs[0]) != trained_loss(runs[1])
    changed = {row["key"]: (row["value"], row["default"]) for row in from_defaults(runs[1])}
    assert changed["trainer.scheduler"] == ("stream", "sync") and "rollout.temperature" not in changed
    assert changed["old.key"] == ("1", "")


@pytest.mark.parametrize(
    ("setting", "warned"),
    [("distill.reward_weight=0.5", ["loss"]), ("teacher.topk=8", ["loss", "eval"]), ("actor.optim.lr=1e-3", [])],
)
def test_numbers_that_cannot_be_compared_are_named(tmp_path: Path, setting: str, warned: list[str]) -> None:
    """Fails if the report compares losses of other settings, or validation KLs that are measured in another way."""
    runs = read_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b", setting)])
    found = re.findall(r'<p class="warning" id="losses-differ".*?</p>', page(runs))
    assert len(found) == bool(warned)
    assert all(("Compare <code>eval/kl</code>" in text) != ("eval" in warned) for text in found)


def test_the_headline_tells_better_from_worse(tmp_path: Path) -> None:
    """Fails if a run that got worse is shown as one that learned, or numbers differ from metrics.jsonl."""
    root = make_run(tmp_path / "run")
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["eval/kl"], lines[-1]["eval/accuracy"], lines[-1]["health/kl_rises"] = 9.0, 0.05, 1.0
    lines[4]["eval/kl"] = 0.01
    (root / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = read_runs([root])
    cells = {row["key"] or row["label"]: row["cells"][0] for row in headline.headline([run])}
    kl = cells["eval/kl"]
    assert kl["text"] == f"{lines[0]['eval/kl']:.4g} → 9" and kl["tone"] == "worse"
    assert "0.01" in kl["remark"] and "4" in kl["remark"], "the best value and its step"
    assert cells["eval/accuracy"]["tone"] == "worse" and cells["loss/total"]["tone"] == ""
    assert cells["Steps"]["text"] == "12 of 12" and cells["Bottleneck"]["text"] == "teacher"
    (alarm,) = headline.alarms(run)
    assert (alarm["key"], alarm["n"], alarm["first"], alarm["last"]) == ("health/kl_rises", 1, 12, 12)
    assert "actor.optim.lr" in alarm["change"]
    assert cells["Health alarms"]["text"] == "health/kl_rises" and cells["Health alarms"]["tone"] == "worse"


def test_a_run_that_its_epochs_ended_is_complete(tmp_path: Path) -> None:
    """Fails if a run that made all steps of its epochs is shown as one that stopped before trainer.total_steps."""
    (run,) = read_runs([make_run(tmp_path / "run", "trainer.total_steps=100")])
    file = run.root / "gpus.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"ended": True}))
    cell = headline.headline([run])[0]["cells"][0]
    assert cell["text"] == "12" and cell["tone"] == ""
    file.write_text(json.dumps(json.loads(file.read_text()) | {"ended": False}))
    assert headline.headline([run])[0]["cells"][0]["text"] == "12 of 100"


def test_a_run_that_was_interrupted_is_not_shown_as_killed(tmp_path: Path) -> None:
    """Fails if a run that Ctrl-C stopped looks like one that was killed, or one evaluation like no progress."""
    (run,) = read_runs([make_run(tmp_path / "run", "trainer.total_steps=100", eval_every=100)])
    file = run.root / "gpus.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"ended": False, "stopped": "interrupted"}))
    curve = run.curves["eval/kl"]
    run.curves["eval/kl"] = replace(curve, steps=curve.steps[:1], values=curve.values[:1])
    cells = {row["key"] or row["label"]: row["cells"][0] for row in headline.headline([run])}
    assert cells["Steps"]["text"] == "12 of 100" and cells["Steps"]["remark"] == "interrupted at step 12"
    assert cells["eval/kl"]["text"] == f"{curve.values[0]:.4g}"


def test_the_sample_browser_is_bounded_by_its_rule(tmp_path: Path) -> None:
    """Fails if long runs make the page grow, or the first or last evaluation is not shown."""
    (run,) = read_runs([make_run(tmp_path / "run", steps=13, eval_every=1, n_tokens=410)])
    data = samples.browser(run)
    assert len(data["steps"]) == len(data["texts"]) == samples.MAX_EVALUATIONS and data["n_evaluations"] == 14
    assert data["steps"][0] == 0 and data["steps"][-1] == 13
    record = data["responses"][13]["100/0"]
    assert len(record["ids"]) == len(record["color"]) == len(record["choices"]) == samples.MAX_TOKENS
    assert record["n_tokens"] == 410 and record["prompt"] == WORDS[2] + WORDS[5] + WORDS[3]
    assert set(data["vocabulary"].values()) <= set(WORDS) and data["has_tokenizer"]
    assert len(samples.browser(run, n_runs=12)["steps"]) == 2


def test_prompts_show_their_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if an image stands elsewhere, is large, or is of another folder; or a missing one keeps the report away."""
    root = make_run(tmp_path / "run", steps=1)
    (tmp_path / "secret.png").write_bytes(picture(8, 8))
    add_images(root, ["a.png", "b.png", "../../secret.png"], a=picture(900, 300), b=b"<script>")
    (run,) = read_runs([root])
    data = samples.browser(run)
    first, a, middle, rest = data["responses"][0]["100/0"]["prompt"]
    assert (first, middle) == (WORDS[3], " 7") and data["texts"][0][0]["prompt"] == [first, a, middle, rest]
    assert a == {"text": "[image 1: 3 tokens]", "images": ["a.png"]}
    assert rest["text"].startswith("[image 2, 3: 6 tokens; images/b.png cannot be shown: it is not a JPEG")
    assert "images/../../secret.png cannot be shown: No such file" in rest["text"] and rest["images"] == []
    head, _, text = data["images"].pop("a.png").partition(",")
    assert head == "data:image/webp;base64" and data["images"] == {}
    assert image_size(base64.b64decode(text)) == (samples.SIDE, round(samples.SIDE / 3))
    assert data_of(page([run]))
    monkeypatch.setattr(samples, "MAX_IMAGES", 0)
    assert samples.browser(run)["texts"][0][0]["prompt"][1]["text"] == "[image 1: 3 tokens; not shown]"
    (root / "export" / "config.json").unlink()
    shutil.rmtree(root / "images")
    prompt = samples.browser(run)["texts"][0][0]["prompt"]
    assert prompt[0] == WORDS[3] + 3 * WORDS[0] + " 7" + 6 * WORDS[0] and prompt[1]["text"].startswith(
        "[image 1, 2, 3;"
    )


def test_changed_words_of_the_same_prompt_are_marked(tmp_path: Path) -> None:
    """Fails if words are lost, or compared with another prompt's, or a response could run as a script."""
    root = make_run(tmp_path / "run", steps=2, eval_every=1)
    texts = {
        0: {1: "so  it is 4", 2: "same", 3: "gone"},
        1: {1: "x"},
        2: {1: "so  it is\n<b>5</b>", 2: "same", 4: "new"},
    }
    for step, rows in texts.items():
        rows_ = [{"prompt_id": i, "prompt": "</script>", "text": text, "correct": None} for i, text in rows.items()]
        file = root / "samples" / f"step_{step:08d}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows_))
    (run,) = read_runs([root])
    (change,) = samples.browser(run)["changes"]
    assert change["id"] == 1
    assert change["parts"] == [("", "so  it is"), ("del", " 4"), ("ins", "\n<b>5</b>")]
    assert "<b>5</b>" not in page([run]) and "</script>" not in data_of(page([run]))["runs"][0]["name"]


def test_incomplete_and_killed_runs_are_shown(tmp_path: Path) -> None:
    """Fails if a missing file, a half-written line or a missing key keeps a user from the report."""
    root = make_run(tmp_path / "run")
    for name in ("export", "samples"):
        shutil.rmtree(root / name)
    for name in ("gpus.json", "environment.jsonl"):
        (root / name).unlink()
    with (root / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "loss/to')
    for file_ in (root / "token_losses").iterdir():
        old = [json.loads(line) for line in file_.read_text().splitlines()]
        kept = [{k: v for k, v in row.items() if k not in ("prompt_ids", "choices")} for row in old]
        file_.write_text("".join(json.dumps(row) + "\n" for row in kept))
    (run,) = read_runs([root])
    assert run.last_step == 12 and run.gpu_map() is None and not run.environment()
    data = samples.browser(run)
    record = data["responses"][12]["100/0"]
    assert not data["has_tokenizer"] and data["vocabulary"][1] == "[1]"
    assert record["prompt"] is None and record["choices"] == [] and data["texts"] == {} and data["changes"] == []
    assert len(data_of(page([run]))["runs"]) == 1
    empty = tmp_path / "just_started"
    empty.mkdir()
    (empty / "metrics.jsonl").touch()
    assert data_of(page(read_runs([empty])))["sections"] == []


class Scripts(HTMLParser):
    """Collect the script elements and the address attributes of a page, as a browser reads them."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.scripts: list[str] = []
        self.addresses: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data


def data_of(text: str) -> dict[str, object]:
    parser = Scripts()
    parser.feed(text)
    assert len(parser.scripts) == 3, "the data, the library and the scripts of the page"
    assert all(address.startswith(("#", "data:")) for address in parser.addresses), "the page needs no other file"
    return json.loads(parser.scripts[0])


def test_no_text_of_a_run_becomes_markup(tmp_path: Path) -> None:
    """Fails if a response, a name or a setting can end an element of the page or run a script."""
    root = make_run(tmp_path / "<img src=x onerror=alert(1)>", f"model.path={WORDS[3]}")
    text = page(read_runs([root]))
    assert "<img" not in text.partition("<script>")[0] and "window.broken=1</script>" not in text
    (run,) = data_of(text)["runs"]  # type: ignore[misc]
    assert run["samples"]["vocabulary"]["3"] == WORDS[3] and run["name"] == root.name


def test_runs_are_named_by_their_folders(tmp_path: Path) -> None:
    """Fails if two runs cannot be told apart on the page."""
    a, b, c = (make_run(tmp_path / name, steps=1) for name in ("x/run", "y/run", "other"))
    assert [run.name for run in read_runs([a, b, c])] == [str(a), str(b), "other"]
    with refuses("RUN"):
        read_runs([a, a / ".." / "run"])


def test_wrong_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fails if a typing error ends in a traceback."""
    (tmp_path / "empty").mkdir()
    for name in ("missing", "empty"):
        assert main([str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert str(tmp_path / name) in error and error.startswith("config error: ")
    root = make_run(tmp_path / "run", steps=1)
    assert main([str(root), "--watch", "0"]) == 2 and "--watch" in capsys.readouterr().err
    assert main([str(root), "--out", str(tmp_path / "no" / "such.html")]) == 1 and "no" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text", "error", "where"),
    [
        ("metrics.jsonl", '{"step": 1}\nnonsense\n', CheckpointError, "line 2"),
        ("metrics.jsonl", '{"step": 1}\n{"loss": 2}\n', CheckpointError, "line 2"),
        ("gpus.json", "{}", ClusterError, "gpus.json"),
        ("environment.jsonl", "3\n", CheckpointError, "line 1"),
        ("environment.jsonl", "{\n", CheckpointError, "environment.jsonl"),
        ("config.yaml", "a: [", ConfigError, "config.yaml"),
        ("token_losses/step_00000004.jsonl", "{}\n", CheckpointError, "prompt_id"),
        ("samples/step_00000004.jsonl", "[1]\n", CheckpointError, "line 1"),
        ("export/tokenizer.json", "{}", CheckpointError, "tokenizer.json"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, text: str, error: type[Exception], where: str) -> None:
    """Fails if a damaged file ends in a traceback, or the error does not name the place."""
    root = make_run(tmp_path / "run", steps=4)
    (root / file).write_text(text)
    with pytest.raises(error, match=where):
        page(read_runs([root]))
    assert main([str(root)]) == (2 if error is ConfigError else 1)


def test_without_its_libraries_the_report_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a missing library ends in an ImportError without the command that installs it."""
    root = make_run(tmp_path / "run", steps=1)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError) as raised:
        page(read_runs([root]))
    assert "plotly" in str(raised.value.value) and "[report]" in str(raised.value)


def test_an_installed_package_has_the_assets() -> None:
    """Fails if a wheel lacks a file of the page."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (pattern,) = project["tool"]["setuptools"]["package-data"]["gkd.tools.report"]
    folder = ROOT / "gkd" / "tools" / "report"
    others = {file for file in folder.rglob("*.*") if file.suffix not in (".py", ".pyc")}
    assert others and others == set(folder.glob(pattern))


def test_the_command_loads_no_engine(tmp_path: Path) -> None:
    """Fails if the report takes seconds to start, because it imports torch, ray or transformers."""
    root = make_run(tmp_path / "run", steps=1)
    code = (
        "import sys; from gkd.tools.report.__main__ import main; code = main(sys.argv[1:]); "
        "print(sorted({'torch', 'ray', 'transformers', 'vllm'} & sys.modules.keys())); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]" and (root / "report.html").stat().st_size > 10**6
