"""The kinds of bugs, as rules over libcst nodes. To add one: a token in a `_swap` table, or a function with `@_rule`.

A rule yields (kind, first node, last node, new text); the finder turns that into a Mutation by the nodes' byte spans.
A function names its kinds in the decorator, so that KINDS is whole. Imported only where bugs are searched or a kind is
named: libcst takes a while to load.
"""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper

from data_pipeline.mutations import Mutation

Change = tuple[str, cst.CSTNode, cst.CSTNode, str]
"""(kind, first node replaced, last node replaced, new text)"""
Text = Callable[[cst.CSTNode], str]
Rule = Callable[[Any, Text], Iterator[Change]]
_RULES: dict[type[cst.CSTNode], list[Rule]] = {}
KINDS: set[str] = set()
"""Every kind that a rule below can yield."""


def _rule(*types: type[cst.CSTNode], kinds: Iterable[str]) -> Callable[[Rule], Rule]:
    KINDS.update(kinds)

    def register(rule: Rule) -> Rule:
        for node_type in types:
            _RULES.setdefault(node_type, []).append(rule)
        return rule

    return register


def _swap(kind: str, table: dict[type[cst.CSTNode], str]) -> None:
    """One rule for tokens that are simply exchanged for another token."""

    def rule(node: cst.CSTNode, _: Text) -> Iterator[Change]:
        yield kind, node, node, table[type(node)]

    KINDS.add(kind)
    for node_type in table:
        _RULES.setdefault(node_type, []).append(rule)


_swap("equality", {cst.Equal: "!=", cst.NotEqual: "=="})
_swap("direction", {cst.LessThan: ">", cst.GreaterThan: "<", cst.LessThanEqual: ">=", cst.GreaterThanEqual: "<="})
_swap("boundary", {cst.LessThan: "<=", cst.GreaterThan: ">=", cst.LessThanEqual: "<", cst.GreaterThanEqual: ">"})
_swap("and_or", {cst.And: "or", cst.Or: "and"})
_swap("membership", {cst.In: "not in", cst.NotIn: "in"})
_swap("identity", {cst.Is: "is not", cst.IsNot: "is"})
_swap("arithmetic", {cst.Add: "-", cst.Subtract: "+", cst.Multiply: "+", cst.FloorDivide: "*", cst.Modulo: "//"})
_swap("augmented", {cst.AddAssign: "-=", cst.SubtractAssign: "+=", cst.MultiplyAssign: "+="})
_swap("loop_jump", {cst.Break: "continue", cst.Continue: "break"})

_CONSTANTS = {"True": "False", "False": "True"}
_CALLS = {
    "any": ("any_all", "all"),
    "all": ("any_all", "any"),
    "min": ("min_max", "max"),
    "max": ("min_max", "min"),
}
_METHODS = {
    "startswith": ("prefix_suffix", "endswith"),
    "endswith": ("prefix_suffix", "startswith"),
    "lower": ("letter_case", "upper"),
    "upper": ("letter_case", "lower"),
    "lstrip": ("strip_side", "rstrip"),
    "rstrip": ("strip_side", "lstrip"),
    "append": ("extend", "extend"),
    "extend": ("extend", "append"),
}
_CODE = cst.Module([]).code_for_node
_PLAIN = (cst.Name, cst.Attribute, cst.Call, cst.Comparison, cst.Subscript)


@_rule(cst.Name, kinds=["boolean"])
def _constant(node: cst.Name, _: Text) -> Iterator[Change]:
    if node.value in _CONSTANTS:
        yield "boolean", node, node, _CONSTANTS[node.value]


@_rule(cst.Integer, kinds=["integer"])
def _integer(node: cst.Integer, _: Text) -> Iterator[Change]:
    if node.value.isdigit() and len(node.value) <= 3:
        value = int(node.value)
        yield "integer", node, node, str(value + 1)
        if value:
            yield "integer", node, node, str(value - 1)


@_rule(cst.Call, kinds=[kind for kind, _ in (*_CALLS.values(), *_METHODS.values())])
def _call_name(node: cst.Call, _: Text) -> Iterator[Change]:
    if isinstance(node.func, cst.Name) and node.func.value in _CALLS:
        kind, new = _CALLS[node.func.value]
        yield kind, node.func, node.func, new
    if isinstance(node.func, cst.Attribute) and node.func.attr.value in _METHODS:
        kind, new = _METHODS[node.func.attr.value]
        yield kind, node.func.attr, node.func.attr, new


@_rule(cst.Call, kinds=["swap_arguments"])
def _swap_arguments(node: cst.Call, text: Text) -> Iterator[Change]:
    for first, second in zip(node.args, node.args[1:], strict=False):
        if first.keyword or second.keyword or first.star or second.star:
            return
        one, two = text(first.value), text(second.value)
        if one != two and not isinstance(first.value, cst.GeneratorExp):
            yield "swap_arguments", first.value, second.value, f"{two}, {one}"


@_rule(cst.If, cst.IfExp, cst.While, kinds=["negate"])
def _negate_test(node: cst.If | cst.IfExp | cst.While, text: Text) -> Iterator[Change]:
    test = node.test
    while isinstance(test, cst.BooleanOperation):
        test = test.left
    if isinstance(test, _PLAIN):
        yield "negate", test, test, f"not {text(test)}"


@_rule(cst.UnaryOperation, kinds=["drop_not", "drop_minus"])
def _drop_not(node: cst.UnaryOperation, text: Text) -> Iterator[Change]:
    if isinstance(node.operator, cst.Not):
        yield "drop_not", node, node, text(node.expression)
    elif isinstance(node.operator, cst.Minus):
        yield "drop_minus", node, node, text(node.expression)


@_rule(cst.Return, kinds=["return_not"])
def _return_not(node: cst.Return, text: Text) -> Iterator[Change]:
    if isinstance(node.value, _PLAIN) and not (isinstance(node.value, cst.Name) and node.value.value == "None"):
        yield "return_not", node.value, node.value, f"not {text(node.value)}"


@_rule(cst.If, kinds=["drop_branch"])
def _drop_branch(node: cst.If, _: Text) -> Iterator[Change]:
    body = node.body.body
    if isinstance(node.body, cst.IndentedBlock) and not _is_pass(body[0]):
        yield "drop_branch", body[0], body[-1], "pass"


def _is_pass(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and isinstance(statement.body[0], cst.Pass)


class _Finder(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (ByteSpanPositionProvider,)

    def __init__(self, source: bytes, path: str, module: cst.Module) -> None:
        super().__init__()
        self.source, self.path, self.module = source, path, module
        self.functions: list[tuple[str, int]] = []
        self.found: list[Mutation] = []
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, (cst.Annotation, cst.Decorator, cst.FormattedString, cst.Assert)):
            return False
        if isinstance(node, cst.FunctionDef):
            start = min(self._span(n)[0] for n in (node, *node.decorators))
            self.functions.append((node.name.value, self._line(start)))
        elif self.functions:
            for rule in _RULES.get(type(node), ()):
                for kind, first, last, new in rule(node, self._text):
                    self._add(kind, first, last, new)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, cst.FunctionDef):
            self.functions.pop()

    def _span(self, node: cst.CSTNode) -> tuple[int, int]:
        span = self.get_metadata(ByteSpanPositionProvider, node)
        return span.start, span.start + span.length

    def _line(self, offset: int) -> int:
        return bisect_right(self.starts, offset)

    def _text(self, node: cst.CSTNode) -> str:
        """Source of an expression with its own parentheses, which spans leave out."""
        return self.module.code_for_node(node)

    def _add(self, kind: str, first: cst.CSTNode, last: cst.CSTNode, new: str) -> None:
        start, end = self._span(first)[0], self._span(last)[1]
        # Spans leave out a node's own parentheses; replacing parenthesised text needs the whole of it.
        start, end = start - _parentheses(first, "lpar"), end + _parentheses(last, "rpar")
        whole = self.source[start:end].decode()
        if whole == new:
            return
        head, old, new = _shrink(whole, new)
        start += head
        end = start + len(old.encode())
        line = self._line(start)
        begin = self.starts[line - 1]
        finish = self.source.find(b"\n", end)
        finish = len(self.source) if finish < 0 else finish
        before = self.source[begin:finish].decode()
        after = (self.source[begin:start] + new.encode() + self.source[end:finish]).decode()
        self.found.append(
            Mutation(kind, self.path, line, start - begin, *self.functions[-1], start, end, old, new, before, after)
        )


def _shrink(old: str, new: str) -> tuple[int, str, str]:
    """(bytes of the common start, rest of old, rest of new): only what differs, so no expression is copied along."""
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    tail = 0
    while tail < min(len(old), len(new)) - start and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    return len(old[:start].encode()), old[start : len(old) - tail], new[start : len(new) - tail]


def _parentheses(node: cst.CSTNode, side: str) -> int:
    """Bytes of a node's own parentheses on one side (`lpar` or `rpar`), white space inside them included."""
    own = getattr(node, side, ())
    return sum(len(_CODE(p).encode()) for p in own) if isinstance(own, tuple | list) else 0


def find(source: bytes, path: str) -> list[Mutation]:
    """All bugs of one file, unsorted; [] for what is not plain UTF-8 Python."""
    try:
        text = source.decode("utf-8")
        module = cst.parse_module(text)
        ast.parse(text)
    except (UnicodeDecodeError, cst.ParserSyntaxError, SyntaxError, ValueError, RecursionError):
        return []
    if text.startswith("\ufeff") or module.encoding.lower().replace("_", "-") not in ("utf-8", "ascii", "us-ascii"):
        return []
    finder = _Finder(source, path, module)
    MetadataWrapper(module, unsafe_skip_copy=True).visit(finder)
    return finder.found
