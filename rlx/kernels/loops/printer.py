"""Expressions as code, whatever the language: each value is computed once, as far outside of the loops as it can be.

A printer for a language says how arguments are loaded, integers added and values computed; scopes, the order of
computation and addresses are here. A load is `pointer + constant + sum(coefficient * term)`; what of this sum does not
depend on inner loops is added up outside of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from rlx.ir.dtype import DType
from rlx.ir.shape import Size
from rlx.kernels.affine import Affine, affine
from rlx.kernels.expr import Const, Expr, Load, Reduce, SizeOf, Var, children, walk
from rlx.kernels.loops.analysis import RESULT, free_vars
from rlx.kernels.program import Buffer

__all__ = ["Printer", "Scope"]

V = TypeVar("V")  # the value of an expression: its text, and what else a language must know of it


class Scope:
    """A place in the loops: the text of the variables visible there, and what is already computed."""

    vars: dict[Var, str]
    parent: Scope | None
    cache: dict[object, Any]
    added: dict[object, frozenset[Expr]]  # terms that a cached address contains

    def find(self, key: object) -> Any:
        """A value computed here or further out, None where there is none."""
        scope: Scope | None = self
        while scope is not None:
            if key in scope.cache:
                return scope.cache[key]
            scope = scope.parent
        return None


S = TypeVar("S", bound=Scope)


class Printer(ABC, Generic[V, S]):
    """Prints expressions into a function."""

    def __init__(self) -> None:
        self.free: dict[Expr, frozenset[Var]] = {}
        self.loaded: dict[object, str] = {}  # arguments

    # ---- the language

    @abstractmethod
    def load_argument(self, argument: Buffer | Size) -> str:
        """The text of an argument (an address or an i64), loaded at the entry of the function."""

    @abstractmethod
    def add(self, a: str, b: str) -> str:
        """The sum of two i64."""

    @abstractmethod
    def multiply(self, a: str, b: str) -> str:
        """The product of two i64."""

    @abstractmethod
    def element(self, pointer: str, index: str, dtype: DType) -> str:
        """The address of an element, by its number from the one that `pointer` is the address of."""

    @abstractmethod
    def compute(self, e: Expr, scope: S) -> V:
        """The value of an expression, whose parts `value` gives."""

    @abstractmethod
    def single(self, e: Expr, scope: S) -> str:
        """The text of an i64 that is the same for all that the code computes at once."""

    @abstractmethod
    def kept_address(self, text: str) -> V:
        """An address as a value that a scope keeps."""

    @abstractmethod
    def address_text(self, value: V) -> str:
        """The text of such a value."""

    def varies(self, term: Expr, scope: S) -> bool:
        """Whether a term differs between what the code of this scope computes at once, such as lanes of a vector."""
        return False

    # ---- arguments

    def word(self, word: Buffer | Size) -> str:
        """A pointer or size; all are loaded at the function's entry by `preload`."""
        if isinstance(word, int):
            return str(word)
        return self.loaded[word]

    def size(self, size: Size) -> str:
        """A size as an i64."""
        return self.loaded.get(size, str(size)) if isinstance(size, int) else self.loaded[size]

    def preload(self, exprs: Sequence[Expr], sizes: Sequence[Size]) -> None:
        """Loads every argument that the expressions and sizes need."""
        for e in exprs:
            for x in walk(e):
                if isinstance(x, Load):
                    self._need(x.source)
                    self._need_affine(affine(x.indices[0]))
                elif isinstance(x, SizeOf):
                    self._need(x.size)
                elif isinstance(x, Reduce):
                    for s in x.extents:
                        self._need(s)
        for s in sizes:
            self._need(s)

    def _need_affine(self, a: Affine) -> None:
        self._need(a.constant)
        for coef in a.coefs.values():
            self._need(coef)

    def _need(self, word: Buffer | Size) -> None:
        """Static strides and extents other than tiny ones are arguments too, so that kernels can be shared."""
        key: object = word
        if (isinstance(word, int) and abs(word) <= 1) or key in self.loaded:
            return
        self.loaded[key] = self.load_argument(word)

    # ---- expressions

    def depends(self, e: Expr) -> frozenset[Var]:
        """The loop variables that the expression depends on."""
        return free_vars(e, self.free)

    def value(self, e: Expr, scope: S) -> V:
        """The value of an expression in a scope."""
        found: V | None = scope.find(e)
        if found is None:
            found = self.compute(e, scope)
            scope.cache[e] = found
        return found

    def hoist(self, e: Expr, inner: frozenset[Var], scope: S) -> None:
        """Computes, in `scope`, every largest part of `e` that does not depend on the inner variables."""
        self._hoist(e, inner, scope, set())

    def _hoist(self, x: Expr, inner: frozenset[Var], scope: S, seen: set[tuple[Expr, frozenset[Var]]]) -> None:
        """`seen`: parts are shared, and each is visited once."""
        if isinstance(x, Const | Var | SizeOf) or (x, inner) in seen:
            return
        seen.add((x, inner))
        if not (self.depends(x) & (inner | RESULT)):
            self.value(x, scope)
            return
        if isinstance(x, Load):
            index = affine(x.indices[0])
            self._base(x, index, inner, scope)
            for part in (*index.coefs, *(() if x.where is None else (x.where,))):
                self._hoist(part, inner, scope, seen)
            return
        bound = inner | frozenset(x.vars) if isinstance(x, Reduce) else inner
        for child in children(x):
            self._hoist(child, bound, scope, seen)

    # ---- addresses

    def _base(self, e: Load, index: Affine, inner: frozenset[Var], scope: S) -> None:
        """The address of the part of the index that does not depend on the inner variables."""
        fixed = {
            t: c
            for t, c in index.coefs.items()
            if not (self.depends(t) & inner) and (isinstance(t, Var) or not self.varies(t, scope))
        }
        key = ("base", e.source, e.indices[0])
        if scope.find(key) is None or any(self.depends(t) for t in fixed):
            address = self._offset(e.source, Affine(index.constant, fixed), scope)
            scope.cache[key] = self.kept_address(address)
            scope.added[key] = frozenset(fixed)

    def _offset(self, source: Buffer, index: Affine, scope: S) -> str:
        total = self.sum(index, scope)
        pointer = self.word(source)
        return pointer if total == "0" else self.element(pointer, total, source.dtype)

    def sum(self, index: Affine, scope: S) -> str:
        """An i64 of the linear form; every term must be the same in all lanes."""
        total = self.size(index.constant)
        for term, coef in index.coefs.items():
            text = scope.vars[term] if isinstance(term, Var) else self.single(term, scope)
            part = text if coef == 1 else self.multiply(text, self.size(coef))
            total = part if total == "0" else self.add(total, part)
        return total

    def address(self, e: Load, scope: S) -> str:
        """The address of the element (of the first lane)."""
        return self._address(e, affine(e.indices[0]), scope)

    def _address(self, e: Load, index: Affine, scope: S) -> str:
        """The address of the element, starting from what an outer scope has already added up."""
        key = ("base", e.source, e.indices[0])
        at: Scope | None = scope
        while at is not None and key not in at.added:
            at = at.parent
        if at is None:
            return self._offset(e.source, index, scope)
        done = at.added[key]
        rest = Affine(0, {t: c for t, c in index.coefs.items() if t not in done})
        total = self.sum(rest, scope)
        base = self.address_text(at.cache[key])
        return base if total == "0" else self.element(base, total, e.source.dtype)
