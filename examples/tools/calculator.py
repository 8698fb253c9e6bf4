"""A calculator as a tool: `rollout.environment: examples.tools.calculator:Calculator`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from gkd.environment.tools import ToolEnvironment

MAX_BITS = 4096  # of an integer: the student may ask for 9**9**9
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers, parentheses, and the operators + - * / // % **.
    """
    return str(_value(ast.parse(expression.strip(), mode="eval").body))


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _small(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _small(_OPERATORS[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and isinstance(left, int) and abs(right) * left.bit_length() > MAX_BITS:
            raise ValueError("the result is too large")
        return _small(_OPERATORS[type(node.op)](left, right))
    raise ValueError(f"{ast.unparse(node)!r} is neither a number nor an arithmetic operation")


def _small(value: Any) -> Any:
    if isinstance(value, complex) or (isinstance(value, int) and value.bit_length() > MAX_BITS):
        raise ValueError("the result is too large, or no real number")
    return value


class Calculator(ToolEnvironment):
    """One tool, `calculate`; a turn without a call ends the trajectory."""

    functions = (calculate,)
