"""Collect the mistakes in the settings of a run, also where one check cannot go on because of another's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from gkd.config.check import check_config
from gkd.config.schema import Config
from gkd.config.schema_sections import all_keys
from gkd.config.schema_teacher import DistillConfig
from gkd.errors import ConfigError, GkdError
from gkd.log import get_logger
from gkd.spans import driver
from teacher_server.vision.images import ImageError

log = get_logger("check")

_NAMED = re.compile(r"[a-z_]+(?:\.\w+)+")  # keys in a message
_SETTING = re.compile(r".*?([\w.]+) = ([^\s,]+): (.+)", re.DOTALL)  # a message that begins with a setting
_ROUNDS = 20  # in which defaults replace what is wrong


class Mistakes:
    """Collect the mistakes that independent checks find.

    A mistake that names the key of an earlier one is left out, because it may follow from that one: checks go on with
    the default of a key that is misspelled, or without a model.
    """

    def __init__(self) -> None:
        self.found: list[ConfigError] = []  # each names one mistake
        self._raised: list[Exception] = []
        self.keys: set[str] = set()  # keys that are wrong, or not checked because of other mistakes

    def add(self, error: ConfigError, raised: Exception | None = None) -> None:
        """Add the mistakes that an error names. `raised` stands for it in `raise_all`."""
        new = [mistake for mistake in error.parts() if not {mistake.key, *_named_keys(str(mistake))} & self.keys]
        self.found += new
        self._raised += [raised or error] * bool(new)
        for mistake in new:
            self.keys |= {mistake.key, _declared_key(mistake.key)} - {""}
            if not _declared_key(mistake.key):  # The key does not exist, and the fix names the right one.
                self.keys |= _named_keys(mistake.fix)

    @contextmanager
    def step(self, key: str, value: object = "") -> Iterator[None]:
        """Add the error of the block; key and value are those of an error that names none."""
        try:
            with driver.doing(key):
                yield
        except ConfigError as error:
            self.add(error)
        except (GkdError, ImageError, PermissionError) as error:
            problem, _, fix = str(error).partition(" Fix: ")
            if named := _SETTING.match(problem):
                key, text, problem = named.groups()
                value = int(text) if text.isdecimal() else text
            if isinstance(error, PermissionError):
                fix = "permit this user to use it and the folders above it."
            self.add(ConfigError(key, value, f"{problem.rstrip('.')}.", fix), error)
        except Exception as error:
            if not self.found:
                raise
            log.warning("%s is not checked further until the other mistakes are corrected (%r)", key, error)

    def raise_all(self) -> None:
        """Raise the only error as it is, or one ConfigError for several; nothing without one."""
        if len(self._raised) == 1:
            raise self._raised[0]
        if self.found:
            raise ConfigError.together(self.found)


def _named_keys(text: str) -> set[str]:
    """Return the keys that a message names."""
    return {key for name in _NAMED.findall(text) if (key := _declared_key(name))}


def _declared_key(name: str) -> str:
    """Return the key that a name of an error belongs to, as distill.losses of distill.losses[0].name; empty if none."""
    name = name.partition("[")[0]
    while name and name not in all_keys():
        name = name.rpartition(".")[0]
    return name


def usable(config: Config, mistakes: Mistakes) -> Config:
    """Add the mistakes of the settings, and return settings with which other checks can go on.

    A wrong key gets its default, and if it still contradicts others, those that its error names.
    """
    replaced: set[str] = set()
    for _ in range(_ROUNDS):
        try:
            check_config(config)
            return config
        except ConfigError as error:
            mistakes.add(error)
            names = {_declared_key(mistake.key) for mistake in error.parts()} - {""}
            names = _named_keys(str(error)) if names <= replaced else names
            replaced |= names
            config = config.with_values({name: all_keys()[name].default for name in names})
    return replace(config, distill=DistillConfig())
