"""`gkd generate --data FILE --out OUT.jsonl`: let the teacher write answers to the prompts of a file.

A run with `distill.on_policy_share` below 1 then trains on them: `data.response_key` reads their ids as they are.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gkd.config.load import add_config, load_config, parse_overrides
from gkd.console.numbers import clock, count
from gkd.data.prompts import ids_column
from gkd.data.responses import answer_text
from gkd.data.row_files import decode_row, fingerprint
from gkd.errors import ConfigError, DataError, ModelError
from gkd.log import get_logger
from gkd.preflight.dataset import DatasetPlan, check_generation
from gkd.rollout.vllm.sampling import sequence_seed
from gkd.run import interrupts
from gkd.scoring.reward.judging import RewardWorkers
from gkd.scoring.reward.worker import Case, Start
from gkd.scoring.teacher.info import TeacherArgs
from gkd.scoring.teacher.teacher import open_teacher
from gkd.tools import exit_codes
from gkd.tools.answer_file import AnswerFile
from gkd.types import Prompt
from gkd.user_code import search_path
from teacher_server.client.generate import AnswerSettings, NamedPrompt
from teacher_server.config.command import command_parser
from teacher_server.wire.protocol import MAX_SEQUENCES, MAX_TOKENS, token_digest

log = get_logger("generate")

_EXAMPLES = """examples:
  gkd generate --config mine.yaml --data prompts.jsonl --out answers.jsonl
  gkd generate --config mine.yaml --data prompts.jsonl --out answers.jsonl -n 8 --keep exact_match
  gkd generate model.path=STUDENT teacher.server_ip=HOST --data prompts.jsonl --out answers.jsonl

The teacher server needs --engine vllm; teacher.backend=http works, too. Each row of OUT is a row of FILE with an
answer: its text in the column data.response_key, its token ids in the column of this name with _ids. The same command
goes on after an interruption.
Then train on them: data.train_files=[answers.jsonl] distill.on_policy_share=0

exit code: 0 all prompts are answered, 1 the teacher, the function or the disk failed, 2 wrong settings, data or models,
130 interrupted
"""
_REPORT_S = 10.0
_COLDEST = 0.01  # vLLM raises lower temperatures to it
_PATIENCE_S = 3600.0  # for the answers of one request; a server that is gone is noticed after teacher.outage_budget_s
_AHEAD = 4  # answers over HTTP that have begun or wait, for each one in flight: a long one delays few others
_HALF = 0.5


@exit_codes(ConfigError, DataError, ModelError)
def main(argv: list[str] | None = None) -> int:
    """Run the tool and return its exit code, see `_EXAMPLES`."""
    args = _parse(argv)
    interrupts.install()
    own = [f"data.train_files={json.dumps([args.data])}", f"trainer.run_dir={json.dumps(f'{args.out}.run')}"]
    try:
        generate(check_generation(load_config(args.config, [*args.overrides, *own])), args)
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on after the answers in {args.out}", file=sys.stderr)
        return 130
    return 0


def generate(plan: DatasetPlan, args: argparse.Namespace) -> None:
    """Write the answers that the file lacks, and log the progress.

    Args:
        args: of the command line.

    Raises:
        ConfigError: the file has other answers.
        DataError: a row has a value that JSON does not have.
        RewardError: the function of --keep failed.
        TeacherError, TeacherUnavailable: see `Teacher`.
    """
    config = plan.config
    teacher = plan.teachers[0]
    max_tokens = args.max_tokens or config.data.max_response_length
    how = AnswerSettings(args.n, args.temperature, args.top_p, max_tokens, plan.n_vocab, plan.eos_ids)
    of_teacher = [prompt.token_ids if prompt.teacher_ids is None else prompt.teacher_ids for prompt in plan.prompts]
    settings = {
        "teacher": teacher.fingerprint,
        "teacher's probe": list(teacher.probe.logprobs) if teacher.probe else None,
        "data": fingerprint(config.data.train_files[0], "data.train_files")["xxh3_128"],
        "prompts": token_digest(np.concatenate(of_teacher)).hex(),
        "column": config.data.response_key,
        "seed": config.data.seed,
        "-n": how.n,
        "--temperature": how.temperature,
        "--top-p": how.top_p,
        "--max-tokens": how.max_tokens,
        "--keep": args.keep,
    }
    file = AnswerFile(Path(args.out), settings)
    judge = Judge(plan, args.keep) if args.keep else None
    rows = AnswerRows(plan, judge)
    log.info("%d of %d prompts are to answer, into %s", len(plan.prompts) - file.n_prompts, len(plan.prompts), args.out)
    try:
        progress = _Progress(len(plan.prompts) - file.n_prompts)
        for prompt, answers in _answered(plan, of_teacher, file.n_prompts, how):
            file.append(rows.of(prompt, answers))
            progress.add(sum(map(len, answers)))
    finally:
        file.close()
        if judge is not None:
            judge.close()
    left_out = f"{rows.n_refused} answers that --keep refuses and {rows.n_empty} empty ones are left out"
    log.info("%s has answers to all %d prompts; of this start, %s", args.out, len(plan.prompts), left_out)


def _answered(
    plan: DatasetPlan, of_teacher: Sequence[np.ndarray], first: int, how: AnswerSettings
) -> Iterator[tuple[Prompt, list[np.ndarray]]]:
    """Yield each prompt from `first` on and its answers, in order; one request more than workers is in flight.

    Args:
        of_teacher: [P] int32, the prompt that the teacher reads.
    """
    named = [
        NamedPrompt(decode_row(prompt.row or b"")[0], ids, sequence_seed(plan.config.data.seed, prompt.prompt_id))
        for prompt, ids in zip(plan.prompts[first:], of_teacher[first:], strict=True)
    ]
    info = plan.teachers[0]
    longest = max((len(prompt.ids) for prompt in named), default=1)
    size = max(1, min(MAX_SEQUENCES // how.n, how.most_prompts, MAX_TOKENS // longest))
    n_requests = max(1, info.n_workers) + 1
    n_in_flight = n_requests * MAX_SEQUENCES
    if not info.is_server:
        size = 1
        n_in_flight = info.n_streams
        n_requests = _AHEAD * -(-n_in_flight // how.n)
    patient = replace(plan.config.teacher, request_timeout_s=max(_PATIENCE_S, plan.config.teacher.request_timeout_s))
    waiting = deque[Future[list[np.ndarray]]]()
    same = TeacherArgs(k=0, n_vocab=plan.n_vocab, n_in_flight=n_in_flight, fingerprint=info.fingerprint)
    with closing(open_teacher(patient, probe=info.probe, **same)) as teacher:
        chunks = [named[start : start + size] for start in range(0, len(named), size)]
        position = first
        for chunk in chunks[:n_requests]:
            waiting.append(teacher.generate(chunk, how))
        for index, chunk in enumerate(chunks):
            answers = waiting.popleft().result()
            if index + n_requests < len(chunks):
                waiting.append(teacher.generate(chunks[index + n_requests], how))
            for i in range(len(chunk)):
                yield plan.prompts[position], answers[i * how.n : (i + 1) * how.n]
                position += 1


class AnswerRows:
    """Make the rows of answers, and count those that are left out: refused by the judge, or without text."""

    def __init__(self, plan: DatasetPlan, judge: Judge | None) -> None:
        self.n_empty = 0
        self.n_refused = 0
        self._plan = plan
        self._judge = judge

    def of(self, prompt: Prompt, answers: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        """Return the rows of a prompt's answers, [R] int32 each. Raises DataError: JSON cannot hold the row."""
        where, row = decode_row(prompt.row or b"")
        try:
            json.dumps(row)
        except (TypeError, ValueError) as error:
            raise DataError(f"{where}: its columns cannot be written as JSON ({error}); convert them") from error
        column = self._plan.config.data.response_key
        ids = [answer.tolist() for answer in answers]
        texts = [answer_text(self._plan.tokenizer, answer, self._plan.eos_ids) for answer in ids]
        written = [(text, answer) for text, answer in zip(texts, ids, strict=True) if text]
        self.n_empty += len(ids) - len(written)
        if self._judge is not None and written:
            kept = self._judge.kept(prompt, [answer for _, answer in written])
            self.n_refused += kept.count(False)
            written = [pair for pair, is_kept in zip(written, kept, strict=True) if is_kept]
        return [{**row, column: text, ids_column(column): answer} for text, answer in written]


class Judge:
    """Decide which answers are kept: those to which a reward function gives at least a half.

    Args:
        path: of the function, as in reward.functions.

    Raises:
        RewardError: it cannot be imported.
    """

    def __init__(self, plan: DatasetPlan, path: str) -> None:
        self._plan = plan
        self._workers = RewardWorkers(Start(plan.config, (path,), search_path()), 1, plan.config.reward.timeout_s)
        self._workers.wait_ready(plan.config.trainer.init_timeout_s)

    def kept(self, prompt: Prompt, answers: Sequence[list[int]]) -> list[bool]:
        """Return whether each answer of a prompt is kept; an undecided one is not. Raises RewardError."""
        tokenizer = self._plan.tokenizer
        text = tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=True)
        cases = [
            Case(
                text,
                tokenizer.decode(ids, skip_special_tokens=True),
                prompt.row or b"",
                len(ids),
                truncated=ids[-1] not in self._plan.eos_ids,
            )
            for ids in answers
        ]
        return [_HALF <= value < math.inf for value in self._workers.values([0], cases)[:, 0].tolist()]

    def close(self) -> None:
        self._workers.close()


@dataclass
class _Progress:
    """Log how many prompts are answered, every few seconds and at the end."""

    n_prompts: int
    n_done: int = 0
    n_tokens: int = 0

    def __post_init__(self) -> None:
        self._began_s = self._reported_s = time.monotonic()

    def add(self, n_tokens: int) -> None:
        """Add a prompt, whose answers have `n_tokens` tokens together."""
        self.n_done += 1
        self.n_tokens += n_tokens
        now_s = time.monotonic()
        if now_s - self._reported_s > _REPORT_S or self.n_done == self.n_prompts:
            self._reported_s = now_s
            took_s = now_s - self._began_s
            left_s = (self.n_prompts - self.n_done) * took_s / self.n_done
            rate = f"{count(self.n_tokens / took_s)} tok/s"
            log.info("answered %d/%d prompts  %s  ETA %s", self.n_done, self.n_prompts, rate, clock(left_s))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    description = "Let the teacher write answers to the prompts of a file, for a warm-up of the student on them."
    parser = command_parser("gkd generate", description, _EXAMPLES)
    add_config(parser, "settings of the run, as for gkd train", required=False)
    parser.add_argument("--data", required=True, metavar="FILE", help="prompts, JSONL or parquet")
    parser.add_argument("--out", required=True, metavar="OUT.jsonl", help="answers; OUT.jsonl.progress is made, too")
    parser.add_argument("-n", type=int, default=1, metavar="N", help=f"answers to each prompt, 1 to {MAX_SEQUENCES}")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: the most probable tokens; default 1")
    parser.add_argument("--top-p", type=float, default=1.0, help="probability of the tokens to sample from; default 1")
    parser.add_argument("--max-tokens", type=int, default=0, help="of an answer; default data.max_response_length")
    about = "keep the answers to which this function gives at least 0.5: a path as in reward.functions"
    parser.add_argument("--keep", default="", metavar="FUNCTION", help=about)
    args = parse_overrides(parser, argv)
    if not 1 <= args.n <= MAX_SEQUENCES or (args.n > 1 and args.temperature == 0):
        parser.error(f"-n {args.n}: give 1 to {MAX_SEQUENCES}, and 1 with --temperature 0, which has one answer")
    if not ((args.temperature == 0 or _COLDEST <= args.temperature < math.inf) and 0 < args.top_p <= 1):
        parser.error(f"--temperature {args.temperature} --top-p {args.top_p}: give 0 or >= {_COLDEST}, above 0 up to 1")
    if not 0 <= args.max_tokens <= MAX_TOKENS // args.n:
        parser.error(f"--max-tokens {args.max_tokens}: with -n {args.n} give at most {MAX_TOKENS // args.n}")
    return args


if __name__ == "__main__":
    sys.exit(main())
