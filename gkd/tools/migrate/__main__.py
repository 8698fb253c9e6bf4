"""`python -m gkd.tools.migrate SYSTEM [FILE] [--output OUT.yaml] [-- old flags]`: write our YAML from old settings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gkd.config.old_names.row import plain
from gkd.config.old_names.systems import SYSTEMS
from gkd.errors import ConfigError
from gkd.tools.migrate.convert import convert
from gkd.tools.migrate.read import read_file, settings_of
from gkd.tools.migrate.report import not_understood, refusal, summary, yaml_text

_EPILOG = """examples:
  python -m gkd.tools.migrate verl run_qwen.sh --output mine.yaml
  python -m gkd.tools.migrate trl gkd.yaml --output mine.yaml -- --num_processes 8
  python -m gkd.tools.migrate slime -- --hf-checkpoint models/Qwen3-8B --rollout-batch-size 16

FILE is a YAML (.yaml, .yml, .json), or a script or list with flags and Hydra overrides. Flags after -- override it.
The report is in the YAML's comments. See docs/from_verl.md, from_trl.md, from_slime.md and from_roll.md.
exit code: 0 written, also if some old keys are not recognized; 2 unreadable input, or an existing output; 3 written,
but keys of loss, teacher, data or sampling are not recognized: the run would train on something else
"""


def migrate(system: str, file: Path | None, flags: Sequence[str] = ()) -> tuple[str, str, list[str]]:
    """Return the YAML of old settings, the summary of its report, and the keys of `not_understood`.

    Raises:
        ConfigError: the system is not known, or the settings cannot be read.
    """
    if system not in SYSTEMS:
        raise ConfigError("SYSTEM", system, "is not a known system.", f"use one of {', '.join(SYSTEMS)}.")
    table = SYSTEMS[system]
    given = settings_of(flags, table)
    overridden = {plain(name) for name in given}
    from_file = {} if file is None else read_file(file, table)
    values = {name: value for name, value in from_file.items() if plain(name) not in overridden} | given
    if not values:
        raise ConfigError("FILE", "", "there are no settings.", "name a file, or write flags after --.")
    entries = convert(table, values)
    text = yaml_text(table, "flags" if file is None else file.name, entries)
    return text, summary(entries), not_understood(entries)


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
    except ConfigError as error:
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
        path.write_text(text)
    except OSError as error:
        raise ConfigError(
            "--output", str(path), f"cannot be written ({error}).", "give a path in an existing folder."
        ) from error


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m gkd.tools.migrate",
        description="Write our YAML from the settings of another system, with a line on each of them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("system", choices=list(SYSTEMS), help="where the settings come from")
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="its YAML, script or list of flags")
    parser.add_argument("--output", type=Path, metavar="OUT.yaml", help="file to write; without it the YAML is printed")
    parser.add_argument("--force", action="store_true", help="replace an existing output")
    args, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}. Fix: write the settings of {args.system} after --")
    return args


if __name__ == "__main__":
    sys.exit(main())
