"""The text form of a graph: one line a node, and it parses back to an equal graph.

    graph mlp {
      dim batch = 1..64 multiple 8
      input x: f32[batch, 784]
      param w: f32[784, 10]
      const one: f32[] = [1.0]
      const table: f32[100] = sha256:9f2c...
      h: f32[batch, 10] = matmul(x, w) from "Gemm_0"
      %0: f32[batch, 10] = add(h, one)
      %1: f32[batch, 10] = softmax(%0, axis=1)
      output y = %1
    }

Attributes that have their default value are left out. `from` gives the provenance. Values without a name, or with one
that is taken, print as %n. A dim is declared as lo..hi (nothing after the dots: unbounded). Constants of more than 16
elements print by `content_hash`; `constants_table` gives their arrays. What is not part of the text: the data of params
and the initial values of states.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any

from rlx.errors import ModelFormatError, OptionError, RlxError
from rlx.ir.dtype import DTYPES
from rlx.ir.encoding import encoding_named
from rlx.ir.graph import MAX_NESTING, OPERATORS, Array, Graph, Node, Operator, TensorType, Value, check_array
from rlx.ir.literal import array_of, content_hash, format_attribute, inline
from rlx.ir.shape import MAX_NESTED, Dim, Guard, Size, Symbol, format_size, format_symbol, max_size, min_size

__all__ = ["constants_table", "make_op", "parse_graph", "print_graph", "read_graph"]

MAX_DEPTH = MAX_NESTING  # of nested regions and tuples in a text
MAX_FACTORS = 400  # of one size in a text
MAX_DIGITS = 40

_KEYWORDS = frozenset({"graph", "dim", "input", "param", "state", "const", "guard", "update", "output", "result"})
_IDENTIFIER = re.compile(r"[A-Za-z_/][A-Za-z0-9_/.]*")


def constants_table(graph: Graph) -> dict[str, Array]:
    """The constants that the text of the graph (regions included) names by their hash."""
    table: dict[str, Array] = {}
    for const in graph.constants:
        data = _data(const)
        if inline(const.type, data) is None:
            table[content_hash(data)] = data
    for node in graph.nodes:
        for region in node.regions:
            table |= constants_table(region)
    return table


def _data(const: Value) -> Array:
    if const.data is None:
        raise OptionError(f"constant {const.name!r} has no data")
    return const.data


# ---- printing


def print_graph(graph: Graph) -> str:
    """The text form, see the module; it ends in a newline."""
    dims = [_dim_line(symbol) for symbol in graph.dims().values()]
    return "\n".join(_graph_lines(graph, dims)) + "\n"


def _name(name: str) -> str:
    return name if _IDENTIFIER.fullmatch(name) and name not in _KEYWORDS else json.dumps(name)


def _dim_line(symbol: Symbol) -> str:
    multiple = f" multiple {symbol.multiple}" if symbol.multiple != 1 else ""
    hi = "" if symbol.hi is None else symbol.hi
    return f"dim {format_symbol(symbol.name)} = {symbol.lo}..{hi}{multiple}"


def _graph_lines(graph: Graph, dims: list[str]) -> Iterator[str]:
    ids = _ids(graph)
    yield f"graph {_name(graph.name)} {{"
    for line in (*dims, *_leaf_lines(graph, ids), *_node_lines(graph, ids), *_result_lines(graph, ids)):
        yield f"  {line}"
    yield "}"


def _ids(graph: Graph) -> dict[Value, str]:
    """What each value is called in the text: its name if that is not taken, else %n."""
    ids: dict[Value, str] = {}
    taken: set[str] = set()
    unnamed = 0
    for value in graph.values():
        if value.name and value.name not in taken:
            taken.add(value.name)
            ids[value] = _name(value.name)
        else:
            ids[value] = f"%{unnamed}"
            unnamed += 1
    return ids


def _leaf_lines(graph: Graph, ids: Mapping[Value, str]) -> Iterator[str]:
    for value in (*graph.inputs, *graph.params, *graph.states):
        yield f"{value.kind} {ids[value]}: {value.type}"
    for const in graph.constants:
        data = _data(const)
        text = inline(const.type, data) or f"sha256:{content_hash(data)}"
        yield f"const {ids[const]}: {const.type} = {text}"


def _node_lines(graph: Graph, ids: Mapping[Value, str]) -> Iterator[str]:
    for node in graph.nodes:
        made = ", ".join(f"{ids[v]}: {v.type}" for v in node.outputs)
        given = [ids.get(v, f"<{v!r} of another graph>") for v in node.inputs]
        source = " from " + ", ".join(map(json.dumps, node.provenance)) if node.provenance else ""
        head = f"{made} = {_name(node.op.op_name)}({', '.join([*given, *_attributes(node)])}){source}"
        if not node.regions:
            yield head
            continue
        yield head + " {"
        for region in node.regions:
            for line in _graph_lines(region, []):
                yield f"  {line}"
        yield "}"


def _result_lines(graph: Graph, ids: Mapping[Value, str]) -> Iterator[str]:
    for guard in graph.guards:
        yield f"guard {format_size(guard.lhs)} == {format_size(guard.rhs)} because {json.dumps(guard.why)}"
    for state, value in graph.updates.items():
        yield f"update {_name(state)} = {ids[value]}"
    for output in graph.outputs:
        yield f"output {_name(output.name)} = {ids[output.value]}"
    for result in graph.results:
        yield f"result {_name(result.name)} {result.kind} = [{', '.join(map(_name, result.outputs))}]"


def _attributes(node: Node) -> Iterator[str]:
    defaults = _defaults(type(node.op))
    for name, value in node.op.attributes().items():
        text = format_attribute(value)
        if text != defaults.get(name):
            yield f"{name}={text}"


@cache
def _defaults(cls: Any) -> dict[str, str]:
    return {f.name: format_attribute(f.default) for f in fields(cls) if f.default is not MISSING}


# ---- parsing


def parse_graph(text: str, constants: Mapping[str, Array] | None = None) -> Graph:
    """The graph that `print_graph` wrote; `ModelFormatError` names the line of what is wrong.

    `constants` are the arrays of the constants named by hash, as from `constants_table`. The ops must be registered.
    """
    parser = _Parser(text, constants or {})
    try:
        graph = parser.graph(0)
        parser.expect("end")
    except ModelFormatError:
        raise
    except (RlxError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, AssertionError) as error:
        raise ModelFormatError(f"line {parser.line}: {error}") from error
    return graph


_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r]+|\#[^\n]*)
    | (?P<newline>\n)
    | (?P<string>"(?:[^"\\\n]|\\.)*")
    | (?P<symbol>`[^`\n]*`)
    | (?P<hash>sha256:[0-9a-f]{64})
    | (?P<float>\d+\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)
    | (?P<int>\d+)
    | (?P<id>%\d+)
    | (?P<word>[A-Za-z_/][A-Za-z0-9_/.]*)
    | (?P<punct>==|\.\.|[{}()\[\]:,=@*+-])""",
    re.VERBOSE | re.ASCII,
)


def read_graph(text: str, constants: Mapping[str, Array], data: Mapping[str, Array], ops: object) -> Graph:
    """As `parse_graph`, with the values of params and states by name; `ops` are the classes that the text names."""
    graph = parse_graph(text, constants)
    for value in (*graph.params, *graph.states):
        value.data = data.get(value.name)
    return graph


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    """(kind, text, line): punctuation is its own kind, blank lines are dropped."""
    position, line, last = 0, 1, "newline"
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ModelFormatError(f"line {line}: unexpected {text[position : position + 20]!r}")
        kind = match.lastgroup or ""
        position = match.end()
        if kind != "skip" and not kind == last == "newline":
            last = kind
            yield match[0] if kind == "punct" else kind, match[0], line
        line += kind == "newline"
    if last != "newline":
        yield "newline", "\n", line
    yield "end", "end of the text", line


class _Parser:
    """Recursive descent, one token ahead."""

    def __init__(self, text: str, constants: Mapping[str, Array]) -> None:
        self._source = _tokens(text)
        self._constants = constants
        self._dims: dict[str, Size] = {}
        self.line = 1
        self.kind, self.text = "", ""
        self._advance()

    # ---- tokens

    def _advance(self) -> None:
        self.kind, self.text, self.line = next(self._source)

    def _expected(self, wanted: str) -> ModelFormatError:
        shown = self.text if self.text.strip() else "the end of the line"
        return ModelFormatError(f"line {self.line}: expected {wanted}, got {shown[:60]!r}")

    def accept(self, kind: str, text: str | None = None) -> str | None:
        """The token's text if it is of that kind (and text), moving past it."""
        if self.kind != kind or (text is not None and self.text != text):
            return None
        taken = self.text
        if kind != "end":
            self._advance()
        return taken

    def expect(self, kind: str, text: str | None = None) -> str:
        taken = self.accept(kind, text)
        if taken is None:
            raise self._expected(repr(text) if text else f"{kind!r}" if not kind.isalpha() else kind)
        return taken

    def _int(self) -> int:
        text = self.expect("int")
        if len(text) > MAX_DIGITS:
            raise ModelFormatError(f"line {self.line}: an integer of {len(text)} digits")
        return int(text)

    def _string(self) -> str:
        return str(json.loads(self.expect("string")))

    def _named(self) -> str:
        """A name: a word or a string."""
        return self.accept("word") or self._string()

    def _list(self, item: Callable[[], Any], end: str) -> list[Any]:
        """item, item, ... up to and past the token `end` (a comma before it is allowed)."""
        items: list[Any] = []
        while not self.accept(end):
            items.append(item())
            if not self.accept(","):
                self.expect(end)
                break
        return items

    # ---- graphs

    def graph(self, depth: int) -> Graph:
        if depth > MAX_DEPTH:
            raise ModelFormatError(f"line {self.line}: regions are nested more than {MAX_DEPTH} deep")
        self.expect("word", "graph")
        graph = Graph(self._named())
        self.expect("{")
        self.expect("newline")
        ids: dict[str, Value] = {}
        guards: list[Guard] = []
        while not self.accept("}"):
            self._statement(graph, ids, guards, depth)
        self.expect("newline")
        pairs = {(g.lhs, g.rhs) for g in guards}
        graph.guards = guards + [g for g in graph.guards if (g.lhs, g.rhs) not in pairs]
        return graph

    def _statement(self, graph: Graph, ids: dict[str, Value], guards: list[Guard], depth: int) -> None:
        if self.kind == "end":
            raise self._expected("'}'")
        keyword = self.text if self.kind == "word" and self.text in _KEYWORDS else ""
        if not keyword:
            self._node(graph, ids, depth)
            return
        self._advance()
        match keyword:
            case "dim":
                self._dim()
            case "input" | "param" | "state" | "const":
                self._leaf(graph, ids, keyword)
            case "guard":
                lhs = self._size()
                self.expect("==")
                rhs = self._size()
                self.expect("word", "because")
                guards.append(Guard(lhs, rhs, self._string()))
            case "update":
                state = graph.find(self._named())
                self.expect("=")
                graph.update(state, self._value(ids))
            case "output":
                name = self._named()
                self.expect("=")
                graph.output(self._value(ids), name)
            case "result":
                graph.result(self._named(), self.expect("word"), self._results())
            case _:
                raise ModelFormatError(f"line {self.line}: {keyword!r} can't stand here")
        self.expect("newline")

    def _results(self) -> list[str]:
        names: list[str] = []
        self.expect("=")
        self.expect("[")
        while self.kind != "]":
            names.append(self._named())
            if not self.accept(","):
                break
        self.expect("]")
        return names

    def _dim(self) -> None:
        name = self._symbol_name()
        self.expect("=")
        lo = self._int()
        self.expect("..")
        hi = self._int() if self.kind == "int" else None
        multiple = self._int() if self.accept("word", "multiple") else 1
        if name in self._dims:
            raise ModelFormatError(f"line {self.line}: the dim {name!r} is declared twice")
        self._dims[name] = Dim(name, lo, hi, multiple)

    def _leaf(self, graph: Graph, ids: dict[str, Value], kind: str) -> None:
        line, key, name = self.line, *self._id()
        self.expect(":")
        type = self._type()
        if type.encoding is not None and kind not in ("param", "state"):
            raise ModelFormatError(f"line {line}: only params and states can be encoded")
        match kind:
            case "input":
                value = graph.input(name, type.shape, type.dtype)
            case "param":
                value = graph.param(name, type.shape, type.dtype, encoding=type.encoding)
            case "state":
                value = graph.state(name, type.shape, type.dtype, encoding=type.encoding)
            case _:
                self.expect("=")
                value = Value(graph, type, "const", name)
                value.data = self._constant(type)
                graph.constants.append(value)
        self._define(ids, key, value)

    def _constant(self, type: TensorType) -> Array:
        found = self.accept("hash")
        if found is None:
            self.expect("[")
            if not all(isinstance(s, int) for s in type.shape):
                raise ModelFormatError(f"line {self.line}: the shape of a constant is made of integers")
            item = self._string if type.dtype.kind == "s" else self._number
            array = array_of(self._list(item, "]"), type)
        else:
            key = found.removeprefix("sha256:")
            if key not in self._constants:
                raise ModelFormatError(f"line {self.line}: the constant {key} is not among those given")
            array = self._constants[key].copy()
            if content_hash(array) != key:
                raise ModelFormatError(f"line {self.line}: the array given for the constant {key} has another hash")
            check_array(f"constant {key}", array, type)
        array.flags.writeable = False
        return array

    def _number(self) -> float | int | bool:
        if self.kind == "word" and self.text in ("true", "false"):
            return self.expect("word") == "true"
        sign = -1 if self.accept("-") else 1
        if self.kind == "int":
            return sign * self._int()
        if self.kind == "float" or self.text in ("nan", "inf"):
            number = sign * float(self.text)
            self._advance()
            return number
        raise self._expected("a number")

    # ---- nodes

    def _node(self, graph: Graph, ids: dict[str, Value], depth: int) -> None:
        line = self.line
        made = [self._typed_id()]
        while self.accept(","):
            made.append(self._typed_id())
        self.expect("=")
        op_name = self._named()
        if op_name not in OPERATORS:
            raise ModelFormatError(f"line {line}: no op is named {op_name!r}")
        self.expect("(")
        inputs, attributes = self._arguments(ids)
        source = [self._string()] if self.accept("word", "from") else []
        while source and self.accept(","):
            source.append(self._string())
        regions = []
        if self.accept("{"):
            self.expect("newline")
            while not self.accept("}"):
                regions.append(self.graph(depth + 1))
        op = make_op(op_name, attributes, f"line {line}: ")
        try:
            outputs = graph.add(op, *inputs, provenance=source, regions=regions)
        except (RlxError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, AssertionError) as error:
            raise ModelFormatError(f"line {line}: {error}") from error
        if [v.type for v in outputs] != [type for _, _, type in made]:
            inferred = ", ".join(str(v.type) for v in outputs)
            written = ", ".join(str(type) for _, _, type in made)
            raise ModelFormatError(f"line {line}: {op_name} gives {inferred}; the text says {written}")
        for value, (key, name, _) in zip(outputs, made, strict=True):
            value.name = name
            self._define(ids, key, value)
        self.expect("newline")

    def _arguments(self, ids: dict[str, Value]) -> tuple[list[Value], dict[str, Any]]:
        inputs: list[Value] = []
        attributes: dict[str, Any] = {}
        while not self.accept(")"):
            line = self.line
            key, name = self._id()
            if self.accept("="):
                if name in attributes:
                    raise ModelFormatError(f"line {line}: the attribute {name!r} is given twice")
                attributes[name] = self._attribute(0)
            elif attributes:
                raise ModelFormatError(f"line {line}: inputs come before attributes")
            else:
                inputs.append(self._lookup(ids, key, line))
            if not self.accept(","):
                self.expect(")")
                break
        return inputs, attributes

    def _id(self) -> tuple[str, str]:
        """(key, name) of a value: %n has no name."""
        anonymous = self.accept("id")
        if anonymous:
            return anonymous, ""
        name = self._named()
        return f"={name}", name

    def _typed_id(self) -> tuple[str, str, TensorType]:
        key, name = self._id()
        self.expect(":")
        return key, name, self._type()

    def _value(self, ids: Mapping[str, Value]) -> Value:
        line = self.line
        return self._lookup(ids, self._id()[0], line)

    def _lookup(self, ids: Mapping[str, Value], key: str, line: int) -> Value:
        if key not in ids:
            raise ModelFormatError(f"line {line}: there is no value {key.removeprefix('=')!r} before this line")
        return ids[key]

    def _define(self, ids: dict[str, Value], key: str, value: Value) -> None:
        if key in ids:
            raise ModelFormatError(f"line {self.line}: the value {key.removeprefix('=')!r} is defined twice")
        ids[key] = value

    # ---- types, attributes and sizes

    def _type(self) -> TensorType:
        name = self.expect("word")
        if name not in DTYPES:
            raise ModelFormatError(f"line {self.line}: unknown element type {name!r}")
        encoding = encoding_named(self.expect("word")) if self.accept("@") else None
        self.expect("[")
        return TensorType(tuple(self._list(self._size, "]")), DTYPES[name], encoding)

    def _attribute(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ModelFormatError(f"line {self.line}: tuples are nested more than {MAX_DEPTH} deep")
        if self.accept("("):
            return tuple(self._list(lambda: self._attribute(depth + 1), ")"))
        if self.kind == "string":
            return self._string()
        if self.kind == "word":
            if self.text in ("true", "false", "none"):
                return {"true": True, "false": False, "none": None}[self.expect("word")]
            if self.text in DTYPES:
                return DTYPES[self.expect("word")]
        sign = -1 if self.accept("-") else 1
        if self.kind == "float" or (self.kind == "word" and self.text in ("nan", "inf")):
            return self._number() * sign
        return self._size(sign)

    def _size(self, sign: int = 0) -> Size:
        """term + term - term ...; `sign` (+1 or -1) when a sign before the first term has been read."""
        self._factors = 0
        return self._sum(sign or (-1 if self.accept("-") else 1), 0)

    def _sum(self, sign: int, depth: int) -> Size:
        total = self._product(depth) * sign
        while self.kind in ("+", "-"):
            sign = 1 if self.expect(self.kind) == "+" else -1
            total = total + self._product(depth) * sign
        return total

    def _product(self, depth: int) -> Size:
        product = self._factor(depth)
        while self.accept("*"):
            product = product * self._factor(depth)
        return product

    def _factor(self, depth: int) -> Size:
        self._factors += 1
        if self._factors > MAX_FACTORS or depth > MAX_NESTED:
            raise ModelFormatError(f"line {self.line}: a size of more than {MAX_FACTORS} factors or too deeply nested")
        if self.kind == "int":
            return self._int()
        if self.kind == "word" and self.text in ("floordiv", "min", "max"):
            function = self.expect("word")
            self.expect("(")
            args = self._list(lambda: self._sum(-1 if self.accept("-") else 1, depth + 1), ")")
            if len(args) < 2 or (function == "floordiv" and len(args) > 2):
                raise ModelFormatError(f"line {self.line}: {function} takes two sizes")
            if function == "floordiv":
                quotient: Size = args[0] // args[1]
                return quotient
            return min_size(*args) if function == "min" else max_size(*args)
        if self.kind not in ("word", "symbol"):
            raise self._expected("a size")
        line, name = self.line, self._symbol_name()
        if name not in self._dims:
            raise ModelFormatError(f"line {line}: the dim {name!r} is not declared")
        return self._dims[name]

    def _symbol_name(self) -> str:
        quoted = self.accept("symbol")
        return self.expect("word") if quoted is None else str(json.loads(f'"{quoted[1:-1]}"'))


# ---- attributes


def make_op(name: str, attributes: Mapping[str, Any], where: str = "") -> Operator:
    """The op of that name, its attributes checked against the annotations of its class. Raises `ModelFormatError`."""
    if name not in OPERATORS:
        raise ModelFormatError(f"{where}no op is named {name!r}")
    cls: Any = OPERATORS[name]
    hints = _hints(cls)
    for f in fields(cls):
        if f.name not in attributes and f.default is MISSING:
            raise ModelFormatError(f"{where}{name} needs the attribute {f.name!r}")
    for key, value in attributes.items():
        if key not in hints:
            raise ModelFormatError(f"{where}{name} has no attribute {key!r}")
        if not _fits(value, hints[key]):
            expected = getattr(hints[key], "__name__", None) or str(hints[key])
            raise ModelFormatError(f"{where}{name}: attribute {key!r} is a {expected}, got {format_attribute(value)}")
    op: Operator = cls(**attributes)
    return op


@cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


def _fits(value: object, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is typing.Union or origin is types.UnionType:
        return any(_fits(value, arg) for arg in args)
    if origin is typing.Literal:
        return value in args
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(args) == 2 and args[1] is Ellipsis:
            return all(_fits(v, args[0]) for v in value)
        return len(args) == len(value) and all(map(_fits, value, args))
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(hint, type) and isinstance(value, hint)
