"""Stands for torchvision, which has no build for a CPU on the default index: names for imports, which compute nothing.

vLLM and transformers import it with the code of every model that reads images.
"""

import sys
from types import ModuleType
from typing import Any

__version__ = "0.28.0"


class _Name(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self.__name__}.{name}")


for _module in ("io", "ops", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    sys.modules[f"{__name__}.{_module}"] = _Name(f"{__name__}.{_module}")
