"""`gkd export RUN --out DIR`: write the student of a checkpoint as a Hugging Face folder, as its run would export it.

Starts no process of a run and needs no GPU: one parameter at a time is read from the checkpoint's files.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from gkd.config.load import load_config
from gkd.console.state import RunState
from gkd.console.summary import model_card, serve_command
from gkd.errors import ConfigError
from gkd.hf.hub import upload, with_local_copies
from gkd.metrics.writer import read_metrics
from gkd.run.checkpoints import ACTOR, CheckpointStore, step_of, verified
from gkd.run.disk import replace_file
from gkd.run.folder import CARD, CHECKPOINTS
from gkd.tools import exit_codes
from teacher_server.config.command import command_parser

_EXAMPLES = """examples:
  gkd export runs/mine --out exports/mine                 # the newest checkpoint
  gkd export runs/mine --step 200 --out exports/step_200
  gkd export runs/mine --best --out exports/best --push ORG/NAME

README.md in the folder is a model card. --push makes the repository, private, if there is none; HF_TOKEN is the token.

exit code: 0 done, 1 the disk or the hub failed, or a file is damaged; 2 no such run or checkpoint, or DIR exists
"""


@exit_codes(ConfigError)
def main(argv: list[str] | None = None) -> int:
    """Run the tool and return its exit code, see `_EXAMPLES`."""
    args = _parse(argv)
    folder = find_checkpoint(args.run, args.step, best=args.best)
    if args.out.exists():
        raise ConfigError("--out", str(args.out), "it exists already.", "name a new folder, or remove it.")
    export(folder, args.out)
    print(f"exported step {step_of(folder)} to {args.out}")
    if args.push:
        print(f"pushed to {upload(args.out, args.push)}")
    print(f"next: {serve_command(args.out)}")
    return 0


def find_checkpoint(root: Path, step: int | None, *, best: bool) -> Path:
    """Return a checkpoint of a run: of a step, the best, or the newest; every byte of it is verified.

    Raises:
        ConfigError: the folder belongs to no run, or the checkpoint does not exist.
        CheckpointError: it is damaged.
    """
    store = CheckpointStore(root / CHECKPOINTS)
    saved = {step_of(folder): folder for folder in store.committed()}
    if not saved:
        found = "this is a checkpoint" if step_of(root) is not None else "it has no checkpoint of a run"
        raise ConfigError("RUN", str(root.absolute()), f"{found}.", "name the folder of a run that has saved one.")
    listed = f"Saved steps: {', '.join(map(str, saved))}."
    marked = store.best() if best else None
    if best and marked is None:
        raise ConfigError("--best", str(root), f"no step is marked. {listed}", "use --step, or trainer.keep_best.")
    wanted = marked.step if marked else [*saved][-1] if step is None else step
    if wanted not in saved:
        fix = "choose one of these; trainer.save_every and trainer.keep_last decide which there are."
        raise ConfigError("--step", wanted, f"it is no checkpoint of {root}. {listed}", fix)
    verified(saved[wanted])
    return saved[wanted]


def export(checkpoint: Path, out: Path) -> None:
    """Write the student of a checkpoint as a Hugging Face folder with a model card.

    Raises:
        ConfigError, ModelError: the folder that the student was built from is missing, or of another model.
        CheckpointError: a file is damaged.
        OSError: `out` exists or cannot be written.
    """
    # The backends import torch, and `gkd export --help` needs none.
    from gkd.actor.common.base import ADAPTER_FOLDER
    from gkd.actor.common.hf_folder import write_adapters, write_folder
    from gkd.actor.common.shards import ShardReader, read_params
    from gkd.hf.model_folder import checked_folder, open_tensors

    config = load_config(checkpoint / "config.yaml")
    local = with_local_copies(config, ("model.path",))
    base, lora = Path(local.model.path), config.actor.lora
    with (
        checked_folder("model.path", local.model.path),
        ShardReader(checkpoint / ACTOR) as reader,
        open_tensors(base) as held,
    ):
        if reader.meta["strategy"] == "megatron":
            warnings.filterwarnings("ignore", "(Transformer Engine and )?Apex")  # of Megatron, for each that is missing
            from gkd.actor.megatron import checkpoint as megatron

            weights, factors = megatron.saved_params(reader, base, held, lora if lora.rank else None)
        else:
            from gkd.actor.fsdp import student as fsdp

            code, vision = config.model.trust_remote_code, config.derived.vision
            weights, factors = fsdp.saved_params(reader, base, held, trust_remote_code=code, vision=vision)
        plan, tensors = read_params(weights)
        write_folder(tensors, [plan], out, base, stop_ids=config.rollout.stop_token_ids)
        if factors:
            plan, tensors = read_params(factors)
            write_adapters(tensors, plan, out / ADAPTER_FOLDER, lora, str(base))
    root, step = checkpoint.parents[1], step_of(checkpoint) or 0
    state = RunState(step)
    for line in read_metrics(root / "metrics.jsonl"):
        if line["step"] <= step:
            state.add_past(int(line["step"]), line)
    replace_file(out / CARD, model_card(root, config, state, step).encode())


def _parse(argv: list[str] | None) -> argparse.Namespace:
    description = "Write the student of a checkpoint as a Hugging Face folder, as its run would export it."
    parser = command_parser("gkd export", description, _EXAMPLES)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder; the run may be in progress")
    add_choice(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; it must not exist")
    parser.add_argument("--push", metavar="REPO", help="also upload it to ORG/NAME on the Hugging Face hub")
    return parser.parse_args(argv)


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add what chooses a checkpoint of a run to a parser."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step; default: the newest one")
    group.add_argument("--best", action="store_true", help="the best one, if the run had trainer.keep_best")


if __name__ == "__main__":
    sys.exit(main())
