"""The command `gkd`: run one of the programs of this package in this process. `python -m MODULE` runs the same ones.

Only the program that runs is imported, so that `gkd --help` needs no library.
"""

from __future__ import annotations

import difflib
import importlib
import os
import platform
import shlex
import signal
import sys
from collections.abc import Sequence
from importlib import metadata

# Command -> module with `main`, what it does, arguments of an example.
COMMANDS = {
    "train": ("gkd.main_gkd", "check a run, start its processes, train", "--student A --teacher B --data rows.jsonl"),
    "init": ("gkd.tools.init", "write a YAML with comments of the settings that people change", "mine.yaml"),
    "teacher": (
        "teacher_server.__main__",
        "serve a teacher; with worker, status, drain, keygen, http: see its help",
        "--model Qwen/Qwen2.5-7B-Instruct --gpus 4,5,6,7",
    ),
    "score": ("gkd.tools.score", "score dataset responses once, to train without a teacher", "--config mine.yaml"),
    "generate": (
        "gkd.tools.generate",
        "let the teacher write answers to prompts, to train on them",
        "--config mine.yaml --data prompts.jsonl --out answers.jsonl",
    ),
    "check": ("gkd.tools.check", "list every mistake that can be found without a start", "--config mine.yaml"),
    "check-gpus": ("gkd.tools.check_gpus", "report which rank is on which GPU", "--config mine.yaml"),
    "memory": ("gkd.tools.memory", "predict the memory of each rank", "--config mine.yaml --gpu-gib 80"),
    "split": ("gkd.tools.split", "recommend a split of the GPUs from a run", "runs/mine --gpus 8"),
    "eval": ("gkd.tools.evaluate", "measure accuracy and KL of a checkpoint or a model", "runs/mine --data test.jsonl"),
    "export": ("gkd.tools.export", "write a checkpoint as a Hugging Face folder", "runs/mine --best --out best"),
    "report": ("gkd.tools.report.__main__", "write one HTML page about runs", "runs/mine runs/other"),
    "where": ("gkd.tools.where", "show which tokens the KL of a run is at", "runs/mine"),
    "replay": ("gkd.tools.replay", "make a recorded step again and compare", "runs/mine --step 20"),
    "env": ("gkd.tools.env", "print versions, hardware and variables, for the report of a problem", "> env.txt"),
    "trace": ("gkd.tools.trace", "write what each process did, for Perfetto", "runs/mine --steps 10-12"),
}


def usage() -> str:
    """Return the text of `gkd --help`."""
    lines = ["usage: gkd COMMAND ...", "", "On-policy distillation. `gkd COMMAND --help` has the arguments.", ""]
    for name, (_, what, example) in COMMANDS.items():
        lines += [f"  {name:<12}{what}", f"{'':14}gkd {name} {example}"]
    lines += ['  completion  let bash complete commands, options and keys: eval "$(gkd completion)"']
    return "\n".join([*lines, "  --version   print the version"])


def completion() -> str:
    """Return a script with which bash completes the commands, and behind them options, keys of settings and files."""
    from gkd.config.schema_sections import all_keys

    return f"""_gkd() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}"
    if [ "$COMP_CWORD" = 1 ]; then
        COMPREPLY=($(compgen -W "{" ".join(COMMANDS)} completion" -- "$word"))
    elif [[ "$word" == -* ]]; then
        COMPREPLY=($(compgen -W "$("$1" "${{COMP_WORDS[1]}}" --help 2>/dev/null | grep -oE '^  --[a-z-]+')" -- "$word"))
    else
        COMPREPLY=($(compgen -W "{" ".join(f"{name}=" for name in all_keys())}" -- "$word") $(compgen -f -- "$word"))
        case "${{COMPREPLY[0]}}" in *=) compopt -o nospace 2>/dev/null ;; esac
    fi
}}
complete -F _gkd gkd"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the words name, and return its exit code; 2 without a valid one."""
    script, *words = sys.argv if argv is None else ("gkd", *argv)
    if words[:1] == ["--version"]:
        print(f"gkd {metadata.version('gkd')}, Python {platform.python_version()}")
        return 0
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if words[:1] == ["completion"]:
        print(usage() if words[1:] else completion())
        return 0
    if not words or words[0] in ("-h", "--help"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `gkd --help | head` ends without a traceback
        print(usage(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    name = words.pop(0)
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(COMMANDS)}."
        if name == "migrate":
            hint = "run gkd train --config OLD_FILE: its error lists the keys of today, as docs/coming_from.md does."
        print(f"error: gkd {name}: this is not a command. Fix: {hint}", file=sys.stderr)
        return 2
    if name == "train":  # the words with which a run tells how to resume it
        os.environ.setdefault("GKD_COMMAND", f"{_as_typed(script)} train")
    if not sys.flags.safe_path:
        sys.path.insert(0, "")  # as `python -m`: functions of your own may be in the working folder
    sys.argv = [f"gkd {name}", *words]
    code: int = importlib.import_module(COMMANDS[name][0]).main()
    return code


def _as_typed(script: str) -> str:
    """Return the command that runs this script again, quoted for a shell: its name alone if the shell finds it."""
    if script.endswith(".py"):
        return f"{shlex.quote(sys.executable)} -m gkd.cli"
    folders = os.environ.get("PATH", "").split(os.pathsep)
    scripts = (os.path.join(folder, "gkd") for folder in folders if os.path.isfile(os.path.join(folder, "gkd")))
    return "gkd" if next(scripts, None) == os.path.abspath(script) else shlex.quote(script)


if __name__ == "__main__":
    sys.exit(main())
