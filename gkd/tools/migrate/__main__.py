"""`python -m gkd.tools.migrate [SYSTEM] [FILE] [-- old flags]`: write our YAML from settings of another system."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gkd.config.dialects.table import plain
from gkd.errors import ConfigError
from gkd.tools.migrate.convert import convert, not_understood, refusal, summary, yaml_text
from gkd.tools.migrate.read import Old, find_dialect, names, read_file, settings_of
from teacher_server.config.command import command_parser

_EPILOG = """examples:
  python -m gkd.tools.migrate run_qwen.sh --output mine.yaml
  python -m gkd.tools.migrate trl_gkd gkd.yaml --output mine.yaml -- --num_processes 8
  python -m gkd.tools.migrate slime -- --use-opd --hf-checkpoint models/Qwen3-8B --rollout-batch-size 16

FILE is a YAML (.yaml, .yml, .json), or a script or list with flags and Hydra overrides. Flags after -- override it.
SYSTEM is needed only if the settings do not show where they come from. The report is in the YAML's comments.
See docs/from_verl.md and the other pages docs/from_*.md.
exit code: 0 written, also if some old keys are not recognized; 2 unreadable input, or an existing output; 3 written,
but keys of loss, teacher, data or sampling are not understood: the run would train on something else
"""


def migrate(asked: str, file: Path | None, flags: Sequence[str] = ()) -> tuple[str, str, list[str]]:
    """Return the YAML of old settings, the summary of its report, and the keys of `not_understood`.

    Args:
        asked: a system or one of its dialects; if empty, it is found in the settings.

    Raises:
        ConfigError: the dialect is not known, or the settings cannot be read.
    """
    given = settings_of(flags)
    old = Old() if file is None else read_file(file, given.settings)
    overridden = {plain(name) for name in given.settings}
    kept = {name: value for name, value in old.settings.items() if plain(name) not in overridden}
    old = Old(kept | given.settings, [*old.words, *given.words], old.variables)
    if not old.settings:
        raise ConfigError("FILE", "", "there are no settings.", "name a file, or write flags after --.")
    dialect = find_dialect(asked, old)
    entries = convert(dialect, old.of(dialect))
    text = yaml_text(dialect, "flags" if file is None else file.name, entries)
    return text, f"read as {dialect.title}: {summary(entries)}", not_understood(entries)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code, see `_EPILOG`."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    args = _parse(words[:end])
    try:
        text, counts, unknown = migrate(args.system, args.file, words[end + 1 :])
        if args.output is None:
            print(text, end="")
        else:
            _write(args.output, text, force=args.force)
    except (ConfigError, PermissionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if unknown:
        print(
            f"{refusal(unknown)}: {', '.join(unknown)}. Fix: set what they mean in the YAML yourself.", file=sys.stderr
        )
    print(counts, file=sys.stderr)
    if args.output is not None:
        print(text.partition("\n\n")[0].rpartition("#\n")[2] + f"\nwritten to {args.output}", file=sys.stderr)
    return 3 if unknown else 0


def _write(path: Path, text: str, *, force: bool) -> None:
    if path.exists() and not force:
        raise ConfigError("--output", str(path), "exists.", "give another name, or --force to replace it.")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "--output", str(path), f"cannot be written ({error}).", "give a path in an existing folder."
        ) from error


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = command_parser(
        "python -m gkd.tools.migrate",
        "Write our YAML from the settings of another system, with a line on each of them.",
        _EPILOG,
        usage="%(prog)s [-h] [--output OUT.yaml] [--force] [SYSTEM] [FILE] [-- old flags]",
    )
    parser.add_argument("input", nargs="*", metavar="SYSTEM FILE", help=f"one of {', '.join(names())}; and its file")
    parser.add_argument("--output", type=Path, metavar="OUT.yaml", help="file to write; without it the YAML is printed")
    parser.add_argument("--force", action="store_true", help="replace an existing output")
    args, unknown = parser.parse_known_args(words)
    args.system = args.input.pop(0) if args.input and args.input[0] in names() else ""
    args.file = Path(args.input.pop(0)) if args.input else None
    if unknown or args.input:
        words = " ".join([*args.input, *unknown])
        parser.error(f"unrecognized arguments: {words}. Fix: write the settings of the other system after --")
    return args


if __name__ == "__main__":
    sys.exit(main())
