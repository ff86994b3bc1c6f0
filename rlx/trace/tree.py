"""Trees of dicts, lists, tuples, dataclasses and None: taken apart into leaves and put together again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

__all__ = ["map_tree"]


def map_tree(leaf: Callable[[str, Any], Any], tree: Any, path: str) -> Any:
    """The tree with `leaf(path, value)` in the place of each leaf, visited in order; None stays None."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {k: map_tree(leaf, v, f"{path}.{k}") for k, v in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tree(leaf, v, f"{path}.{k}") for k, v in zip(tree._fields, tree, strict=True)))
    if isinstance(tree, tuple | list):
        return type(tree)(map_tree(leaf, v, f"{path}.{i}") for i, v in enumerate(tree))
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(
            tree, **{f.name: map_tree(leaf, getattr(tree, f.name), f"{path}.{f.name}") for f in fields(tree)}
        )
    return leaf(path, tree)
