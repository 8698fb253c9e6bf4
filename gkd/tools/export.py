"""`gkd export RUN --out DIR`: write the student of a checkpoint as its run would, without processes or a GPU."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from gkd.config.load import load_config
from gkd.console.state import RunState
from gkd.console.summary import serve_command, write_card
from gkd.errors import ConfigError
from gkd.hf.hub import upload, with_local_copies
from gkd.metrics.writer import read_metrics
from gkd.run.checkpoints import ACTOR, CheckpointStore, step_of, verified
from gkd.run.folder import CHECKPOINTS
from gkd.tools import exit_codes
from teacher_server.config.command import command_parser

_EXAMPLES = """examples:
  gkd export runs/mine --out exports/mine                 # the newest checkpoint
  gkd export runs/mine --step 200 --out exports/step_200
  gkd export runs/mine --best --out exports/best --push ORG/NAME

exit code: 0 done, 1 the disk failed, or a file is damaged; 2 no such run or checkpoint, DIR exists, the hub refused
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
    """Return a checkpoint of a run, of a step, the best, or the newest. Raises ConfigError, CheckpointError."""
    store = CheckpointStore(root / CHECKPOINTS)
    saved = {step_of(folder): folder for folder in store.committed()}
    wanted = "any step" if step is None else f"step {step}"
    if best:
        wanted = "the best step"
        marked = store.best()
        step = None if marked is None else marked.step
    elif step is None and saved:
        step = [*saved][-1]
    if step not in saved:
        problem = f"it has no checkpoint of {wanted}. Saved steps: {', '.join(map(str, saved)) or 'none'}."
        fix = "name the folder of a run and one of its steps; --best needs trainer.keep_best."
        raise ConfigError("RUN", str(root.absolute()), problem, fix)
    verified(saved[step])
    return saved[step]


def export(checkpoint: Path, out: Path) -> None:
    """Write a student as a folder with a model card; one parameter at a time is in memory. Raises GkdError, OSError."""
    # The backends import torch, and `gkd export --help` needs none.
    from gkd.actor.common.base import ADAPTER_FOLDER
    from gkd.actor.common.hf_folder import write_adapters, write_folder
    from gkd.actor.common.shards import ShardReader
    from gkd.hf.model_folder import checked_folder, open_tensors

    config = load_config(checkpoint / "config.yaml")
    path = with_local_copies(config, ("model.path",)).model.path
    base = Path(path)
    with checked_folder("model.path", path), ShardReader(checkpoint / ACTOR) as saved, open_tensors(base) as held:
        if saved.meta["strategy"] == "megatron":
            warnings.filterwarnings("ignore", "(Transformer Engine and )?Apex")  # of Megatron, for each that is missing
            from gkd.actor.megatron.checkpoint import readers
        else:
            from gkd.actor.fsdp.student import readers
        weights, factors = readers(saved, config, base, held)
        tensors = ((plan[0], read()) for plan, read in weights.items())
        write_folder(tensors, [list(weights)], out, base, stop_ids=config.rollout.stop_token_ids)
        if factors:
            tensors = ((plan[0], read()) for plan, read in factors.items())
            write_adapters(tensors, list(factors), out / ADAPTER_FOLDER, config.actor.lora, path)
    root = checkpoint.parents[1]
    step = step_of(checkpoint) or 0
    state = RunState(step)
    for line in read_metrics(root / "metrics.jsonl"):
        if line["step"] <= step:
            state.add_past(int(line["step"]), line)
    write_card(out, root, config, state, step)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    description = "Write the student of a checkpoint as a Hugging Face folder, as its run would export it."
    parser = command_parser("gkd export", description, _EXAMPLES)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder; the run may be in progress")
    add_choice(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; it must not exist")
    parser.add_argument("--push", metavar="REPO", help="also upload it to ORG/NAME of the hub, private if new")
    return parser.parse_args(argv)


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add what chooses a checkpoint of a run to a parser."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step; default: the newest one")
    group.add_argument("--best", action="store_true", help="the best one, if the run had trainer.keep_best")


if __name__ == "__main__":
    sys.exit(main())
