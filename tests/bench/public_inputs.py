"""Try what users of such systems bring, and measure what reading and checking it costs.

    python -m tests.bench.public_inputs [--only prompts,folders,log,cost,memory] [--json FILE]

prompts: rows that other systems' users reported, before (commit 9cae5fc) and now
folders: model folders that they reported, given as the student
log: every problem that was tried, and the tests that show what happens now; these tests run
cost: time of reading, rendering and checking a row, against the tokenizer's own chat template
memory: a 400 MB file whose rows have a large column that is not used and one emoji, JSONL and parquet, and
    1,000,000 rows of about 100 tokens
"""

from __future__ import annotations

import json
import logging
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gkd.config.schema import Config
from gkd.config.schema_sections import DataConfig
from gkd.config.schema_teacher import TeacherConfig
from gkd.data.prompts import RowReader, load_prompts
from gkd.errors import ConfigError
from tests.bench import public_log
from tests.bench.command import in_fresh_process, parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part, Table
from tests.unit.chat_templates import FAMILIES, tokenizer

USER = {"role": "user", "content": "Q"}
# The template of Qwen3's kind: it renders strings alone.
STRINGS = FAMILIES["chatml"].replace("m.content", "(m.content if m.content is string else '')")
BY_ROLE = FAMILIES["chatml"].replace(" in messages %}", " in messages if m.role in ['user', 'assistant', 'system'] %}")
RENDERED = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
# id, what is tried, template, what the tokenizer puts around a text, prompt, settings, what happened before.
CHATML, ANSWERED = FAMILIES["chatml"], [USER, {"role": "assistant", "content": "A"}]
PARTS_OF_TEXT = [{"role": "user", "content": [{"type": "text", "text": "Q"}]}]
OFF, IN_PROMPT = {"chat_template_kwargs": {"enable_thinking": False}}, "trained on the answer in the prompt"
CASES: list[tuple[str, str, str | None, str, Any, dict[str, Any], str]] = [
    ("01", "text parts, template of strings", STRINGS, "", PARTS_OF_TEXT, {}, "trained without the text"),
    ("02", "from/value, template by role", BY_ROLE, "", [{"from": "human", "value": "Q"}], {}, "trained on no text"),
    ("03", "the answer is the last message", CHATML, "", ANSWERED, {}, IN_PROMPT),
    ("03", "the same, response_key empty", CHATML, "", ANSWERED, {"response_key": ""}, IN_PROMPT),
    (
        "04",
        "rendered, with a beginning",
        None,
        "<s> $A",
        "<s>" + RENDERED,
        {"chat_template": "never"},
        "two beginnings",
    ),
    ("04", "rendered, chat_template auto", CHATML, "", RENDERED, {}, "rendered twice"),
    ("06", "half of a surrogate pair", None, "", "1\ud83d2+3=", {}, "traceback"),
    ("37", "JSON text of messages", CHATML, "", json.dumps([USER]), {}, "JSON in the prompt"),
    ("38", "thinking switched off", FAMILIES["chatml_no_thinking"], "", "Q", OFF, "no such key"),
    ("41", "tokenizer appends an end", None, "$A </s>", "Q", {}, "the end in the prompt"),
]
# Damage of tests.unit.test_model_folders -> id, what happened before.
FOLDERS = {
    "_merged_adapter": ("46", "engine hf applied the adapter to merged weights"),
    "_adapter_only": ("13", "config.json cannot be read"),
    "_other_head": ("14", "WeightSyncError after 20 s"),
    "_only_head": ("14", "refused, without the reason"),
    "_leftover_quantization": ("30", "traceback of the engine after 27 s"),
    "_stale_index": ("12", "the copy is incomplete (it is complete)"),
    "_lost_index": ("12", "convert to safetensors (it is)"),
}
ROWS = 20_000


def prompts(rounds: int) -> Part:
    rows, silent = [], 0
    for name, what, template, post, prompt, settings, before in CASES:
        made = tokenizer(template, post)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "p.jsonl"
            file.write_text(json.dumps({"prompt": prompt}) + "\n")
            try:
                (found,), _ = load_prompts([str(file)], "data.train_files", RowReader(DataConfig(**settings), made))
                now = repr(made.decode(found.token_ids))
                silent += (
                    now.count("Q") + now.count("2+3") != 1 or now.count("<s>") > 1 or "</s>'" in now or "[{" in now
                )
            except ConfigError as error:
                now = f"refused: {error.problem.replace(folder, '...')} Fix: {error.fix}"
        rows.append((name, what, before, now))
    table = Table("prompts", ("id", "input", "before", "now"), rows)
    figures = [Figure("rows that train on something else", silent, at_most=0)]
    return Part("prompts", "What the student reads.", figures, (table,))


def folders(rounds: int) -> Part:
    from gkd.preflight.student import check_student
    from tests.dist.megatron_reference import make_hf_folder
    from tests.unit import test_model_folders

    rows, accepted = [], 0
    damages = {damage.__name__: damage for damage, _ in test_model_folders.DAMAGES}
    with tempfile.TemporaryDirectory() as root:
        sound = make_hf_folder(Path(root) / "sound", "qwen2_tied")
        for name, (number, before) in FOLDERS.items():
            folder = Path(shutil.copytree(sound, Path(root) / name))
            damages[name](folder)
            lengths = {"data.max_prompt_length": 16, "data.max_response_length": 16}
            config = Config().with_values({"model.path": str(folder), **lengths})
            try:
                check_student(config)
                now, accepted = "accepted", accepted + 1
            except ConfigError as error:
                now = f"refused: {error.problem} Fix: {error.fix}".replace(root, "...")
            rows.append((number, name.strip("_").replace("_", " "), before, now))
    table = Table("folders", ("id", "folder", "before", "now"), rows)
    figures = [Figure("folders that programs read differently and that are accepted", accepted, at_most=0)]
    return Part("folders", "The check before any process starts.", figures, (table,))


def chat_rows(n: int) -> list[dict[str, Any]]:
    """Return rows with one message of 45 words of the project's documentation, about 100 tokens."""
    words = " ".join(path.read_text() for path in sorted(Path("docs").glob("*.md"))).split()
    rng = random.Random(0)
    texts = (" ".join(words[start : start + 45]) for start in (rng.randrange(len(words) - 45) for _ in range(n)))
    return [{"prompt": [{"role": "user", "content": text}]} for text in texts]


def trained_tokenizer() -> Any:
    """Return a tokenizer with 8,000 tokens that are trained on the documentation, and a ChatML template."""
    from tokenizers import trainers

    made = tokenizer(FAMILIES["chatml_default_system"])
    texts = [path.read_text() for path in sorted(Path("docs").glob("*.md"))]
    special = sorted(made.get_added_vocab())
    inner = made.backend_tokenizer
    inner.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=8000, special_tokens=special, show_progress=False))
    return made


def cost(rounds: int) -> Part:
    made, rows = trained_tokenizer(), chat_rows(3000)
    reader = RowReader(DataConfig(), made, TeacherConfig())
    n_tokens = sum(len(reader.read(row, "row").prompt.ids) for row in rows) / len(rows)

    def plain() -> None:
        for row in rows:
            made.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=True)

    def checked() -> None:
        for row in rows:
            reader.read(row, "row")

    seconds: dict[str, list[float]] = {"plain": [], "checked": []}
    for _ in range(rounds):
        for name, run in (("plain", plain), ("checked", checked)):
            began = time.process_time()
            run()
            seconds[name].append(time.process_time() - began)
    ratio = min(seconds["checked"]) / min(seconds["plain"])
    figure = Figure(
        "time of reading, rendering, checking / rendering", ratio, at_most=1.15, note=f"{n_tokens:.0f} tokens"
    )
    return Part("cost", "CPU time, the best of each.", [figure])


def status_bytes(name: str) -> int:
    """Return a size of this process from /proc/self/status."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def peak(case: dict[str, Any]) -> dict[str, Any]:
    """Load a file in this process; return the growth of its memory peak in bytes, and the file's size."""
    logging.getLogger("gkd").setLevel(logging.ERROR)
    made = trained_tokenizer() if case["chat"] else tokenizer()
    load_prompts([case["small"]], "data.train_files", RowReader(DataConfig(), made))
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins again. A child begins with the peak of its parent.
    before = status_bytes("VmRSS")
    found, _ = load_prompts([case["file"]], "data.train_files", RowReader(DataConfig(), made))
    return {"grown": status_bytes("VmHWM") - before, "bytes": Path(case["file"]).stat().st_size, "prompts": len(found)}


def memory(rounds: int) -> Part:
    import pyarrow as pa
    import pyarrow.parquet as pq

    figures = []
    with tempfile.TemporaryDirectory() as folder:
        large = [{"prompt": "What is 2+2? 🙂" if i == 9 else "What is 2+2?", "unused": ""} for i in range(ROWS)]
        for row in large:
            row["unused"] = random.Random(id(row)).randbytes(10_000).hex()
        files = {"jsonl": Path(folder) / "p.jsonl", "parquet": Path(folder) / "p.parquet"}
        with files["jsonl"].open("w") as out:
            out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in large)
        pq.write_table(pa.Table.from_pylist(large), files["parquet"], compression="none")
        small = Path(folder) / "small.jsonl"
        small.write_text('{"prompt": "a"}\n')
        del large
        for kind, file in files.items():
            case = {"file": str(file), "small": str(small), "chat": False}
            found = in_fresh_process("tests.bench.public_inputs", case, threads=1, timeout_s=600)
            name = f"{kind}: memory / size of the file"
            figures.append(
                Figure(name, found["grown"] / found["bytes"], at_most=0.3, note=f"{found['bytes'] >> 20} MiB")
            )
        many, rows = Path(folder) / "many.jsonl", [json.dumps(row) + "\n" for row in chat_rows(1000)]
        with many.open("w") as out:
            out.writelines(rows[i % 1000] for i in range(1_000_000))
        case = {"file": str(many), "small": str(small), "chat": True}
        found = in_fresh_process("tests.bench.public_inputs", case, threads=1, timeout_s=2400)
        figures.append(Figure("1,000,000 rows of 100 tokens: bytes / row", found["grown"] / found["prompts"]))
    return Part("memory", "Growth of the peak of resident memory while a file is loaded.", figures)


def log(rounds: int) -> Part:
    return public_log.measure()


PARTS: dict[str, Callable[[int], Part]] = {
    "prompts": prompts,
    "folders": folders,
    "log": log,
    "cost": cost,
    "memory": memory,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a figure missed its goal. With a JSON object as the only argument: `peak` of it."""
    words = sys.argv[1:] if argv is None else argv
    if words and words[0].startswith("{"):
        print(json.dumps(peak(json.loads(words[0]))))
        return 0
    args = parsed(parser("tests.bench.public_inputs", __doc__ or "", PARTS, rounds=5), PARTS, argv)
    return run_parts(args, lambda name: PARTS[name](args.rounds))


if __name__ == "__main__":
    sys.exit(main())
