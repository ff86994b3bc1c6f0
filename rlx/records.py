"""The standard `dataclass`, made many times faster: starting a program makes some seventy of them.

The standard one compiles the source of up to six methods for each class, which took half of the time in which a
stored model is loaded. Here `__init__` is compiled once a few objects were made and the list of fields is made when it
is first asked for, which most programs never do for most classes; the other methods are closures. The standard module,
slow to load itself, is only imported for what few ask for.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

__all__ = ["cached_property", "dataclass", "field", "names_of", "replace"]

_lock = threading.RLock()
_FEW = 16  # objects: compiling a method takes as long as making some thirty of them without it
_MISSING: Any = object()


class _Row:
    """What `__init__`, comparing and showing need of a field."""

    __slots__ = ("compare", "default", "factory", "repr")

    def __init__(
        self, default: Any = _MISSING, factory: Any = _MISSING, repr: bool = True, compare: bool = True
    ) -> None:
        self.default, self.factory, self.repr, self.compare = default, factory, repr, compare


def names_of(made: Any) -> tuple[str, ...]:
    """The names of the fields of a dataclass of this module, or of one of its objects."""
    return tuple(made._record_rows)


if TYPE_CHECKING:
    from dataclasses import dataclass, field, replace
    from functools import cached_property
else:

    class cached_property:
        """As `functools.cached_property`, which before Python 3.12 takes a lock that a forked child may find taken."""

        def __init__(self, make: Callable[[Any], Any]) -> None:
            self.make = make
            self.__doc__ = make.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, thing: object, owner: type | None = None) -> Any:
            if thing is None:
                return self
            value = thing.__dict__[self.name] = self.make(thing)
            return value

    def field(
        *, default: Any = _MISSING, default_factory: Any = _MISSING, repr: bool = True, compare: bool = True
    ) -> _Row:
        """A field that is not like the others; see `dataclasses.field` for the options."""
        return _Row(default, default_factory, repr, compare)

    def replace(made: Any, /, **changes: Any) -> Any:
        """A copy of an object of a dataclass with other values of some fields."""
        return type(made)(**{name: getattr(made, name) for name in made._record_rows} | changes)

    def dataclass(
        cls: type | None = None, /, *, frozen: bool = False, eq: bool = True, repr: bool = True
    ) -> type | Callable[[type], type]:
        """A class whose annotations are its fields; see `dataclasses.dataclass` for the options."""

        def make(cls: type) -> type:
            own = set(cls.__dict__)
            cls.__doc__ = cls.__doc__ or cls.__name__  # else the standard one looks up its signature, slowly
            rows = _rows(cls)
            methods = {
                "_record_rows": rows,
                "__dataclass_fields__": _Fields(cls),
                "__match_args__": tuple(rows),
                "__init__": _Init(cls, frozen),
            }
            if repr:
                methods["__repr__"] = _repr
            if eq:
                methods["__eq__"], methods["__hash__"] = _compared([name for name, row in rows.items() if row.compare])
                if not frozen:
                    methods["__hash__"] = None
            if frozen:
                methods["__setattr__"], methods["__delattr__"] = _refuse, _refuse
            for name, method in methods.items():
                if name not in own:
                    setattr(cls, name, method)
            return cls

        return make if cls is None else make(cls)


def _rows(cls: type) -> dict[str, _Row]:
    """The fields by name, those of base classes first; what `field` gave makes room for the default."""
    rows: dict[str, _Row] = {}
    for base in reversed(cls.__mro__[1:]):
        rows |= base.__dict__.get("_record_rows", {})
    for name in _own(cls):
        value = cls.__dict__.get(name, _MISSING)
        row = value if isinstance(value, _Row) else _of_standard(value)
        rows[name] = row or _Row(value)
        if row is not None and row.default is _MISSING:
            delattr(cls, name)
        elif row is not None:
            setattr(cls, name, row.default)
    return rows


def _of_standard(value: Any) -> _Row | None:
    """The row for a field of the standard module."""
    standard = sys.modules.get("dataclasses")
    if standard is None or not isinstance(value, standard.Field):
        return None
    default, factory = (_MISSING if v is standard.MISSING else v for v in (value.default, value.default_factory))
    return _Row(default, factory, value.repr, value.compare)


def _own(cls: type) -> list[str]:
    """The names of the fields that a class itself declares."""
    kinds = inspect.get_annotations(cls)
    return [name for name, kind in kinds.items() if not str(kind).startswith(("ClassVar", "typing.ClassVar"))]


class _Fields:
    """Stands for `__dataclass_fields__` until somebody asks for it."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def __get__(self, instance: object, owner: type) -> Any:
        with _lock:
            if self.cls.__dict__["__dataclass_fields__"] is self:
                import dataclasses

                rows = self.cls.__dict__["_record_rows"]
                for name in _own(self.cls):
                    row = rows[name]
                    default = dataclasses.MISSING if row.default is _MISSING else row.default
                    factory = dataclasses.MISSING if row.factory is _MISSING else row.factory
                    options: Any = {"default": default, "default_factory": factory}
                    setattr(self.cls, name, dataclasses.field(**options, repr=row.repr, compare=row.compare))
                dataclasses.dataclass(init=False, repr=False, eq=False)(self.cls)  # puts the real ones in its place
            return self.cls.__dict__["__dataclass_fields__"]


class _Init:
    """Stands for `__init__` until a few objects are made or somebody asks for its signature."""

    def __init__(self, cls: type, frozen: bool) -> None:
        self.cls, self.frozen, self.made = cls, frozen, 0

    def __get__(self, instance: object, owner: type) -> Any:
        self.made += 1
        if self.made > _FEW or not isinstance(instance, self.cls):  # from 3.12 on a signature binds it to the class
            return self.compiled(instance)
        return partial(self.fill, instance)

    def compiled(self, instance: object) -> Any:
        """The real one in the place of this."""
        made = _init(vars(self.cls)["_record_rows"], self.frozen, hasattr(self.cls, "__post_init__"))
        made.__qualname__ = f"{self.cls.__qualname__}.__init__"
        type.__setattr__(self.cls, "__init__", made)
        return made if instance is None else made.__get__(instance)

    def fill(self, made: object, /, *args: Any, **given: Any) -> None:
        """Sets the fields of one object; what doesn't fit is left to the real one to complain of."""
        rows: dict[str, _Row] = vars(self.cls)["_record_rows"]
        values = dict(zip(rows, args, strict=False))
        needed = (name for name, row in rows.items() if row.default is row.factory)
        fits = len(args) <= len(rows) and given.keys() <= rows.keys() and not given.keys() & values.keys()
        values |= given
        if not fits or any(name not in values for name in needed):
            self.compiled(made)(*args, **given)
            return
        put = object.__setattr__ if self.frozen else setattr
        for name, row in rows.items():
            value = values.get(name, _MISSING)
            if value is _MISSING:
                value = row.default if row.factory is _MISSING else row.factory()
            put(made, name, value)
        if hasattr(self.cls, "__post_init__"):
            made.__post_init__()  # type: ignore[attr-defined]


def _init(rows: dict[str, _Row], frozen: bool, post: bool) -> Any:
    names: dict[str, Any] = {"_set": object.__setattr__, "_missing": _MISSING}
    arguments, body = ["self"], []
    for name, row in rows.items():
        argument, value = name, name
        if row.factory is not _MISSING:
            names[f"_new_{name}"] = row.factory
            value = f"_new_{name}() if {name} is _missing else {name}"
            argument = f"{name}=_missing"
        elif row.default is not _MISSING:
            names[f"_default_{name}"] = row.default
            argument = f"{name}=_default_{name}"
        arguments.append(argument)
        body.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
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
    rows: dict[str, _Row] = self._record_rows
    shown = ", ".join(f"{name}={getattr(self, name)!r}" for name, row in rows.items() if row.repr)
    return f"{type(self).__qualname__}({shown})"


def _refuse(self: Any, name: str, *value: object) -> NoReturn:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot assign to field {name!r}")
