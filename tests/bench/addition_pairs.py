"""Models and baselines of `bench_tokenizers`: the quickstart's addition, with pairs of digits as tokens.

char     a token per byte, as the quickstart
left     pairs of digits from the left:  12345+67=  ->  12 34 5 + 67 =
right    pairs of digits from the right: 12345+67=  ->  1 23 45 + 67 =

    python -m tests.bench.addition_pairs '{"method": "equal", "student": DIR, ...}'

trains one baseline and prints a line of JSON: accuracy and canonical share at each `every` steps. GOLD needs a Python
with TRL, so only `boundaries` imports more of the product than the quickstart.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TrainerCallback

from examples.quickstart.addition import EOS_TOKEN, PAD_TOKEN, Problem, build_tokenizer, extract_answer, read_jsonl
from examples.quickstart.pretrain import ModelRecipe, Parts, train_from_scratch

BATCH, LEARNING_RATE, BETAS = 64, 3e-3, (0.9, 0.95)
WARM_UP, FINAL_LR_SHARE, CLIP = 10, 0.05, 1.0
MAX_RESPONSE = 32
# A run of an odd number of digits begins (right) or ends (left) with a single one.
SPLITS = {"left": r"[0-9]{1,2}|[^0-9]", "right": r"[0-9]{1,2}(?=(?:[0-9]{2})*(?![0-9]))|[^0-9]"}
_TEACHER = ModelRecipe(
    hidden_size=128,
    intermediate_size=384,
    n_layers=3,
    n_heads=4,
    seed=0,
    batch_size=48,
    decay_from_accuracy=0.8,
    stop_accuracy=0.995,
    step_limit=3000,
    min_accuracy=0.99,
    max_accuracy=1.0,
)
_STUDENT = replace(
    _TEACHER,
    intermediate_size=256,
    n_layers=2,
    seed=1,
    batch_size=32,
    decay_from_accuracy=None,
    eval_every=5,
    stop_accuracy=0.06,
    min_accuracy=0.05,
    max_accuracy=0.085,
)
_MODELS = {"student_left": _STUDENT, "student_right": _STUDENT, "teacher_left": _TEACHER}


def make_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE whose merges are the 100 pairs of digits, which `SPLITS` keeps apart; char: no merges."""
    if kind == "char":
        return build_tokenizer()
    vocab = build_tokenizer().get_vocab()
    pairs = [f"{n:02d}" for n in range(100)]
    vocab |= {pair: len(vocab) + i for i, pair in enumerate(pairs)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(pair[0], pair[1]) for pair in pairs]))
    split = pre_tokenizers.Split(Regex(SPLITS[kind]), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    settings = {"eos_token": EOS_TOKEN, "pad_token": PAD_TOKEN, "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **settings)


def make_models(out: Path, train: Sequence[Problem], heldout: Sequence[Problem]) -> dict[str, dict[str, float]]:
    """Make the folders of `_MODELS` that `out` lacks, with another seed if the accuracy is not as required."""
    out.mkdir(parents=True, exist_ok=True)
    report = out / "models.json"
    found: dict[str, dict[str, float]] = json.loads(report.read_text()) if report.exists() else {}
    for name in (name for name in _MODELS if name not in found):
        recipe, tokenizer = _MODELS[name], make_tokenizer(name.partition("_")[2])
        examples = _worked(tokenizer, train[:-256])

        def judge(model: Any, tokenizer: PreTrainedTokenizerFast = tokenizer) -> tuple[float, float]:
            return score(model, tokenizer, train[-256:])

        while name not in found:
            model, steps, _ = train_from_scratch(name, recipe, tokenizer, examples, judge)
            accuracy = score(model, tokenizer, heldout)[0]
            print(f"{name}, seed {recipe.seed}: {accuracy:.1%} after {steps} steps", file=sys.stderr, flush=True)
            if recipe.min_accuracy <= accuracy <= recipe.max_accuracy:
                model.save_pretrained(out / name)
                tokenizer.save_pretrained(out / name)
                found[name] = {"accuracy": accuracy, "steps": steps, "seed": recipe.seed}
                report.write_text(json.dumps(found, indent=1) + "\n")
            recipe = replace(recipe, seed=recipe.seed + 10)
    return found


def _worked(tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]) -> list[Parts]:
    return [
        [
            (tokenizer(problem.prompt)["input_ids"], False),
            ([*tokenizer(problem.response)["input_ids"], tokenizer.eos_token_id], True),
        ]
        for problem in problems
    ]


@torch.no_grad()
def respond(model: Any, tokenizer: Any, prompts: Sequence[str], *, do_sample: bool) -> list[list[int]]:
    """Return the token ids of a response to each prompt, with its end-of-sequence token if it ends."""
    was_training = model.training
    tokens = tokenizer(list(prompts), return_tensors="pt", padding=True)
    output = model.eval().generate(
        tokens["input_ids"],
        attention_mask=tokens["attention_mask"],
        max_new_tokens=MAX_RESPONSE,
        do_sample=do_sample,
        **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} if do_sample else {}),
    )
    model.train(was_training)
    eos = tokenizer.eos_token_id
    rows = output[:, tokens["input_ids"].shape[1] :].tolist()
    return [row[: row.index(eos) + 1] if eos in row else row for row in rows]


def score(model: Any, tokenizer: Any, problems: Sequence[Problem]) -> tuple[float, float]:
    """Return the greedy accuracy, and the share of responses that end and have an answer."""
    responses = respond(model, tokenizer, [problem.prompt for problem in problems], do_sample=False)
    answers = [
        extract_answer(tokenizer.decode(ids[:-1])) if ids[-1] == tokenizer.eos_token_id else None for ids in responses
    ]
    right = sum(answer == problem.answer for answer, problem in zip(answers, problems, strict=True))
    return right / len(problems), sum(answer is not None for answer in answers) / len(problems)


def canonical_share(tokenizer: Any, responses: Sequence[Sequence[int]]) -> float:
    """Return the share of responses that are the tokenizer's own encoding of their text."""
    texts = [[i for i in ids if i != tokenizer.eos_token_id] for ids in responses]
    return sum(tokenizer(tokenizer.decode(ids))["input_ids"] == ids for ids in texts) / len(texts)


def evaluate(model: Any, tokenizer: Any, problems: Sequence[Problem], step: int) -> dict[str, float]:
    """Return accuracy, and the canonical share of one sample per problem, without a trace in the random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sampled = respond(model, tokenizer, [problem.prompt for problem in problems], do_sample=True)
        found = {"accuracy": score(model, tokenizer, problems)[0], "canonical": canonical_share(tokenizer, sampled)}
    print(f"step {step}: {found}", file=sys.stderr, flush=True)
    return {"step": step, **found}


def optimizers(model: Any, steps: int) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """Return AdamW and the learning rate of every program: linear warm-up, then linear decay to the last step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0)

    def share(step: int) -> float:
        decayed = 1 - (1 - FINAL_LR_SHARE) * (step - WARM_UP) / max(1, steps - WARM_UP)
        return (step + 1) / WARM_UP if step < WARM_UP else decayed

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def _padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def _equal_strings(tokenizers: tuple[Any, Any], sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the outcome of each token of both: one per string that is a token of both, and 0 for all others."""
    vocabs = [tokenizer.get_vocab() for tokenizer in tokenizers]
    common = sorted(vocabs[0].keys() & vocabs[1].keys())
    found = [torch.zeros(size, dtype=torch.int64) for size in sizes]
    for outcomes, vocab in zip(found, vocabs, strict=True):
        outcomes[[vocab[string] for string in common]] = torch.arange(1, len(common) + 1)
    return found


def _node_sums(tokenizers: tuple[Any, Any], sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the outcome of each token of both: its node, see `gkd.text.byte_vocab.common_nodes`."""
    from gkd.text.byte_vocab import END, common_nodes, token_bytes

    vocabs = []
    for tokenizer, size in zip(tokenizers, sizes, strict=True):
        tokens = token_bytes(tokenizer)
        tokens[tokenizer.eos_token_id] = END
        vocabs.append([*tokens, *[None] * (size - len(tokens))])
    nodes = common_nodes(*vocabs)
    return [torch.from_numpy(nodes.student), torch.from_numpy(nodes.teacher)]


class CommonBoundaries:
    """Forward KL at the common boundaries, over sums of the tokens with the same outcome."""

    def __init__(self, method: str, student: Any, teacher: Any, tokenizers: tuple[Any, Any]) -> None:
        self.models, self.tokenizers = (student, teacher), tokenizers
        outcomes_of = {"equal": _equal_strings, "boundaries": _node_sums}[method]
        self.outcomes = outcomes_of(tokenizers, [model.config.vocab_size for model in self.models])
        self.n_outcomes = 1 + max(int(outcomes.max()) for outcomes in self.outcomes)

    def loss(self, prompts: Sequence[str], responses: Sequence[list[int]]) -> torch.Tensor:
        """Return the mean over the student's tokens of the forward KL."""
        sides: list[list[list[int]]] = [[], []]
        sequence: list[int] = []
        rows: list[list[int]] = [[], []]
        for prompt, ids in zip(prompts, responses, strict=True):
            ends = ids[-1] == self.tokenizers[0].eos_token_id
            text = self.tokenizers[0].decode(ids[:-1] if ends else ids)
            other = self.tokenizers[1](text)["input_ids"] + ([self.tokenizers[1].eos_token_id] if ends else [])
            pieces = [t.convert_ids_to_tokens(x) for t, x in zip(self.tokenizers, (ids, other), strict=True)]
            if "".join(pieces[0]) != "".join(pieces[1]):
                continue  # not UTF-8
            starts = [dict(zip(accumulate(map(len, p), initial=0), range(len(p)), strict=False)) for p in pieces]
            both = sorted(starts[0].keys() & starts[1].keys())
            sequence += [len(sides[0])] * len(both)
            for side, response in enumerate((ids, other)):
                prompt_ids = self.tokenizers[side](prompt)["input_ids"]
                sides[side].append(prompt_ids + response)
                rows[side] += [len(prompt_ids) - 1 + starts[side][at] for at in both]
        logs = []
        for side in (0, 1):
            with torch.set_grad_enabled(side == 0):
                logits = self.models[side](_padded(sides[side])).logits[sequence, rows[side]]
                sums = logits.new_zeros((len(logits), self.n_outcomes))
                logs.append(sums.index_add(1, self.outcomes[side], logits.softmax(-1)).clamp_min(1e-9).log())
        return (logs[1].exp() * (logs[1] - logs[0])).sum() / sum(map(len, responses))


def run_loop(case: dict[str, Any], student: Any, teacher: Any, tokenizers: tuple[Any, Any]) -> list[dict[str, float]]:
    train, heldout = read_jsonl(Path(case["train"])), read_jsonl(Path(case["heldout"]))
    pair = CommonBoundaries(case["method"], student, teacher, tokenizers)
    optimizer, schedule = optimizers(student, case["steps"])
    found = [evaluate(student, tokenizers[0], heldout, 0)]
    order = torch.cat([torch.randperm(len(train)) for _ in range(1 + case["steps"] * BATCH // len(train))])
    for step, batch in enumerate(order.split(BATCH)[: case["steps"]], 1):
        prompts = [train[i].prompt for i in batch.tolist()]
        pair.loss(prompts, respond(student, tokenizers[0], prompts, do_sample=True)).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % case["every"] == 0:
            found.append(evaluate(student, tokenizers[0], heldout, step))
    return found


def run_gold(case: dict[str, Any], student: Any, teacher: Any, tokenizers: tuple[Any, Any]) -> list[dict[str, float]]:
    """Train with TRL's GOLDTrainer; `case["gold"]` has the settings of its loss that are not the defaults."""
    from datasets import Dataset  # type: ignore[import-not-found]
    from trl.experimental.gold import GOLDConfig, GOLDTrainer  # type: ignore[import-not-found]

    train, heldout = read_jsonl(Path(case["train"])), read_jsonl(Path(case["heldout"]))
    found = [evaluate(student, tokenizers[0], heldout, 0)]

    class Evaluate(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % case["every"] == 0:
                found.append(evaluate(student, tokenizers[0], heldout, state.global_step))

    arguments = GOLDConfig(
        output_dir=case["output"],
        use_uld_loss=True,  # the loss for another tokenizer
        teacher_tokenizer_name_or_path=case["teacher"],
        lmbda=1.0,  # all responses are the student's
        temperature=1.0,
        top_p=1.0,
        max_completion_length=MAX_RESPONSE,
        max_steps=case["steps"],
        per_device_train_batch_size=BATCH,
        max_grad_norm=CLIP,
        seed=case["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **case["gold"],
    )
    GOLDTrainer(
        model=student,
        teacher_model=teacher,
        args=arguments,
        # The completions are not used: lmbda is 1.
        train_dataset=Dataset.from_list([{"prompt": p.prompt, "completion": p.response} for p in train]),
        processing_class=tokenizers[0],
        callbacks=[Evaluate()],
        optimizers=optimizers(student, case["steps"]),
    ).train()
    return found


def main(case: dict[str, Any]) -> list[dict[str, float]]:
    torch.set_num_threads(1)
    torch.manual_seed(case["seed"])
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(case[role], dtype=torch.float32, local_files_only=True)
        for role in ("student", "teacher")
    )
    tokenizers = tuple(
        AutoTokenizer.from_pretrained(case[role], padding_side="left") for role in ("student", "teacher")
    )
    return (run_gold if case["gold"] is not None else run_loop)(case, student, teacher.eval(), tokenizers)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
