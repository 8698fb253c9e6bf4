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
from gkd.errors import ConfigError, GkdError
from gkd.hf.hub import with_local_copies
from gkd.metrics.writer import read_metrics
from gkd.run.checkpoints import ACTOR, CheckpointStore, step_folder, step_of, verified
from gkd.run.disk import replace_file
from gkd.run.folder import CARD, CHECKPOINTS
from gkd.tools import exit_codes
from teacher_server.config.command import command_parser

_EXAMPLES = """examples:
  python -m gkd.tools.export runs/mine --out exports/mine                 # the newest checkpoint
  python -m gkd.tools.export runs/mine --step 200 --out exports/step_200
  python -m gkd.tools.export runs/mine --best --out exports/best --push ORG/NAME

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
        print(f"pushed to {push(args.out, args.push)}")
    print(f"next: {serve_command(args.out)}")
    return 0


def find_checkpoint(root: Path, step: int | None, *, best: bool) -> Path:
    """Return a checkpoint of a run: of a step, the best, or the newest; every byte of it is verified.

    Raises:
        ConfigError: the folder is no run, or has no such checkpoint.
        CheckpointError: it is damaged.
    """
    if not (root / CHECKPOINTS).is_dir():
        found = "this is a checkpoint" if step_of(root) is not None else "no run, or one that has saved no checkpoint"
        fix = "name the run folder, which has the folder checkpoints."
        raise ConfigError("RUN", str(root.absolute()), f"{found}.", fix)
    store = CheckpointStore(root / CHECKPOINTS)
    saved = {step_of(folder): folder for folder in store.committed()}
    listed = ", ".join(map(str, saved)) or "none"
    if best:
        marked = store.best()
        if marked is None:
            problem = "the run has marked none, because trainer.keep_best was not set, or no evaluation is saved."
            raise ConfigError("--best", str(root), problem, f"choose a step with --step. Saved: {listed}.")
        step = marked.step
    elif step is None:
        step = max((each for each in saved if each is not None), default=0)
    if step not in saved:
        problem = f"{root / CHECKPOINTS} has no {step_folder(step)}. Saved: {listed}."
        raise ConfigError("--step", step, problem, "choose one of these; trainer.save_every and keep_last decide.")
    verified(saved[step])
    return saved[step]


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


def push(folder: Path, repo: str) -> str:
    """Upload a folder to the Hugging Face hub, as one commit, and return its address. Raises ConfigError, GkdError."""
    from huggingface_hub import HfApi, constants, errors

    try:
        HfApi().create_repo(repo, private=True, exist_ok=True)
        return (
            HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message=f"Upload {folder.name}").commit_url
        )
    except (errors.HFValidationError, errors.LocalTokenNotFoundError) as error:
        fix = "write ORG/NAME, and set HF_TOKEN to a token that may write there."
        raise ConfigError("--push", repo, f"{str(error).splitlines()[0]}", fix) from error
    except Exception as error:  # the library raises many types of errors
        status = getattr(getattr(error, "response", None), "status_code", None)
        where, text = f"{constants.ENDPOINT}/{repo}", next(iter(str(error).splitlines()), "")
        if status in (401, 403, 404):
            problem = f"{constants.ENDPOINT} refuses it ({status})."
            fix = "set HF_TOKEN to a token that may write there; the folder of --out is complete."
            raise ConfigError("--push", repo, problem, fix) from error
        fix = f"run `hf upload {repo} {folder}`; the folder is complete"
        raise GkdError(f"the upload to {where} failed ({type(error).__name__}: {text}). Fix: {fix}") from error


def _parse(argv: list[str] | None) -> argparse.Namespace:
    description = "Write the student of a checkpoint as a Hugging Face folder, as its run would export it."
    parser = command_parser("python -m gkd.tools.export", description, _EXAMPLES)
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
