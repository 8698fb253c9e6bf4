"""Draw random flags for TRL's distillation scripts, and compare what TRL and our Config make of them.

    PYTHONPATH=DIR python -m tests.bench.trl_flags --json docs/results/trl_flags.json      # about 5 minutes

DIR has TRL, as for `tests.bench.bench_trl`. TRL's own TrlParser reads the flags with the dataclasses of the script, and
`gkd.tools.migrate` writes our YAML from the same ones. A setting without an equal here has to be refused, and no other
one may be. What the trainers do with a field, which no dataclass has, is in `_expected`. `--rounds`: sets of flags.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

from gkd.config.dialects.table import dialects, plain
from gkd.config.load import load_config
from gkd.tools.migrate.__main__ import migrate
from gkd.tools.migrate.convert import convert
from gkd.tools.migrate.read import settings_of
from tests.bench.command import parsed, parser, run_parts
from tests.bench.teacher_report import Figure, Part, Table

PARTS = ("trl_gkd", "trl_distillation", "trl_server", "trl_gold")
_PROCESSES = 4  # of accelerate: TRL's parser has no such flag
_NO_EQUAL = "no equal here"
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
_ALWAYS = ["--model_name_or_path", "student", "--output_dir", "run", "--use_cpu", "True"]
_TEACHER = {"trl_server": ["--teacher_model_server_url", "http://localhost:8000"]}
# Dialects: flags with the values to draw from; a frequent value stands several times.
_FLAGS = """
gkd distillation server gold: per_device_train_batch_size 1|2|4|16; gradient_accumulation_steps 1|2|8
gkd distillation server gold: learning_rate 1e-6|2e-5|3.0e-4; warmup_steps 0|10|200|0.1; max_steps -1|30|500
gkd distillation server gold: lr_scheduler_type linear|cosine|constant|constant_with_warmup|polynomial|inverse_sqrt
gkd distillation server gold: num_train_epochs 1|2|5|0.5; weight_decay 0|0.01|0.1; max_grad_norm 0.5|1.0; seed 1|7|42
gkd distillation server gold: adam_beta1 0.8|0.9; adam_beta2 0.95|0.999; adam_epsilon 1e-8|1e-6; save_steps 50|500
gkd distillation server gold: gradient_checkpointing True|False; save_strategy no|steps; temperature 0.6|0.9|1.0|1.5
gkd distillation server gold: use_peft True|False; lora_r 8|64; lora_alpha 16|64
gkd distillation server gold: lora_target_modules all-linear|q_proj k_proj|o_proj
gkd distillation gold: beta 0|0.0|0.1|0.5|0.9|1|1.0
gkd: lmbda 0.0|0.25|0.5|1|1.0|1.0; max_new_tokens 64|128|256
gkd gold: max_length 512|1024|4096
distillation server gold: top_p 0.9|0.95|1.0; top_k 0|0|0|20; data_seed 3|4
distillation server: min_p 0.0|0.0|0.05; repetition_penalty 1.0|1.0|1.1; shuffle_dataset True|False
distillation server: max_completion_length 64|512|2048
server: beta 0|0.0|0.0|1.0|0.5; loss_top_k 1|1|8|64; loss_add_tail True|False
gold: lmbda 0.0|0.5|1|1.0|1.0; max_completion_length 64|128|256; num_generations 1|2|4; seq_kd True|False
gold: use_uld_loss False|False|True; vllm_sync_frequency 1|1|4
"""


def _draws(name: str, n: int) -> Iterator[tuple[list[str], Any, Any]]:
    """Yield n sets of flags that TRL accepts, with its training and model arguments."""
    from trl import DistillationConfig, ModelConfig, ScriptArguments, TrlParser  # type: ignore[import-not-found]
    from trl.experimental.gkd import GKDConfig  # type: ignore[import-not-found]
    from trl.experimental.gold import GOLDConfig  # type: ignore[import-not-found]
    from trl.experimental.server_distillation import ServerDistillationConfig  # type: ignore[import-not-found]

    configs = (GKDConfig, DistillationConfig, ServerDistillationConfig, GOLDConfig)
    trl = TrlParser((ScriptArguments, configs[PARTS.index(name)], ModelConfig))
    lines = [line.split(": ") for line in _FLAGS.strip().splitlines()]
    groups = [rest.split("; ") for kinds, rest in lines if name.removeprefix("trl_") in kinds.split()]
    rng = random.Random(name)
    while n:
        words = _ALWAYS + _TEACHER.get(name, ["--teacher_model_name_or_path", "teacher"])
        for flag, values in (each.split(" ", 1) for group in groups for each in group):
            if rng.random() < 0.5:
                words = [*words, f"--{flag}", *rng.choice(values.split("|")).split()]
        with contextlib.suppress(ValueError):
            _, args, model = trl.parse_args_and_config(args=words)
            n -= 1
            yield words, args, model


def _expected(name: str, args: Any, model: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield names there, keys here, and the value that TRL 1.16 trains with."""
    is_gkd, is_server, is_gold = (name == f"trl_{each}" for each in ("gkd", "server", "gold"))
    lmbda, n, response = getattr(args, "lmbda", 1.0), getattr(args, "num_generations", 1), "max_completion_length"
    response = "max_new_tokens" if is_gkd else response
    loss = {0: "forward_kl", 1: "reverse_kl"}.get(args.beta, "jsd")
    yield "beta", "distill.loss", _NO_EQUAL if is_server and args.beta else loss  # only the sampled token and a bucket
    yield "beta", "distill.beta", args.beta if loss == "jsd" and not is_server else 0.5
    yield "lmbda", "distill.on_policy_share", lmbda
    yield "temperature", "rollout.temperature", args.temperature
    yield "temperature", "teacher.temperature", 1.0 if is_gkd else args.temperature
    yield "top_p", "rollout.top_p", getattr(args, "top_p", 1.0)
    yield "top_k", "rollout.top_k", getattr(args, "top_k", 0)
    yield "min_p", "rollout.min_p", getattr(args, "min_p", None) or 0.0
    off = {"repetition_penalty": 1, "use_uld_loss": False, "vllm_sync_frequency": 1}
    for switch in off:
        yield switch, "", _NO_EQUAL if getattr(args, switch, off[switch]) not in (off[switch], 0) else None
    yield "num_generations", "rollout.n", _NO_EQUAL if n > 1 and lmbda < 1 else n  # copies of the dataset's responses
    yield response, "data.max_response_length", getattr(args, response)
    if is_gkd or is_gold:
        yield "max_length", "data.max_prompt_length", args.max_length - (args.max_completion_length if is_gold else 0)
    if is_server:
        yield "loss_top_k", "teacher.topk", 64 if args.beta else args.loss_top_k
        yield "loss_add_tail", "distill.tail", "bucket" if args.beta or args.loss_add_tail else "renorm"
    batch, schedule = args.per_device_train_batch_size, args.lr_scheduler_type.value
    yield "per_device_train_batch_size", "distill.normalize", "sequence" if is_server and batch == 1 else "token"
    total = batch * args.gradient_accumulation_steps * _PROCESSES // n
    yield "per_device_train_batch_size", "trainer.global_batch_size", total
    yield "learning_rate", "actor.optim.lr", args.learning_rate
    yield "lr_scheduler_type", "actor.optim.schedule", _SCHEDULES.get(schedule, _NO_EQUAL)
    warmup = 0 if schedule == "constant" else args.get_warmup_steps(args.max_steps)
    in_data = schedule != "constant" and 0 < args.warmup_steps < 1 and args.max_steps <= 0  # a share of unknown steps
    yield "warmup_steps", "actor.optim.warmup_steps", _NO_EQUAL if in_data else warmup
    yield "weight_decay", "actor.optim.weight_decay", args.weight_decay
    yield "adam_beta1", "actor.optim.betas", [args.adam_beta1, args.adam_beta2]
    yield "adam_epsilon", "actor.optim.eps", args.adam_epsilon
    yield "max_grad_norm", "actor.optim.clip_grad", args.max_grad_norm
    epochs = args.max_steps if args.max_steps > 0 else args.num_train_epochs  # TRL repeats the data until max_steps
    yield "num_train_epochs", "trainer.total_epochs", _NO_EQUAL if epochs % 1 else epochs
    yield "max_steps", "trainer.total_steps", max(args.max_steps, 0)
    yield "seed", "data.seed", args.seed
    yield "shuffle_dataset", "data.shuffle", is_gkd or is_gold or args.shuffle_dataset
    yield "gradient_checkpointing", "actor.recompute", "full" if args.gradient_checkpointing else "none"
    yield "save_steps", "trainer.save_every", 0 if args.save_strategy == "no" else args.save_steps
    yield "use_peft", "actor.lora.rank", model.lora_r if model.use_peft else 0
    if model.use_peft and model.lora_target_modules != "all-linear":
        targets = model.lora_target_modules or ["q_proj", "v_proj"]  # PEFT's for Llama, Qwen and Gemma
        yield "use_peft", "actor.lora.targets", [targets] if isinstance(targets, str) else targets
        yield "use_peft", "actor.lora.alpha", model.lora_alpha


def measure(name: str, n: int, folder: Path) -> Part:
    counts, refused_names, rows = Counter[str](), Counter[str](), list[tuple[str, ...]]()
    for words, args, model in _draws(name, n):
        flags = [*words, "--num_processes", str(_PROCESSES)]
        file = folder / "migrated.yaml"
        file.write_text(migrate(name, None, flags)[0])
        config = load_config(file)
        entries = convert(dialects()[name], settings_of(flags).of(dialects()[name]))
        refused = {plain(each.old) for each in entries if each.status in ("refused", "to set", "not recognized")}
        expected = list(_expected(name, args, model))
        without_equal = {each for each, _, value in expected if value == _NO_EQUAL}
        refused_names.update(refused)
        wrong = [(each, "", _NO_EQUAL, "accepted") for each in without_equal - refused]
        wrong += [(each, "", "has an equal", "refused") for each in refused - without_equal]
        for each, key, value in expected:
            if key and each not in refused | without_equal:
                here = attrgetter(key)(config)
                counts["compared"] += 1
                wrong += [(each, key, str(value), str(here))] if here != value else []
        counts["different"] += len(wrong)
        rows += [each for each in wrong if each not in rows]
    line: list[str | float] = [name, n, counts["compared"], refused_names.total(), counts["different"]]
    tables = [Table("values", ["dialect", "sets", "values compared", "refused", "different"], [line])]
    tables.append(Table("refused", ["setting", "sets"], sorted(refused_names.items())))
    tables += [Table("different", ["setting", "key", "TRL", "here"], sorted(rows)[:20])] if rows else []
    what = f"{n} random sets of flags, read by TRL's parser and by gkd.tools.migrate {name}."
    return Part(name, what, [Figure("different values", counts["different"], at_most=0)], tables)


if __name__ == "__main__":
    asked = parsed(parser("tests.bench.trl_flags", __doc__ or "", PARTS, 200), PARTS, None)
    with tempfile.TemporaryDirectory() as out:
        sys.exit(run_parts(asked, lambda name: measure(name, asked.rounds, Path(out))))
