"""Write a YAML with comments of the settings that people change: `gkd init [FILE]`."""

from __future__ import annotations

import sys
from pathlib import Path

from teacher_server.config.command import command_parser

_EXAMPLE = "example:\n  gkd init mine.yaml"
SETTINGS = """\
# What differs from the defaults: docs/configuration.md, or gkd train --help SECTION.
# Look at prompts first: gkd train mine.yaml --show-prompts 3
data:
  train_files: [data/train.jsonl]   # JSONL or parquet; several are joined
  prompt_key: prompt                # column of the prompts: texts or conversations
  max_prompt_length: 1024           # tokens
  max_response_length: 1024
model:
  path: Qwen/Qwen2.5-1.5B-Instruct  # the student: a folder, or a name on the hub
trainer:
  run_dir: runs/mine                # metrics, checkpoints and the export
  n_gpus_per_node: 1                # GPUs that train
  global_batch_size: 64             # prompts of a step
  total_epochs: 1
rollout:
  n_gpus_per_node: 1                # GPUs that generate
actor:
  optim: {lr: 1.0e-6}
teacher:                            # a server: gkd teacher --model MODEL; or gkd train --teacher MODEL starts one
  topk: 64                          # logprobs of each token
"""


def main() -> int:
    """Return the exit code: 0 written, 2 the file exists or cannot be written."""
    parser = command_parser("gkd init", "Write a YAML with comments of the settings that people change.", _EXAMPLE)
    parser.add_argument("file", nargs="?", default="mine.yaml", type=Path, metavar="FILE", help="default: mine.yaml")
    file: Path = parser.parse_args().file
    try:
        with file.open("x") as output:
            output.write(SETTINGS.replace("mine.yaml", str(file)))
    except OSError as error:
        print(f"gkd init: {error}. Fix: give another file name.", file=sys.stderr)
        return 2
    print(f"wrote {file}\nnext:\n  gkd train {file} --teacher MODEL")
    return 0


if __name__ == "__main__":
    sys.exit(main())
