"""`gkd generate`: a teacher writes answers, is interrupted and goes on, and a run reads their very ids."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gkd.config.load import load_config
from gkd.data.prompts import RowReader, load_prompts, load_tokenizer
from gkd.errors import ConfigError
from gkd.preflight.dataset import check_generation
from gkd.tools import generate
from tests.dist.helpers import free_port
from tests.e2e.conftest import EOS, Lab
from tests.processes import wait_until
from tests.refusals import refuses
from tests.service.harness import ServerProcess
from tests.service.http_servers import ScriptedHttp, VllmServer
from tests.unit.judging_functions import checksum

pytestmark = pytest.mark.e2e
Run = Callable[[list[str]], tuple[int, str]]
STOP_IDS = list(range(2, 202))  # so that some answers of a random model end


@pytest.fixture(scope="module")
def writer_port(lab: Lab) -> Iterator[int]:
    """Serve the teacher with an engine that writes answers."""
    with ServerProcess(lab.teacher, lab.root, options=("--engine", "vllm", "--dtype", "float32")) as server:
        yield server.port


@pytest.fixture(scope="module")
def writer_url(lab: Lab) -> Iterator[str]:
    """Serve the teacher with vLLM's own server."""
    with VllmServer(lab.teacher, lab.root / "vllm.log", free_port()) as server:
        yield server.url


def settings(lab: Lab, at: int | str, *words: str) -> list[str]:
    """Return the settings of a run whose responses have up to 40 tokens, with a teacher at a port or URL."""
    ends = ("data.max_response_length=40", f"rollout.stop_token_ids={STOP_IDS}")
    http = ("teacher.server_port=15555", "teacher.backend=http", f"teacher.url={at}") if isinstance(at, str) else ()
    return [*lab.command(lab.root / "unused", 1 if http else int(at))[5:], *http, *ends, *words]


def command(lab: Lab, at: int | str, out: Path, *words: str) -> list[str]:
    data = lab.root / "twelve.jsonl"
    data.write_text("".join(lab.train.read_text().splitlines(keepends=True)[:12]))
    return ["--data", str(data), "--out", str(out), *settings(lab, at), *words]


@pytest.fixture
def run(gkd_log: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return what runs the tool in this process, and returns its exit code, and what it logs and prints."""
    monkeypatch.setattr(generate.interrupts, "install", lambda: None)

    def run(words: list[str]) -> tuple[int, str]:
        gkd_log.clear()
        code = generate.main(words)
        return code, gkd_log.text + capsys.readouterr().err

    return run


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def sources_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows without responses."""
    return [{name: value for name, value in row.items() if not name.startswith("response")} for row in rows]


@pytest.mark.parametrize(("writer", "n"), [("writer_port", 64), ("writer_url", 16)])  # answers to each prompt
def test_answers_go_on_after_an_interruption(
    lab: Lab, writer: str, n: int, request: pytest.FixtureRequest, tmp_path: Path, run: Run
) -> None:
    """Fails if an interruption or a cut line loses, repeats or changes answers, or leaves a traceback; if answers of
    other settings come into the file; or if the file is read with other ids than the teacher wrote.
    """
    out = tmp_path / "answers.jsonl"
    at = request.getfixturevalue(writer)
    words = command(lab, at, out, "-n", str(n))
    running = subprocess.Popen([sys.executable, "-m", "gkd.cli", "generate", *words], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: (out.exists() and out.stat().st_size > 0) or running.poll() is not None, 120.0, "answers")
    running.send_signal(signal.SIGINT)
    _, text = running.communicate(timeout=60)
    assert running.returncode == 130 and "Traceback" not in text, text[-3000:]
    kept = out.read_bytes()
    assert 0 < kept.count(b"\n") < 12 * n
    out.write_bytes(kept + b'{"prompt": "w5')  # as a kill in the middle of a line leaves it

    code, text = run(words)
    assert code == 0 and "answered" in text, text[-3000:]
    assert out.read_bytes().startswith(kept)
    rows = rows_of(out)
    prompts = sources_of(rows_of(lab.root / "twelve.jsonl"))
    order = [prompts.index(row) for row in sources_of(rows)]
    assert order == sorted(order) and set(order) == set(range(12))
    assert 11 * n < len(rows) <= 12 * n  # without those that have an end alone
    assert len({row["response"] for row in rows}) > 11 * n

    for more, expected, line in (
        ((), 0, "0 of 12 prompts are to answer"),
        (("--top-p", "0.5"), 2, "--top-p = 1.0, not 0.5"),
    ):
        code, text = run([*words, *more])
        assert code == expected and line in text and rows_of(out) == rows

    config = load_config(None, settings(lab, at, f"data.train_files=[{out}]"))
    tokenizer = load_tokenizer(str(lab.student), "model.path")
    reader = RowReader(config.data, tokenizer, response_ends=[EOS, *STOP_IDS])
    read, _ = load_prompts(config.data.train_files, "data.train_files", reader)
    assert [prompt.response_ids.tolist() for prompt in read if prompt.response_ids is not None] == [
        row["response_ids"] for row in rows
    ]
    ends = {row["response_ids"][-1] in (EOS, *STOP_IDS) for row in rows}
    assert ends == {True, False}, "some answers end, and others are cut off without an end token"


def test_a_served_model_writes_what_the_teacher_server_writes(
    lab: Lab, writer_port: int, writer_url: str, tmp_path: Path, run: Run
) -> None:
    """Fails if the answers over HTTP are not those of the prompts, the settings or the seeds."""
    for more in (("--temperature", "0"), ("-n", "3", "--temperature", "0.7", "--top-p", "0.9")):
        written = []
        for at in (writer_port, writer_url):
            out = tmp_path / f"{len(written)} of {len(more)}.jsonl"
            code, text = run(command(lab, at, out, *more))
            assert code == 0, text[-3000:]
            written.append(rows_of(out))
        assert written[0] == written[1] and len(written[0]) > 10


def test_a_server_without_ids_is_refused(lab: Lab, writer_url: str, tmp_path: Path, run: Run) -> None:
    """Fails if an older server, whose answers lack their ids, is found after the start or has its texts tokenized."""

    def script(path: str, request: Any) -> tuple[int, bytes]:
        data = None if request is None else json.dumps({**request, "return_token_ids": False}).encode()
        asked = urllib.request.Request(f"{writer_url}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as reply:
            return 200, reply.read()

    out = tmp_path / "answers.jsonl"
    with ScriptedHttp(script) as old:
        code, text = run(command(lab, old.url, out))
    assert code == 2 and "teacher.url" in text and "token_ids" in text and not out.exists(), text[-3000:]


def test_only_judged_answers_are_kept(lab: Lab, writer_port: int, tmp_path: Path, run: Run) -> None:
    """Fails if --keep keeps what its function refuses, or loses what it keeps; or if an answer depends on it."""
    every = tmp_path / "every.jsonl"
    judged = tmp_path / "judged.jsonl"
    function = "tests.unit.judging_functions:checksum"
    for out, more in ((every, ()), (judged, ("--keep", function))):
        code, text = run(command(lab, writer_port, out, "-n", "4", *more))
        assert code == 0, text[-3000:]
    texts = [" ".join(f"w{i}" for i in row["response_ids"] if i != EOS) for row in rows_of(every)]
    pairs = zip(rows_of(every), texts, strict=True)
    expected = [row for row, text in pairs if checksum(row["prompt"], text, row) >= 0.5]
    assert 0 < len(expected) < len(rows_of(every))
    assert rows_of(judged) == expected


def test_what_writes_no_answers_is_refused(lab: Lab, teacher_port: int, tmp_path: Path, run: Run) -> None:
    """Fails if a command waits for answers that never come, or writes into a file of something else."""
    out = tmp_path / "answers.jsonl"
    code, text = run(command(lab, teacher_port, out))
    assert code == 1 and "--engine vllm" in text and not out.read_bytes(), text[-3000:]
    for more, key in (("teacher.backend=local", "teacher.backend"), ("data.response_key=''", "data.response_key")):
        with refuses(key):
            check_generation(load_config(None, settings(lab, teacher_port, more)))
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text('{"prompt": "w5"}\n')
    code, text = run(command(lab, teacher_port, foreign))
    assert code == 2 and "--out" in text and foreign.read_text() == '{"prompt": "w5"}\n'


@pytest.mark.parametrize(
    ("ids", "text", "problem"),
    [
        ([5, 6, EOS], "w5 w7", "stand for 'w5 w6'"),
        ([5, EOS, 6], "w5 w6", "before the end"),
        ([5, -1], "w5", "expected a list of token ids"),
        (["5"], "w5", "expected a list of token ids"),
    ],
)
def test_ids_that_are_not_those_of_the_text_are_refused(
    lab: Lab, tmp_path: Path, ids: list[Any], text: str, problem: str
) -> None:
    """Fails if a run trains on the ids of another text or tokenizer."""
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "w3", "response": text, "response_ids": ids}))
    config = load_config(None, settings(lab, 1, f"data.train_files=[{data}]"))
    reader = RowReader(config.data, load_tokenizer(str(lab.student), "model.path"), response_ends=[EOS])
    with pytest.raises(ConfigError, match=problem):
        load_prompts(config.data.train_files, "data.train_files", reader)
