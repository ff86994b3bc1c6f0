"""Machine code into this process: objects are checked and loaded, without LLVM where our own loader can do it."""

from __future__ import annotations

import atexit
import ctypes
import functools
import platform
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from weakref import WeakSet, WeakValueDictionary

from rlx.backends.cpu.jit import code
from rlx.errors import CompileError
from rlx.forks import Undivided

__all__ = [
    "KERNEL_SYMBOLS",
    "Bundle",
    "Kernels",
    "Library",
    "build",
    "check_object",
    "load_object",
    "load_stored",
    "loads_itself",
]

# What LLVM itself may call for in a kernel. No allocator and no libm: a kernel that needs one is a bug found here,
# where it is an error, and not at its first call, where it is a crash.
KERNEL_SYMBOLS = frozenset({"memcpy", "memmove", "memset"})

Bundle = tuple[bytes, dict[str, str]]  # an object and, by key, the symbols of the kernels wanted from it

undivided = Undivided()  # LLVM, whose locks are its own, and whoever has this one:
lock = threading.RLock()
stored: WeakValueDictionary[bytes, Library] = WeakValueDictionary()  # loaded objects of artifacts
alive: WeakSet[Library] = WeakSet()
runtime_objects: dict[str, bytes] = {}  # objects of `build` by name; what is stored is of the same build of rlx


class Library:
    """Code of one or more objects loaded into this process; it stays loaded as long as the Library lives."""

    def __init__(self, owner: object, find: Callable[[str], int]) -> None:
        self.owner = owner
        self.find = find
        self.kernels: dict[str, int] = {}  # addresses by key, of what `Compiling` made
        self.origins: dict[int, tuple[bytes, str]] = {}  # address -> the object that defines it, and its symbol there
        alive.add(self)

    def address(self, name: str) -> int:
        """Returns the address of a defined symbol. Raises CompileError when there is none."""
        address = self.find(name)
        if not address:
            raise CompileError(f"the compiled object defines no function {name!r}")
        return address

    def keep(self) -> Library:
        """Never unloads it: a daemon thread may be in its code while the interpreter takes everything down."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        return self


def keep_all() -> None:
    """At exit: objects are taken down in any order, while daemon threads may still be in runs."""
    for library in list(alive):
        library.keep()


atexit.register(keep_all)


class Kernels(dict[str, int]):
    """The addresses of kernels by name; their code stays loaded as long as this lives."""

    def __init__(self, addresses: Mapping[str, int], code: Iterable[Library]) -> None:
        super().__init__(addresses)
        self.code = tuple(dict.fromkeys(code))


@functools.cache
def loads_itself() -> bool:
    """Whether objects for this machine are loaded by our own loader, else by LLVM's."""
    return sys.platform.startswith("linux") and platform.machine() == "x86_64" and sys.maxsize > 1 << 32


def check_object(obj: bytes, allowed: Collection[str] = KERNEL_SYMBOLS) -> None:
    """Raises CompileError when an object needs a symbol that is not allowed; calling such code would be a crash.

    Objects that aren't ELF (macOS, Windows) are not inspected.
    """
    if not obj.startswith(b"\x7fELF"):
        return
    from rlx.backends.cpu.jit import elf

    foreign = elf.read(obj).undefined - set(allowed) - {"_GLOBAL_OFFSET_TABLE_"}
    if foreign:
        raise CompileError(
            f"generated code needs {', '.join(sorted(foreign))}; a kernel may only use {', '.join(sorted(allowed))}"
        )


@undivided
def load_object(*objs: bytes, symbols: Mapping[str, int] | None = None) -> Library:
    """Loads checked objects, or one that is linked, into this process; no two may define the same symbol.

    `symbols` are the addresses of what the objects import, besides KERNEL_SYMBOLS.
    """
    if loads_itself():
        linked = code.read_code(objs[0]) if code.is_code(objs[0]) else link(objs)
        image = code.load(linked, lambda name: resolve(name, symbols or {}))
        return Library(image, lambda name: image.symbols.get(name, 0))
    from rlx.backends.cpu.jit.compile import llvm, target_machine

    for name, address in (symbols or {}).items():
        llvm().add_symbol(name, address)
    engine = llvm().create_mcjit_compiler(llvm().parse_assembly(""), target_machine(jit=True))
    for obj in objs:
        engine.add_object_file(llvm().ObjectFileRef.from_data(obj))
    engine.finalize_object()
    return Library(engine, engine.get_function_address)


def link(objs: Sequence[bytes]) -> code.Code:
    """The objects put together."""
    from rlx.backends.cpu.jit import elf

    return elf.link([elf.read(obj) for obj in objs])


def resolve(name: str, symbols: Mapping[str, int]) -> int:
    """Returns the address of an imported symbol. Raises CompileError for one that is neither given nor allowed."""
    if name in symbols:
        return symbols[name]
    if name not in KERNEL_SYMBOLS:
        raise CompileError(f"a loaded object needs {name!r}, and nothing defines it")
    return ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0


def build(name: str, ir: Callable[[], str], *, symbols: Mapping[str, int]) -> Library:
    """Loads runtime code, compiled or found in the cache, that may also use the symbols at the given addresses.

    `ir` is only asked where neither this process nor a stored model that it has loaded has code of that name.
    """
    obj = runtime_objects.get(name)
    if obj is None:
        from rlx.backends.cpu.jit.compile import runtime_object

        obj = runtime_object(name, ir)
    check_object(obj, KERNEL_SYMBOLS | set(symbols))
    return load_object(obj, symbols=symbols)


def load_stored(objects: Sequence[Bundle]) -> Kernels:
    """Loads objects that `objects_of` gave, equal ones once while they are in use; returns the kernels by name."""
    made: dict[str, int] = {}
    with undivided, lock:
        held = {obj: library for obj, _ in objects if (library := stored.get(obj)) is not None}
        fresh = {obj for obj, _ in objects if obj not in held}
        plain = [obj for obj in fresh if not code.is_code(obj)]
        for obj in plain:
            check_object(obj)
        for group in ([plain] if plain else []) + [[obj] for obj in fresh if code.is_code(obj)]:
            held |= dict.fromkeys(group, load_object(*group))
        for obj, symbols in objects:
            library = stored[obj] = held[obj]
            for name, symbol in symbols.items():
                made[name] = library.address(symbol)
                library.origins[made[name]] = (obj, symbol)
    return Kernels(made, held.values())
