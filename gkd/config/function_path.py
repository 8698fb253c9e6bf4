"""Functions of a user, named by their import path: `package.module:function`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from teacher_server.config.declare import is_path as is_path  # the server's engines have import paths, too


def function_name(path: str) -> str:
    """Return the name of a function without its module."""
    return path.rpartition(":")[2]


def search_path() -> tuple[str, ...]:
    """Return the folders in which this process finds modules, with its working folder."""
    return (os.getcwd(), *(folder for folder in sys.path if folder))


def import_function(path: str) -> Callable[..., Any]:
    """Return the function of a path. Raises ImportError: its module cannot be imported, or has no such function."""
    module, _, name = path.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may raise any error
        raise ImportError(f"{path}: cannot be imported ({type(error).__name__}: {error})") from error
    if not callable(function):
        raise ImportError(f"{path}: is a {type(function).__name__}, not a function")
    return function
