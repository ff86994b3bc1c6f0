"""Plain Python functions over integers as machine code: their syntax is translated to LLVM IR, text to text.

What can be translated is what `rlx.plan.search` is written in:

    values       int (64 bits, wrapping); float where a constant or a quotient is one; bool as 0 or 1
    arrays       x.name[i], read and written, and len(x.name), where x is the first parameter: a NamedTuple of arrays
    expressions  + - * & ^ >> // (of positive numbers) /, comparisons, and, or, not, a if c else b, min, max, calls
    statements   assignments, also of tuples and augmented; if, while, for in range, break, continue, return

Anything else is a `CompileError` that names the line. Indices are not checked.
"""

from __future__ import annotations

import ast
import ctypes
import inspect
import struct
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlx.errors import CompileError
from rlx.forks import Undivided

__all__ = ["compile_functions"]

INT, FLOAT = "i64", "double"
ARITHMETIC: dict[type, str] = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul"}
INTEGER: dict[type, str] = {ast.BitAnd: "and", ast.BitXor: "xor", ast.RShift: "ashr", ast.FloorDiv: "sdiv"}
COMPARISONS: dict[type, tuple[str, str]] = {  # of integers, of floats
    ast.Lt: ("slt", "olt"), ast.LtE: ("sle", "ole"), ast.Gt: ("sgt", "ogt"), ast.GtE: ("sge", "oge"),
    ast.Eq: ("eq", "oeq"), ast.NotEq: ("ne", "une"),
}  # fmt: skip

Operand = tuple[str, str]  # type and text of a value in IR

undivided = Undivided()  # no fork while LLVM is at work


def compile_functions(functions: Sequence[Callable[..., Any]], fields: Sequence[str]) -> Callable[..., int]:
    """The last of some functions as machine code; it may call those before it, and they each other.

    `fields` are the names of the arrays in the first parameter, in order. The result takes these arrays (NumPy's, of
    int64), and integers as the function's other parameters. Raises `CompileError` for what can't be translated.
    """
    results = {function.__name__: _results(function) for function in functions}
    texts = [_Translation(function, fields, results).text() for function in functions]
    name = functions[-1].__name__
    address, owner = _load("\n".join([*texts, "!0 = !{}"]), name)
    count = len(inspect.signature(functions[-1]).parameters) - 1
    call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * count)(address)

    def run(arrays: Sequence[Any], *numbers: int) -> int:
        places = [number for array in arrays for number in (array.ctypes.data, len(array))]
        return int(call(ctypes.create_string_buffer(struct.pack(f"{len(places)}q", *places)), *numbers))

    run.owner = owner  # type: ignore[attr-defined]  # the code lives as long as the function
    return run


def _results(function: Callable[..., Any]) -> int:
    """How many integers a function returns, by its annotation; 0 for one that is no tuple."""
    annotation = str(inspect.signature(function).return_annotation)
    return annotation.count(",") + 1 if annotation.startswith("tuple[") else 0


@undivided
def _load(ir: str, name: str) -> tuple[int, Any]:
    """Compiles IR; the address of a function in it, and what must stay alive."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(ir)
    module.verify()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu=llvm.get_host_cpu_name(), opt=3, jit=True)
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine.get_function_address(name), engine


class _Translation:
    """The IR of one function: every variable is a place on the stack, which LLVM turns into registers."""

    def __init__(self, function: Callable[..., Any], fields: Sequence[str], results: Mapping[str, int]) -> None:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        assert isinstance(tree, ast.FunctionDef)
        self.tree = tree
        self.globals = function.__globals__
        self.fields = list(fields)
        self.results = results
        self.file = inspect.getsourcefile(function)
        self.first_line = function.__code__.co_firstlineno
        first, *rest = [argument.arg for argument in tree.args.args]
        self.arrays: str | None = first
        self.parameters = rest
        if tree.args.args[0].annotation is not None and ast.unparse(tree.args.args[0].annotation) == "int":
            self.arrays, self.parameters = None, [first, *rest]
        self.types: dict[str, str] = {}

    def text(self) -> str:
        """The definition; it is written anew as long as a variable turns out to be a float."""
        while True:
            before = dict(self.types)
            self.lines: list[str] = []
            self.count = 0
            self.loops: list[tuple[str, str]] = []  # where `continue` and `break` go
            self.block(self.tree.body)
            if self.types == before:
                break
        name, result = self.tree.name, self.result_type(self.tree.name)
        heads = ["ptr %arrays"] if self.arrays is not None else []
        heads += [f"i64 %in.{parameter}" for parameter in self.parameters]
        entry = [f"%{variable} = alloca {kind}" for variable, kind in self.types.items()]
        entry += [f"store i64 %in.{parameter}, ptr %{parameter}" for parameter in self.parameters]
        body = "\n  ".join([*entry, *self.lines, f"ret {result} zeroinitializer"])
        linkage = "" if name == list(self.results)[-1] else "internal "
        return f"define {linkage}{result} @{name}({', '.join(heads)}) nounwind {{\n  {body}\n}}"

    def result_type(self, name: str) -> str:
        count = self.results[name]
        return f"{{ {', '.join([INT] * count)} }}" if count else INT

    def refused(self, node: ast.AST) -> CompileError:
        line = self.first_line + getattr(node, "lineno", 1) - 1
        return CompileError(f"{self.file}:{line}: can't be translated to machine code: {ast.unparse(node)}")

    # ---- lines of IR

    def emit(self, text: str) -> str:
        """Adds an instruction and gives the name of its result."""
        self.count += 1
        self.lines.append(f"%t{self.count} = {text}")
        return f"%t{self.count}"

    def labels(self, *names: str) -> Iterator[str]:
        self.count += 1
        return (f"{name}{self.count}" for name in names)

    def jump(self, label: str) -> None:
        self.lines.append(f"br label %{label}")

    def start(self, label: str, *, falls_through: bool = True) -> None:
        if falls_through:
            self.jump(label)
        self.lines.append(f"{label}:")

    def branch(self, test: ast.expr, yes: str, no: str) -> None:
        truth = self.truth(test)
        self.lines.append(f"br i1 {truth}, label %{yes}, label %{no}")

    def place(self, name: str, kind: str) -> str:
        """The place of a variable, which is a float's once a float was put there."""
        if self.types.get(name) != FLOAT:
            self.types[name] = kind
        return f"%{name}"

    def store(self, target: ast.expr, value: Operand) -> None:
        if isinstance(target, ast.Name):
            place = self.place(target.id, value[0])
            kind = self.types[target.id]
        elif isinstance(target, ast.Subscript):
            place, kind = self.element(target), INT
        else:
            raise self.refused(target)
        self.lines.append(f"store {kind} {self.converted(value, kind)}, ptr {place}")

    def converted(self, value: Operand, kind: str) -> str:
        if value[0] == kind:
            return value[1]
        return self.emit(f"sitofp i64 {value[1]} to double" if kind == FLOAT else f"fptosi double {value[1]} to i64")

    # ---- statements

    def block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(ast.Constant()):  # a docstring
                pass
            case ast.Expr(ast.Call() as call):
                self.value(call)
            case ast.Assign(targets, value):
                self.assign(targets, value)
            case ast.AugAssign(target, operator, value):
                self.store(target, self.binary(node, operator, self.value(target), self.value(value)))
            case ast.If(test, body, orelse):
                yes, no, end = self.labels("then", "else", "end")
                self.branch(test, yes, no)
                self.start(yes, falls_through=False)
                self.block(body)
                self.jump(end)
                self.start(no, falls_through=False)
                self.block(orelse)
                self.start(end)
            case ast.While(test, body, []):
                head, inside, end = self.labels("while", "do", "done")
                self.start(head)
                self.branch(test, inside, end)
                self.start(inside, falls_through=False)
                self.looped(body, head, end)
            case ast.For(ast.Name(name), ast.Call(ast.Name("range"), ([_] | [_, _]) as bounds), body, []):
                self.for_range(name, [self.value(bound)[1] for bound in bounds], body)
            case ast.Return(value):
                self.give(value)
                self.start(*self.labels("after"), falls_through=False)
            case ast.Break() | ast.Continue():
                self.jump(self.loops[-1][isinstance(node, ast.Break)])
                self.start(*self.labels("after"), falls_through=False)
            case _:
                raise self.refused(node)

    def assign(self, targets: list[ast.expr], value: ast.expr) -> None:
        match targets, value:
            case [ast.Tuple(parts)], ast.Tuple(values):
                for part, one in zip(parts, [self.value(one) for one in values], strict=True):
                    self.store(part, one)
            case [ast.Tuple(parts)], ast.Call():
                kind, result = self.value(value)
                for number, part in enumerate(parts):
                    self.store(part, (INT, self.emit(f"extractvalue {kind} {result}, {number}")))
            case _:
                found = self.value(value)
                for target in targets:
                    self.store(target, found)

    def looped(self, body: Sequence[ast.stmt], again: str, end: str) -> None:
        self.loops.append((again, end))
        self.block(body)
        self.loops.pop()
        self.jump(again)
        self.start(end, falls_through=False)

    def for_range(self, name: str, bounds: Sequence[str], body: Sequence[ast.stmt]) -> None:
        """As in Python, the variable keeps its last value, and its bounds are read once."""
        first, stop = bounds if len(bounds) == 2 else ("0", *bounds)
        head, inside, following, end = self.labels("for", "do", "next", "done")
        counter = self.place(f"{name}.{head}", INT)
        self.lines.append(f"store i64 {first}, ptr {counter}")
        self.start(head)
        number = self.emit(f"load i64, ptr {counter}")
        self.lines.append(f"br i1 {self.emit(f'icmp slt i64 {number}, {stop}')}, label %{inside}, label %{end}")
        self.start(inside, falls_through=False)
        self.lines.append(f"store i64 {number}, ptr {self.place(name, INT)}")
        self.loops.append((following, end))
        self.block(body)
        self.loops.pop()
        self.start(following)
        self.lines.append(f"store i64 {self.emit(f'add i64 {number}, 1')}, ptr {counter}")
        self.jump(head)
        self.start(end, falls_through=False)

    def give(self, value: ast.expr | None) -> None:
        kind = self.result_type(self.tree.name)
        if not isinstance(value, ast.Tuple):
            result = "0" if value is None else self.converted(self.value(value), INT)
        else:
            result = "undef"
            for number, part in enumerate(value.elts):
                one = self.converted(self.value(part), INT)
                result = self.emit(f"insertvalue {kind} {result}, i64 {one}, {number}")
        self.lines.append(f"ret {kind} {result}")

    # ---- expressions

    def value(self, node: ast.expr) -> Operand:
        match node:
            case ast.Constant(bool() | int() as number):
                return INT, str(int(number))
            case ast.Constant(float() as number):
                return FLOAT, f"0x{struct.unpack('>Q', struct.pack('>d', number))[0]:016X}"
            case ast.Name(name) if name in self.types or name in self.parameters:
                place = self.place(name, INT)
                return self.types[name], self.emit(f"load {self.types[name]}, ptr {place}")
            case ast.Name(name) if isinstance(self.globals.get(name), int):
                return INT, str(self.globals[name])
            case ast.Subscript():
                return INT, self.emit(f"load i64, ptr {self.element(node)}")
            case ast.UnaryOp(ast.USub(), operand):
                return self.binary(node, ast.Sub(), (INT, "0"), self.value(operand))
            case ast.BinOp(left, operator, right):
                return self.binary(node, operator, self.value(left), self.value(right))
            case ast.Compare() | ast.BoolOp() | ast.UnaryOp(ast.Not()):
                return INT, self.emit(f"zext i1 {self.truth(node)} to i64")
            case ast.IfExp(test, body, orelse):
                return self.chosen(test, body, orelse)
            case ast.Call(ast.Name("min" | "max" as name), arguments):
                return self.extreme(name, [self.value(argument) for argument in arguments])
            case ast.Call(ast.Name("len"), [ast.Attribute() as array]):
                return INT, self.emit(f"load i64, ptr {self.word(array, 1)}, !invariant.load !0")
            case ast.Call(ast.Name(name), arguments) if name in self.results:
                return self.call(name, arguments)
        raise self.refused(node)

    def call(self, name: str, arguments: Sequence[ast.expr]) -> Operand:
        texts = [
            "ptr %arrays"
            if isinstance(argument, ast.Name) and argument.id == self.arrays
            else f"i64 {self.converted(self.value(argument), INT)}"
            for argument in arguments
        ]
        kind = self.result_type(name)
        return kind, self.emit(f"call {kind} @{name}({', '.join(texts)})")

    def binary(self, node: ast.AST, operator: ast.operator, left: Operand, right: Operand) -> Operand:
        one = type(operator)
        floats = one is ast.Div or FLOAT in (left[0], right[0])
        kind = FLOAT if floats else INT
        word = "fdiv" if one is ast.Div else ARITHMETIC.get(one)
        word = f"f{word}" if floats and word and one is not ast.Div else word
        if not floats:
            word = word or INTEGER.get(one)
        if word is None:
            raise self.refused(node)
        return kind, self.emit(f"{word} {kind} {self.converted(left, kind)}, {self.converted(right, kind)}")

    def compare(self, node: ast.AST, operator: ast.cmpop, left: Operand, right: Operand) -> str:
        if type(operator) not in COMPARISONS:
            raise self.refused(node)
        of_ints, of_floats = COMPARISONS[type(operator)]
        if FLOAT in (left[0], right[0]):
            return self.emit(f"fcmp {of_floats} double {self.converted(left, FLOAT)}, {self.converted(right, FLOAT)}")
        return self.emit(f"icmp {of_ints} i64 {left[1]}, {right[1]}")

    def truth(self, node: ast.expr) -> str:
        """An i1; what `and` and `or` don't need is not evaluated."""
        match node:
            case ast.Compare(left, [operator], [right]):
                return self.compare(node, operator, self.value(left), self.value(right))
            case ast.BoolOp(operator, values):
                return self.short_circuit(isinstance(operator, ast.And), values)
            case ast.UnaryOp(ast.Not(), operand):
                return self.emit(f"xor i1 {self.truth(operand)}, true")
            case ast.Compare():
                raise self.refused(node)
        return self.compare(node, ast.NotEq(), self.value(node), (INT, "0"))

    def short_circuit(self, is_and: bool, values: Sequence[ast.expr]) -> str:
        name, end = self.labels("truth.", "known")
        place = self.place(name, INT)
        for number, value in enumerate(values):
            truth = self.truth(value)
            self.lines.append(f"store i64 {self.emit(f'zext i1 {truth} to i64')}, ptr {place}")
            if number + 1 < len(values):
                (following,) = self.labels("more")
                yes, no = (following, end) if is_and else (end, following)
                self.lines.append(f"br i1 {truth}, label %{yes}, label %{no}")
                self.start(following, falls_through=False)
        self.start(end)
        return self.emit(f"icmp ne i64 {self.emit(f'load i64, ptr {place}')}, 0")

    def chosen(self, test: ast.expr, body: ast.expr, orelse: ast.expr) -> Operand:
        name, yes, no, end = self.labels("choice.", "if", "else", "chosen")
        self.branch(test, yes, no)
        for label, value in ((yes, body), (no, orelse)):
            self.start(label, falls_through=False)
            self.store(ast.Name(name), self.value(value))
            self.jump(end)
        self.start(end, falls_through=False)
        return self.types[name], self.emit(f"load {self.types[name]}, ptr %{name}")

    def extreme(self, name: str, values: Sequence[Operand]) -> Operand:
        best = values[0]
        for one in values[1:]:
            first = self.compare(ast.Pass(), ast.LtE() if name == "min" else ast.GtE(), best, one)
            kind = FLOAT if FLOAT in (best[0], one[0]) else INT
            best = (
                kind,
                self.emit(
                    f"select i1 {first}, {kind} {self.converted(best, kind)}, {kind} {self.converted(one, kind)}"
                ),
            )
        return best

    # ---- arrays: the first parameter points to an address and a length for each

    def word(self, array: ast.expr, number: int) -> str:
        """Where the address (0) or the length (1) of an array stands."""
        match array:
            case ast.Attribute(ast.Name(name), field) if name == self.arrays and field in self.fields:
                return self.emit(f"getelementptr i64, ptr %arrays, i64 {2 * self.fields.index(field) + number}")
        raise self.refused(array)

    def element(self, node: ast.Subscript) -> str:
        base = self.emit(f"load ptr, ptr {self.word(node.value, 0)}, !invariant.load !0")
        return self.emit(f"getelementptr i64, ptr {base}, i64 {self.value(node.slice)[1]}")
