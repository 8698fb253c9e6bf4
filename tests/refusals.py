"""Assert which setting an error names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import ANY

import pytest

from gkd.errors import ConfigError


@contextmanager
def refuses(key: str, value: object = ANY, *, text: str = "") -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    """Assert that the block raises a ConfigError of this key, and of this value if one is given. Yields the error.

    Args:
        text: a part of the message of the error.
    """
    with pytest.raises(ConfigError) as caught:
        yield caught
    assert (caught.value.key, caught.value.value) == (key, value)
    assert caught.value.fix and text in str(caught.value)
