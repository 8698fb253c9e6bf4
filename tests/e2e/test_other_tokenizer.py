"""A teacher with another tokenizer, in whole runs: real engines, a real teacher server, real chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gkd.metrics.writer import read_metrics
from gkd.preflight.teacher import as_rollout
from gkd.text.pair import TokenizerPair
from gkd.tools import replay
from gkd.types import TeacherScores
from tests.e2e.conftest import ALONE, Lab
from tests.e2e.exactness import steps_of
from tests.e2e.kill_matrix import Kill, Runs, torture
from tests.refusals import refuses
from tests.service.harness import TRIVIAL, ServerProcess
from tests.service.http_out import HttpProcess
from tests.unit.test_text_pair import byte_level, sentence_pieces

pytestmark = pytest.mark.e2e

END = "{%% if m['role'] == 'assistant' %%}%s{%% endif %%}"
TEMPLATE = "{%% for m in messages %%}%s{{ m['content'] }}" + END + "{%% endfor %%}"
WORDS = ("the cat and the hat", "cost 10 and 20", "a cat cost 3.50", "12 apples", "def f(x):")


def save_writer(folder: Path, tokenizer: Any, seed: int) -> None:
    """Save a random model whose responses are text: ids of other characters than ASCII are improbable."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from gkd.text.byte_vocab import token_bytes

    torch.manual_seed(seed)
    tokens = token_bytes(tokenizer)
    config = Qwen3Config(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3ForCausalLM(config).float()
    is_text = torch.tensor([token is not None and token.isascii() and token.isalnum() for token in tokens])
    is_text[tokenizer.eos_token_id] = True
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 8.0  # the first number of each state is large, and no layer changes it
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = torch.where(is_text, 1.5, -3.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Make a student with byte-level BPE, a teacher with pieces of SentencePiece, and messages as prompts."""
    root = tmp_path_factory.mktemp("writers")
    student, teacher = byte_level(330, digits=True), sentence_pieces(360, prefix=True)
    student.chat_template, teacher.chat_template = TEMPLATE % ("<|call|>", "<|end|>"), TEMPLATE % ("[user]", "</s>")
    made = Lab(root, root / "teacher", root / "student", root / "train.jsonl", root / "heldout.jsonl")
    save_writer(made.teacher, teacher, 0)
    save_writer(made.student, student, 1)
    rows = [{"prompt": [{"role": "user", "content": f"{word} {i}"}], "answer": "x"} for i in range(8) for word in WORDS]
    for path in (made.train, made.heldout):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


@pytest.fixture(scope="module")
def writer_port(writers: Lab) -> Iterator[int]:
    with ServerProcess(writers.teacher, writers.root, options=ALONE) as server:
        yield server.port


ALL_TOKENS = ("teacher.signal=topk", "teacher.topk=360")
LIST = ("teacher.signal=topk", "teacher.topk=64")
UNITS = ("teacher.signal=units", "teacher.topk=64")


def settings(lab: Lab, *more: str) -> tuple[str, ...]:
    pair = (f"teacher.tokenizer={lab.teacher}", "teacher.signal=hidden", "eval.metric=none")
    return (
        *pair,
        "data.max_prompt_length=60",
        "data.max_response_length=16",
        "trainer.total_steps=2",
        "actor.optim.lr=0.002",
        *more,
    )


def test_student_and_teacher_have_their_own_tokens(writers: Lab, writer_port: int, shared_ray: str) -> None:
    """If it fails, a run compares other texts than the student's, the teacher reads the student's template, its units
    get the rows of the student's tokens, tensor parallelism or packing takes other rows, a stream of real engines does
    not feed the loop, or the student does not come closer to the teacher.
    """
    run_dir = writers.root / "run"
    layout = ("trainer.n_gpus_per_node=2", "actor.tp=2", "actor.packing=true", "trainer.scheduler=stream", *UNITS)
    steps = ("trainer.total_steps=4", "rollout.n=8", "trainer.record_batches=true")
    done = writers.finished_run(run_dir, writer_port, *settings(writers, *layout, *steps), shared_ray)
    assert "have the same bytes in the teacher's" in done.stderr
    lines = steps_of(run_dir)
    for step in (1, 2, 3, 4):
        assert lines[step]["loss/paired"] > 0.8 and 0 < lines[step]["loss/by_nodes"] < 1
        assert 0 < lines[step]["loss/canonical"] < 1
        assert 0.5 < lines[step]["teacher/topk_mass"] < 1
        assert lines[step]["rollout/sequences"] == 48 and lines[step]["staleness/max"] <= 1
    assert lines[4]["eval/kl"] < lines[0]["eval/kl"] and 0 < lines[0]["eval/canonical"] < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("actor.strategy=fsdp2", "trainer.n_gpus_per_node=2"), id="fsdp2-dp2"),
        pytest.param(("actor.pp=2", "actor.tp=2", "trainer.n_gpus_per_node=4"), id="pp2-tp2"),
        pytest.param(("trainer.scheduler=stream", "distill.units=text"), id="stream-text"),
        pytest.param(("teacher.backend=local", "trainer.n_gpus_per_node=2"), id="local"),
        pytest.param(ALL_TOKENS, id="list"),
        pytest.param((*ALL_TOKENS, "teacher.backend=local"), id="list-local"),
    ],
)
def test_other_layouts_train_the_same(writers: Lab, writer_port: int, layout: tuple[str, ...]) -> None:
    """If it fails, the rows of the teacher's tokens get lost between endpoint and ranks in a layout, or a recorded step
    cannot be made again with the teacher's LM head.
    """
    found = []
    for name, more in (("plain", ()), ("other", layout)):
        run_dir = writers.root / f"{name}_{abs(hash(layout))}"
        is_local = "teacher.backend=local" in more
        more = (*more, f"teacher.path={writers.teacher}") if is_local else more
        more = (*more, "trainer.record_batches=true")
        writers.finished_run(run_dir, 15555 if is_local else writer_port, *settings(writers, *more))
        found.append(read_metrics(run_dir / "metrics.jsonl")[1])
        assert replay.main([str(run_dir), "--step", "2"]) == 0
    if "trainer.scheduler=stream" not in layout:  # its batches depend on time
        assert found[0]["loss/total"] == pytest.approx(found[1]["loss/total"], rel=1e-4)
        assert found[0]["optim/grad_norm"] == pytest.approx(found[1]["optim/grad_norm"], rel=1e-4)


def test_an_http_teacher_scores_the_same_tokens(writers: Lab, writer_port: int) -> None:
    """If it fails, a teacher behind an HTTP server gets other texts or other ids than on the teacher server."""
    from gkd.config.check import check_config
    from gkd.config.load import load_config
    from gkd.preflight.run import read_student
    from gkd.preflight.teacher import request_info
    from gkd.preflight.tokenizer_pair import teacher_tokenizer, tokenizer_pair
    from gkd.scoring.endpoint import ScoringEndpoint
    from gkd.scoring.teacher.window import Window

    found: list[tuple[TokenizerPair, list[TeacherScores]]] = []
    with HttpProcess(writer_port, writers.root) as server:
        for more in ((f"teacher.server_port={writer_port}",), ("teacher.backend=http", f"teacher.url=[{server.url}]")):
            folders = (f"model.path={writers.student}", f"data.train_files=[{writers.train}]", "trainer.run_dir=x")
            config = load_config(None, [*folders, *settings(writers, *LIST, "teacher.wire=fp32", *more)])
            check_config(config)
            tokenizer, n_vocab, eos_ids = read_student(config)
            theirs, info = teacher_tokenizer(config), request_info(config.derived.routes[0])
            pair = tokenizer_pair(config, tokenizer, theirs, info, n_vocab, eos_ids)
            ids = [np.array(tokenizer.encode(text) + eos_ids[:1] * (i % 2), np.int32) for i, text in enumerate(WORDS)]
            ids.append(np.array([tokenizer.convert_tokens_to_ids("<|call|>")], np.int32))  # nothing has a pair
            asked = np.array(theirs.encode("[user] x"), np.int32)
            rollouts = [replace(as_rollout(text), response_ids=text, teacher_ids=asked) for text in ids]
            endpoint = ScoringEndpoint(config, pair, [info.fingerprint], [Window(4, 1)])
            found.append((pair, list(endpoint.score(rollouts)[0])))
    (pair, scores), (other_pair, others) = found
    assert (pair.teacher, pair.student) == (other_pair.teacher, other_pair.student)
    lengths = []
    for one, other in zip(scores, others, strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()
        np.testing.assert_array_equal(one.topk.ids, other.topk.ids)
        np.testing.assert_allclose(one.topk.logprobs, other.topk.logprobs, atol=1e-5)
        np.testing.assert_allclose(one.sampled_logprobs, other.sampled_logprobs, atol=1e-5)
        lengths.append(len(one.topk.ids))
    assert min(lengths[:-1]) > 2 and lengths[-1] == 0


@pytest.mark.slow
def test_a_resumed_run_is_bit_exact(writers: Lab, writer_port: int) -> None:
    """If it fails, the scores of a batch that a checkpoint holds lose the teacher's tokens."""
    ahead = settings(writers, "trainer.scheduler=two_step_off", "trainer.total_steps=4", "trainer.save_every=1")
    whole = writers.root / "whole"
    writers.finished_run(whole, writer_port, *ahead)
    runs = Runs(writers, writer_port, writers.root / "killed_logs", (*ahead, "trainer.resume=auto"))
    (outcome,) = torture(runs, whole, writers.root / "killed", [Kill("checkpoint", 3, 0.03, "all")])
    assert outcome.killed and outcome.resumed_from == 0 and outcome.reached == 2


def test_what_cannot_be_paired_is_refused_before_the_start(writers: Lab, writer_port: int) -> None:
    """If it fails, a run starts with another tokenizer than the teacher's, or compares hardly any token."""
    from gkd.config.load import load_config
    from gkd.preflight.run import preflight

    def check(port: int, key: str, *more: str) -> None:
        command = writers.command(writers.root / "refused", port, *settings(writers, *more))
        with refuses(key):
            preflight(load_config(None, command[command.index("--config") + 2 :]))

    rendered, numbers = (writers.root / f"{name}.jsonl" for name in ("rendered", "numbers"))
    rendered.write_text(json.dumps({"prompt": "<|call|>the cat"}) + "\n")
    numbers.write_text(json.dumps({"prompt": [{"role": "user", "content": "10 20 10 20 10 20"}]}) + "\n")
    for key, *more in (
        ("teacher.tokenizer", f"teacher.tokenizer={writers.student}"),
        ("teacher.tokenizer", f"teacher.tokenizer={writers.root / 'absent'}"),
        ("distill.units", "distill.units=nodes", f"data.train_files=[{numbers}]"),
        ("data.prompt_key", f"data.train_files=[{rendered}]"),
        ("teacher.special_tokens.<|end|>", "teacher.special_tokens={'<|end|>': '</s>'}"),
        ("teacher.special_tokens.the", "teacher.special_tokens={the: the}"),
        ("teacher.topk", "teacher.signal=units", "teacher.topk=350"),
    ):
        check(writer_port, key, *more)
    with ServerProcess(writers.teacher, writers.root, options=TRIVIAL) as server:
        check(server.port, "teacher.signal", *UNITS)  # an engine of one's own, without units
