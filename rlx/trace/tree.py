"""Trees of dicts, lists, tuples, dataclasses and None: taken apart into leaves and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from rlx.ir.graph import TensorType

__all__ = ["differs_at", "fill", "is_record", "leaves_of", "map_tree", "ordered", "structure"]


def map_tree(leaf: Callable[[str, Any], Any], tree: Any, path: str) -> Any:
    """The tree with `leaf(path, value)` in the place of each leaf, visited in order; None stays None.

    The order of the keys of a dict is theirs, if they have one, so that it doesn't matter in which they were put in.
    """
    if tree is None:
        return None
    if isinstance(tree, dict):
        made = {k: map_tree(leaf, tree[k], f"{path}.{k}") for k in ordered(tree)}
        return {k: made[k] for k in tree}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tree(leaf, v, f"{path}.{k}") for k, v in zip(tree._fields, tree, strict=True)))
    if isinstance(tree, tuple | list):
        return type(tree)(map_tree(leaf, v, f"{path}.{i}") for i, v in enumerate(tree))
    if is_record(tree):
        return replace(
            tree, **{f.name: map_tree(leaf, getattr(tree, f.name), f"{path}.{f.name}") for f in fields(tree)}
        )
    return leaf(path, tree)


def ordered(tree: dict[Any, Any]) -> list[Any]:
    """The keys in ascending order, or as they come if they have none."""
    try:
        return sorted(tree)
    except TypeError:
        return list(tree)


def leaves_of(tree: Any, path: str) -> list[tuple[str, Any]]:
    """(path, leaf) of every leaf, in order."""
    found: list[tuple[str, Any]] = []
    map_tree(lambda path, leaf: found.append((path, leaf)), tree, path)
    return found


def fill(tree: Any, leaves: Iterable[Any]) -> Any:
    """The tree with these leaves, in order."""
    given = iter(leaves)
    return map_tree(lambda path, leaf: next(given), tree, "")


def structure(tree: Any) -> Any:
    """What is alike for trees that differ in their leaves only; hashable if the keys of dicts are."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return ("dict", *((key, structure(tree[key])) for key in ordered(tree)))
    if isinstance(tree, tuple | list):
        return (type(tree), *map(structure, tree))
    if is_record(tree):
        return (type(tree), *(structure(getattr(tree, f.name)) for f in fields(tree)))
    return "leaf"


def is_record(tree: Any) -> bool:
    """Whether it is a dataclass whose fields are parts of a tree; a type of arrays is a leaf."""
    return is_dataclass(tree) and not isinstance(tree, type | TensorType)


def differs_at(a: Any, b: Any, path: str) -> str | None:
    """Where two trees differ in structure, in words; None where they don't."""
    if structure(a) == structure(b):
        return None
    if isinstance(a, dict) and isinstance(b, dict):
        if ordered(a) != ordered(b):
            return f"{path} has the keys {ordered(a)} and {ordered(b)}"
        return next(filter(None, (differs_at(a[k], b[k], f"{path}.{k}") for k in a)), None)
    if isinstance(a, tuple | list) and type(a) is type(b):
        if len(a) != len(b):
            return f"{path} has {len(a)} and {len(b)} parts"
        return next(filter(None, (differs_at(x, y, f"{path}.{i}") for i, (x, y) in enumerate(zip(a, b, strict=True)))))
    return f"{path} is {_kind(a)} and {_kind(b)}"


def _kind(tree: Any) -> str:
    return "None" if tree is None else "an array" if structure(tree) == "leaf" else f"a {type(tree).__name__}"
