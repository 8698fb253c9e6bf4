"""Migrate the distillation examples of other systems' repositories, and compare with what those systems train.

    git clone https://github.com/OWNER/NAME DIR/NAME          # each repository of the list, bare clones work, too
    python -m tests.bench.migrate_examples --source DIR --json docs/results/migrate_examples.json

`migrate_examples.json` in this folder lists repository, path and commit of each example, and the values that its own
system resolves from it, found by reading that system's code. Their text is not in this repository. Examples of TRL are
commands in texts and Python code: their settings are listed as `words`. An example agrees if
each value is the same in our config, and if exactly the settings that have no equal here are refused.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from gkd.config.load import load_config
from gkd.errors import ConfigError
from gkd.tools.migrate.__main__ import migrate

LIST = Path(__file__).with_suffix(".json")


def unpack(source: Path, example: dict[str, Any], folder: Path) -> Path:
    """Write the example, with the files of its top folder, which may be bases of it; return its path."""
    name = example["repo"].rpartition("/")[2]
    git = next((path for path in (source / name, source / f"{name}.git") if path.exists()), None)
    if git is None:
        raise SystemExit(f"{source / name} is missing: clone https://github.com/{example['repo']} to it.")
    top = example["path"].partition("/")[0]
    archive = subprocess.run(
        ["git", "-C", str(git), "archive", example["commit"], "--", top], check=True, stdout=subprocess.PIPE
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder / str(example["path"])


def compare(example: dict[str, Any], file: Path | None, folder: Path) -> dict[str, Any]:
    """Return the values that differ, and the refused settings that are missing or too many."""
    result: dict[str, Any] = {name: example[name] for name in ("repo", "commit", "path", "dialect")}
    asked = example["dialect"] if example.get("named") else ""  # else the dialect has to be found
    try:
        text, _, refused = migrate(asked, file, example.get("words", ()))
    except ConfigError as error:
        return result | {"error": str(error)}
    written = folder / "migrated.yaml"
    written.write_text(text)
    config = load_config(written)
    found = {key: config.value(key) for key in example["resolved"]}
    expected = json.loads(os.path.expandvars(json.dumps(example["resolved"])))  # paths below $HOME
    different = {
        key: {"theirs": wanted, "ours": plain(found[key])}
        for key, wanted in expected.items()
        if not same(plain(found[key]), wanted)
    }
    return result | {
        "read_as": text.partition("read as ")[2].partition(",")[0],
        "is_found": f"migrate {example['dialect']}\n" in text,
        "values": len(found),
        "different": different,
        "refused": refused,
        "not_refused": sorted(set(example.get("refused", ())) - {name.lstrip("-+") for name in refused} - set(refused)),
        "refused_too_much": [] if example.get("refused") else refused,
    }


def plain(value: Any) -> Any:
    """Return a value of the config as JSON has it: routes and loss terms become dicts of what is set."""
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {name: each for name, each in vars(value).items() if each is not None}
    return value


def same(ours: Any, theirs: Any) -> bool:
    """Return whether two values are equal, floats to 9 digits; of dicts, what `theirs` has."""
    if isinstance(theirs, dict):
        return isinstance(ours, dict) and all(same(ours.get(name), each) for name, each in theirs.items())
    if isinstance(theirs, list):
        return isinstance(ours, list) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, float) or isinstance(ours, float):
        return isinstance(ours, int | float) and abs(ours - theirs) <= 1e-9 * abs(theirs)
    return bool(ours == theirs)


def main() -> int:
    """Compare all examples, print a line for each, write JSON; return 1 if one does not agree."""
    parser = argparse.ArgumentParser(description="Compare migrated examples with what their systems resolve.")
    parser.add_argument("--source", type=Path, required=True, help="folder with a clone of each repository")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", type=Path, default=LIST, help="examples with the values of their systems")
    args = parser.parse_args()
    results = []
    for example in json.loads(args.list.read_text()):
        with tempfile.TemporaryDirectory() as folder:
            file = None if "words" in example else unpack(args.source, example, Path(folder))
            result = compare(example, file, Path(folder))
        results.append(result)
        wrong = {k: result[k] for k in ("error", "different", "not_refused", "refused_too_much") if result.get(k)}
        if not result.get("is_found"):
            wrong["read as"] = result.get("read_as")
        print(f"{'differs' if wrong else 'agrees':8} {result['repo']} {result['path']}  {wrong or ''}")
    rows = Counter((result["repo"], "files") for result in results)
    for result in results:
        repo = result["repo"]
        rows[repo, "values"] += result.get("values", 0)
        rows[repo, "different"] += len(result.get("different", ())) + (not result.get("is_found"))
        rows[repo, "refused"] += bool(result.get("refused"))
        rows[repo, "wrongly"] += bool(result.get("not_refused") or result.get("refused_too_much"))
    print(f"\n{'repository':32} {'files':>6} {'values':>7} {'different':>10} {'refused':>8} {'wrongly':>8}")
    columns = ("files", "values", "different", "refused", "wrongly")
    for repo in dict.fromkeys(result["repo"] for result in results):
        print(f"{repo:32} " + " ".join(f"{rows[repo, c]:>{w}}" for c, w in zip(columns, (6, 7, 10, 8, 8), strict=True)))
    if args.json:
        table = [{"repo": repo} | {c: rows[repo, c] for c in columns} for repo in {r["repo"]: 0 for r in results}]
        lines = ",\n".join(f"  {json.dumps(result)}" for result in results)
        args.json.write_text(f'{{"table": {json.dumps(table)},\n "examples": [\n{lines}\n]}}\n')
    return int(any(rows[repo, "different"] or rows[repo, "wrongly"] for repo, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
