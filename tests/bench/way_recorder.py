"""Record in every process of a run which functions of the product are called; imported by a `sitecustomize.py`.

The import system adds a call of `__way__` to the beginning of each function, because a profile function of Python 3.11
does not see the threads that Ray starts. Bytecode of such modules is not written.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

FOLDER, CHECKOUT = "GKD_WAY", "GKD_WAY_CHECKOUT"  # environment variables: folder of the records, and the checkout
TICKS = 10  # a second
_WRITE_S = 0.5
_SETTINGS = "gkd.config.schema"  # modules of the config and its sections


class Recorder:
    """The files whose functions are called, by tenths of a second, and the calls that get the settings, in order."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"{os.getpid()}.json"
        self._ticks: dict[str, set[int]] = {}
        self._settings: list[tuple[float, str]] = []
        self._main = threading.main_thread()

    def note(self, file: str, arguments: dict[str, Any]) -> None:
        self._ticks.setdefault(file, set()).add(int(time.time() * TICKS))
        given = (value for name, value in arguments.items() if name != "self")  # methods of the settings do not count
        is_given = any(type(value).__module__.startswith(_SETTINGS) for value in given)
        if is_given and threading.current_thread() is self._main:
            self._settings.append((time.time(), file))

    def write_for_ever(self) -> None:
        while True:
            time.sleep(_WRITE_S)
            ticks = {name: sorted(self._ticks[name].copy()) for name in list(self._ticks)}
            new = self._file.with_suffix(f".{threading.get_ident()}")
            new.write_text(json.dumps({"command": sys.argv, "ticks": ticks, "settings": list(self._settings)}))
            new.replace(self._file)


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree, root = ast.parse(self.get_data(path)), os.environ[CHECKOUT]
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                call = ast.parse(f"__way__({os.path.relpath(path, root)!r}, locals())").body
                node.body[:0] = [ast.copy_location(each, node.body[0]) for each in call]
        code: CodeType = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
        return code


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in ("gkd", "teacher_server"):
            return None
        spec = PathFinder.find_spec(fullname, path or [os.environ[CHECKOUT]], target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


def start() -> None:
    if FOLDER in os.environ:
        recorder = Recorder(Path(os.environ[FOLDER]))
        builtins.__way__ = recorder.note  # type: ignore[attr-defined]
        sys.meta_path.insert(0, _Finder())
        threading.Thread(target=recorder.write_for_ever, daemon=True).start()
