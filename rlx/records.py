"""The standard `dataclass`, made several times faster: starting a program makes some seventy of them.

The standard one compiles the source of up to six methods for each class, which took half of the time in which a
stored model is loaded. This one compiles `__init__` alone; the other methods are closures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(
        cls: type | None = None, /, *, frozen: bool = False, eq: bool = True, repr: bool = True
    ) -> type | Callable[[type], type]:
        """A class whose annotations are its fields; see `dataclasses.dataclass` for the options."""

        def make(cls: type) -> type:
            own = set(cls.__dict__)
            cls.__doc__ = cls.__doc__ or cls.__name__  # else the standard one looks up its signature, slowly
            dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
            fields = dataclasses.fields(cls)
            methods = {"__init__": _init(fields, frozen, hasattr(cls, "__post_init__"))}
            if repr:
                methods["__repr__"] = _repr
            if eq:
                methods["__eq__"], methods["__hash__"] = _compared([f.name for f in fields if f.compare])
                if not frozen:
                    methods["__hash__"] = None
            if frozen:
                methods["__setattr__"], methods["__delattr__"] = _refuse, _refuse
            for name, method in methods.items():
                if name not in own:
                    setattr(cls, name, method)
            return cls

        return make if cls is None else make(cls)


def _init(fields: tuple[dataclasses.Field[Any], ...], frozen: bool, post: bool) -> Any:
    names: dict[str, Any] = {"_set": object.__setattr__, "_missing": dataclasses.MISSING}
    arguments, body = ["self"], []
    for f in fields:
        name, value = f.name, f.name
        if f.default_factory is not dataclasses.MISSING:
            names[f"_new_{name}"] = f.default_factory
            value = f"_new_{name}() if {name} is _missing else {name}"
            name = f"{name}=_missing"
        elif f.default is not dataclasses.MISSING:
            names[f"_default_{name}"] = f.default
            name = f"{name}=_default_{name}"
        arguments.append(name)
        body.append(f"_set(self, {f.name!r}, {value})" if frozen else f"self.{f.name} = {value}")
    if post:
        body.append("self.__post_init__()")
    exec(f"def __init__({', '.join(arguments)}):\n " + "\n ".join(body or ["pass"]), names)
    return names["__init__"]


def _compared(names: list[str]) -> tuple[Any, Any]:
    key = attrgetter(*names) if names else type

    def equal(self: Any, other: object) -> bool:
        return key(self) == key(other) if other.__class__ is self.__class__ else NotImplemented

    def hashed(self: Any) -> int:
        return hash(key(self))

    return equal, hashed


def _repr(self: Any) -> str:
    shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{type(self).__qualname__}({shown})"


def _refuse(self: Any, name: str, *value: object) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
