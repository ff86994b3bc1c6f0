"""Writes rlx/__init__.pyi anew, which tells type checkers every public name: python tools/public_stub.py

`rlx/__init__.py` imports its names at their first use, and the function of an op is made of the op's class, so that no
type checker can read them there.
"""

from __future__ import annotations

import argparse
import inspect
import keyword
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import numpy as np

import rlx
from rlx.ops import OPS, Op
from rlx.ops.numpy import FUNCTIONS
from rlx.ops.numpy.creation import CREATION

STUB = Path(__file__).parents[1] / "rlx" / "__init__.pyi"
HEAD = '''"""Every public name of rlx, for type checkers. Made by `python tools/public_stub.py`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
'''
TYPES = """
_Size = int | _Dim
_Type = _DType | str | type[Any] | np.dtype[Any]
_Operand = _Value | _Dim | np.ndarray[Any, np.dtype[Any]] | np.generic | complex  # what is no value becomes a constant

"""
OWN = ("Dim as _Dim", "Value as _Value", "DType as _DType")
OWN_MODULES = ("rlx.ir.shape", "rlx.ir.value", "rlx.ir.dtype")
PUBLIC: dict[str, str] = vars(rlx)["_PUBLIC"] | {"estimate": "rlx.estimate.api"}
WORDS = {"Shape": "Sequence[_Size]", "Size": "_Size", "DType": "_Type"}  # of the fields of ops
OUTPUTS = {"TensorType": "_Value", "TensorType | tuple[TensorType, TensorType]": "Any"}


def imports() -> Iterator[str]:
    """The public names that are defined somewhere, and the submodules."""
    for module, name in sorted(zip(OWN_MODULES, OWN, strict=True)):
        yield f"from {module} import {name}\n"
    for name, module in sorted(PUBLIC.items(), key=lambda item: (item[1], item[0])):
        yield f"from {module} import {name} as {name}\n"


def annotation(field: Field[Any]) -> str:
    """What a caller may give for an attribute: a list for a tuple, a name for an element type."""
    words = re.sub(r"tuple\[(.+?), \.\.\.\]", r"Sequence[\1]", str(field.type))
    words = re.sub("|".join(rf"\b{word}\b" for word in WORDS), lambda found: WORDS[found[0]], words)
    return f"int | {words}" if field.name == "axes" else words


def function(cls: type[Op]) -> str:
    """The function of an op as `rlx.ops.base.functional` makes it."""
    shown = [p for p in inspect.signature(cls.infer).parameters.values() if p.name != "self"]
    inputs, attributes, optional = [], [], False
    for p in shown:
        optional |= p.default is not p.empty
        star = "*" if p.kind is p.VAR_POSITIONAL else ""
        inputs.append(f"{star}{p.name}: _Operand{' | None = None' if p.default is not p.empty else ''}")
    by_name = bool(shown) and shown[-1].kind is inspect.Parameter.VAR_POSITIONAL
    if inputs and not by_name:
        inputs.append("/")
    for field in fields(cls):  # type: ignore[arg-type]
        also = ("axes", "axis") if field.name == "axes" else (field.name,)
        needed = field.default is MISSING and len(also) == 1
        if needed and optional and not by_name:  # Python has none by position after those with a default
            attributes.append("*")
            by_name = True
        attributes += [f"{name}: {annotation(field)}{'' if needed else ' = ...'}" for name in also]
        optional |= not needed
    parts = ", ".join([*inputs, *attributes, *([] if by_name else ["*"]), 'name: str = ""'])
    output = OUTPUTS.get(str(inspect.signature(cls.infer).return_annotation))
    name = cls.op_name + ("_" if keyword.iskeyword(cls.op_name) else "")
    return f"def {name}({parts}) -> {output or 'tuple[_Value, ...]'}: ...\n"


def numpy_names() -> list[str]:
    """NumPy's functions that work on graph values and have no op of the same name, and those that make arrays."""
    taken = {*PUBLIC, *OPS}
    known = {name for f in FUNCTIONS if getattr(np, name := str(f.__name__), None) is f} | set(CREATION)
    return sorted(name for name in known if name not in taken)


def text() -> str:
    """The stub."""
    listed = "".join(f'    "{name}",\n' for name in rlx.__all__)
    made = [HEAD, *imports(), TYPES, f"__version__: str\n__all__ = [\n{listed}]\n\n"]
    made += [function(cls) for name, cls in sorted(OPS.items()) if name not in PUBLIC]
    made += ["\n# NumPy's functions, which take graph values too\n"]
    made += [f"{name}: Callable[..., Any]\n" for name in numpy_names()]
    return "".join(made)


def main() -> None:
    """Writes the file."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    STUB.write_text(text())


if __name__ == "__main__":
    main()
