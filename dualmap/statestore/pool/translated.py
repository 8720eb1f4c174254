"""Rules of Python as functions of Lua: what the scripts must hold is declared once, in ``scheduling``.

A rule is a plain function that computes one value from its arguments. Its body is made of assignments, ``if`` and
``return``; its expressions of arithmetic, comparisons, ``and``, ``or``, ``not``, conditional expressions, ``min`` and
``max``, attributes of arguments, constants, calls of functions that are one ``return``, which are written in their
place, and a constructor of named figures. Anything else raises ``UntranslatableError`` when the scripts are loaded.

Lua takes 0 for true, so a condition has to be a comparison or a truth value. Numbers are doubles there.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_OPERATORS: Final[Mapping[type[ast.AST], str]] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.And: "and", ast.Or: "or",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Eq: "==", ast.Is: "==", ast.NotEq: "~=", ast.IsNot: "~=",
}  # fmt: skip
_BUILT_IN: Final = frozenset({"min", "max"})


class UntranslatableError(ValueError):
    """A rule has what is not translated."""


Figures = Callable[[type[Any], Mapping[str, str]], str]
"""The Lua of what a rule returns: a constructor of named figures, with the code of each that is given."""


@dataclass(frozen=True, slots=True)
class Translation:
    """How rules are written in Lua."""

    attributes: Mapping[str, str] = field(default_factory=dict)
    """The names of attributes that are other ones in Lua."""
    figures: Figures | None = None
    called: Sequence[Callable[..., Any]] = ()
    """Rules that are functions of Lua already."""

    def function(self, rule: Callable[..., Any], name: str | None = None, more: Sequence[str] = ()) -> str:
        """The local function of Lua that a rule is, under its own name or another one, with more parameters."""
        parsed = _parsed(rule)
        parameters = [*(each.arg for each in parsed.args.args), *more]
        scope = _Scope(self, rule, {each: each for each in parameters})
        return f"local function {name or parsed.name}({', '.join(parameters)})\n{scope.block(parsed.body)}end\n"


class _Scope:
    """The names of one rule."""

    def __init__(self, translation: Translation, rule: Callable[..., Any], names: Mapping[str, str]) -> None:
        self._translation = translation
        self._rule = rule
        self._names = dict(names)

    def block(self, statements: Sequence[ast.stmt]) -> str:
        return "".join([self._statement(each) for each in statements])

    def _statement(self, node: ast.stmt) -> str:
        match node:
            case ast.Expr(ast.Constant(str())):
                return ""  # the docstring
            case ast.Assign([ast.Name(name)], value):
                code = f"local {name} = {self._code(value)}\n"
                self._names[name] = name
                return code
            case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)):
                assigned = zip(targets, values, strict=True)
                return "".join([self._statement(ast.Assign([target], value)) for target, value in assigned])
            case ast.If(test, body, []):
                return f"if {self._code(test)} then\n{self.block(body)}end\n"
            case ast.Return(ast.Call(ast.Name(name), [], keywords)) if self._translation.figures is not None:
                given = {str(each.arg): self._code(each.value) for each in keywords}
                return self._translation.figures(self._rule.__globals__[name], given)
            case ast.Return(ast.expr() as value):
                return f"return {self._code(value)}\n"
        raise self._untranslatable(node)

    def _code(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(bool() as value):
                return str(value).lower()
            case ast.Constant(int() | float() | str() as value):
                return _constant(value)
            case ast.Name(name) if name in self._names:
                return self._names[name]
            case ast.Attribute(ast.Name(name), attribute) if name in self._names:
                return f"{self._names[name]}.{self._translation.attributes.get(attribute, attribute)}"
            case ast.Name() | ast.Attribute():
                return _constant(self._known(node))
            case ast.UnaryOp(ast.USub(), operand):
                return f"-{self._code(operand)}"
            case ast.UnaryOp(ast.Not(), operand):
                return f"not {self._code(operand)}"
            case ast.BinOp(left, operator, right) if type(operator) in _OPERATORS:
                return f"({self._code(left)} {_OPERATORS[type(operator)]} {self._code(right)})"
            case ast.Compare(left, [operator], [right]) if type(operator) in _OPERATORS:
                return f"({self._code(left)} {_OPERATORS[type(operator)]} {self._code(right)})"
            case ast.BoolOp(operator, values):
                return f"({f' {_OPERATORS[type(operator)]} '.join(map(self._code, values))})"
            case ast.IfExp(test, body, orelse):
                return f"({self._code(test)} and {self._code(body)} or {self._code(orelse)})"
            case ast.Call(ast.Name(name), arguments, []) if name in _BUILT_IN:
                return f"{name}({', '.join(map(self._code, arguments))})"
            case ast.Call(ast.Name(name), arguments, []):
                called, given = self._known(node.func), [self._code(each) for each in arguments]
                is_there = called in self._translation.called
                return f"{name}({', '.join(given)})" if is_there else self._inlined(called, given)
        raise self._untranslatable(node)

    def _inlined(self, called: Any, arguments: Sequence[str]) -> str:
        parsed = _parsed(called)
        names = dict(zip([each.arg for each in parsed.args.args], arguments, strict=True))
        *before, returned = [each for each in parsed.body if not isinstance(each, ast.Expr)]
        if before or not isinstance(returned, ast.Return) or returned.value is None:
            raise self._untranslatable(parsed)
        return _Scope(self._translation, called, names)._code(returned.value)

    def _known(self, node: ast.expr) -> Any:
        """The value of a name of the rule's module, or of an attribute of such a value."""
        if isinstance(node, ast.Attribute):
            return getattr(self._known(node.value), node.attr)
        if not isinstance(node, ast.Name) or node.id not in self._rule.__globals__:
            raise self._untranslatable(node)
        return self._rule.__globals__[node.id]

    def _untranslatable(self, node: ast.AST) -> UntranslatableError:
        return UntranslatableError(f"{self._rule.__qualname__} has what no script can: {ast.unparse(node)}")


def _parsed(rule: Callable[..., Any]) -> ast.FunctionDef:
    (parsed,) = ast.parse(textwrap.dedent(inspect.getsource(rule))).body
    assert isinstance(parsed, ast.FunctionDef)
    return parsed


def _constant(value: object) -> str:
    if isinstance(value, str):
        return repr(str(value))
    if isinstance(value, int | float):
        return repr(value)
    raise UntranslatableError(f"{value!r} is no constant of a script")
