"""Keep kernels for GPUs from tensors on other devices.

Where the packages `fla`, `causal_conv1d` or `mamba_ssm` are installed, transformers 5.19 calls their kernels in
recurrent layers and convolutions, whatever device the tensors are on. On a CPU such a kernel fails. On the meta device
Triton launches it with null pointers, if the machine has a GPU.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from transformers.integrations import hub_kernels


def keep_kernels_on_gpus(model: torch.nn.Module) -> None:
    """Let the recurrent layers of a model compute with transformers' own code where their tensors are not on a GPU.

    It replaces functions in the modules that define the model's classes, for all models of the process. Idempotent.
    """
    for module in {sys.modules[type(layer).__module__] for layer in model.modules()}:
        for name, function in [*vars(module).items()]:
            is_function = isinstance(function, FunctionType) and hasattr(function, "__wrapped__")
            if is_function and function.__code__.co_filename == hub_kernels.__file__:
                setattr(module, name, _by_device(function))


def _by_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls transformers' choice for tensors on a GPU, else the code in torch that it wraps."""
    in_torch = inspect.unwrap(function)
    parameters = inspect.signature(in_torch).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    @functools.wraps(in_torch)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, torch.Tensor) and value.is_cuda for value in (*args, *kwargs.values())):
            return function(*args, **kwargs)
        # Layers pass arguments that only the kernels have, such as boundaries.
        accepted = {name: value for name, value in kwargs.items() if takes_all or name in parameters}
        return in_torch(*args, **accepted)

    return chosen
