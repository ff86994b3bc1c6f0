"""LLVM IR text in, loaded machine code out: host target, compilation and the kernel cache."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

from rlx.backends.codegen.arguments import Routine, forget_texts, text_key, text_of
from rlx.backends.codegen.object_cache import ObjectCache
from rlx.backends.cpu.jit import cpuid
from rlx.backends.cpu.jit.code import is_code
from rlx.backends.cpu.jit.load import (
    Bundle,
    Kernels,
    Library,
    check_object,
    link,
    load_object,
    loads_itself,
    lock,
    runtime_objects,
    undivided,
)
from rlx.backends.cpu.jit.prebuilt import archives_of, symbol_of
from rlx.backends.cpu.jit.resident import bring_single_pages, give_back_library, give_back_now_and_then
from rlx.backends.cpu.target import Target
from rlx.backends.granted import cpu_count
from rlx.code_times import Module, taken, times
from rlx.disk import content_key
from rlx.errors import CompileError, DeviceUnavailable
from rlx.heap import give_back_heap
from rlx.install import install_package
from rlx.progress import report

__all__ = [
    "Compiling",
    "compile_kernels",
    "compile_object",
    "host",
    "objects_of",
]

BUNDLE = 16  # kernels a module, at most: emitting a module costs some 2 ms however small it is
TEXT = 64 << 10  # characters of IR from which a module is large enough: some 0.1 s of compiling
THREADS = 4  # that compile, at most: each takes some 30 MB
NO_LLVM = "llvmlite, which makes code, is not installed; without it only saved models run"
REFERENCE = b"@"  # starts a cache entry that names the bundle holding the kernel, and the kernel's symbol in it

Item = tuple[str, str, bool]  # name, IR, optimize


@functools.cache
@undivided
def llvm() -> ModuleType:
    """llvmlite's binding module, imported and initialised at the first use. Raises `DeviceUnavailable` without it."""
    if find_spec("llvmlite") is None:
        raise DeviceUnavailable(f"device 'cpu': {NO_LLVM}. {install_package('llvmlite')}")
    import llvmlite.binding as binding

    bring_single_pages(library_path())
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    give_back_library(library_path())  # half of what compiling needs later has been touched by now
    return binding  # type: ignore[no-any-return]


def library_path() -> str | None:
    """The file of llvmlite's library, as it was loaded."""
    from llvmlite.binding import ffi

    return getattr(ffi.lib, "_name", None)


@functools.cache
@undivided
def host() -> Target:
    """Returns the target of this machine, as LLVM sees it."""
    flags = llvm().get_host_cpu_features()
    triple = llvm().get_process_triple()
    vector_bytes = 16
    if flags.get("avx2"):
        vector_bytes = 32
    if all(flags.get(name) for name in ("avx512f", "avx512bw", "avx512dq", "avx512vl")):
        vector_bytes = 64
    return Target(
        cpu=llvm().get_host_cpu_name(),
        features=flags.flatten(),
        triple=triple,
        vector_bytes=vector_bytes,
        cores=cpu_count(),
        tiles=vector_bytes == 64 and cpuid.has_tiles() and all(map(flags.get, ("amx-tile", "amx-bf16", "amx-int8"))),
    )


def target_machine(target: Target | None = None, *, jit: bool = False) -> Any:
    target = target or host()
    # LLVM's loader may put constants far from code; ours never does.
    reloc, codemodel = ("pic", "small") if loads_itself() else ("default", "jitdefault")
    create = llvm().Target.from_triple(target.triple).create_target_machine
    jit = jit or reloc == "default"
    return create(cpu=target.cpu, features=target.features, opt=3, reloc=reloc, codemodel=codemodel, jit=jit)


@functools.cache
def compiler_identity() -> str:
    """The machine and the version of LLVM, which is not imported for this."""
    found = find_spec("llvmlite")
    if found is None or found.origin is None:
        raise DeviceUnavailable(f"device 'cpu': {NO_LLVM}. {install_package('llvmlite')}")
    return f"{cpuid.identity()}\n{Path(found.origin).with_name('_version.py').read_text()}"


@functools.cache
def unlocked(name: str) -> Any:
    """A function of llvmlite's library that does not wait until those of other threads return, as they do by default.

    LLVM allows that for modules of different contexts.
    """
    from llvmlite.binding import ffi

    locked = getattr(ffi.lib, name)
    where = library_path()
    if where is None:
        return locked
    function = getattr(ctypes.CDLL(where), name)
    function.argtypes, function.restype = locked.argtypes, locked.restype
    return function


def parse(ir: str, machine: Any, context: Any, name: str = "module") -> Any:
    """A verified module, which must be closed before the context."""
    from llvmlite.binding import ffi

    with ffi.OutputString() as message:
        module = llvm().ModuleRef(unlocked("LLVMPY_ParseAssembly")(context, ir.encode(), message), context)
        if message:
            module.detach()
            raise CompileError(f"LLVM rejects the code of {name!r}: {str(message).strip()}")
    try:
        module.triple = machine.triple
        module.data_layout = str(machine.target_data)
        module.verify()
    except RuntimeError as error:
        module.close()
        raise CompileError(f"LLVM rejects the code of {name!r}: {str(error).strip()}") from error
    return module


def optimise(module: Any, machine: Any) -> None:
    tuning = llvm().create_pipeline_tuning_options(speed_level=2)
    tuning.loop_vectorization = True
    passes = llvm().create_pass_builder(machine, tuning)
    unlocked("LLVMPY_RunNewModulePassManager")(passes.getModulePassManager(), module, passes)


def emit(module: Any, machine: Any, *, optimize: bool, note: Module | None = None) -> bytes:
    from llvmlite.binding import ffi

    if optimize:
        taken(note, "passes", lambda: optimise(module, machine))
    with ffi.OutputString() as error:
        work = unlocked("LLVMPY_TargetMachineEmitToMemory")
        buffer = taken(note, "code", lambda: work(machine, module, 1, error))
        if not buffer:
            raise CompileError(f"LLVM can't compile a module: {error}")
    try:
        return ctypes.string_at(ffi.lib.LLVMPY_GetBufferStart(buffer), ffi.lib.LLVMPY_GetBufferSize(buffer))
    finally:
        ffi.lib.LLVMPY_DisposeMemoryBuffer(buffer)
        give_back_now_and_then(library_path())


@undivided
def compile_object(ir: str, *, optimize: bool, target: Target | None = None) -> bytes:
    """Compiles IR text to an object file for a machine, this one if none is given.

    `optimize=False` runs no IR passes (for code in explicit vectors), True runs O2 with loop vectorisation; both
    generate code at level 3. Raises CompileError when LLVM rejects the text.
    """
    machine = target_machine(target)
    with llvm().create_context() as context, parse(ir, machine, context) as module:
        return emit(module, machine, optimize=optimize)


def runtime_object(name: str, ir: Callable[[], str]) -> bytes:
    """The object of runtime code, linked; made once a process."""
    obj = runtime_objects.get(name)
    if obj is None:
        text, cache = ir(), default_cache()
        of_text = text_key(name, text, True)
        key = object_key(of_text)
        obj = came_with_rlx(of_text) or cache.get(key)
        if obj is None:
            obj = compile_object(text, optimize=True)
            cache.put(key, obj)
        obj = runtime_objects[name] = linked([obj])
    return obj


def linked(objs: Sequence[bytes]) -> bytes:
    """The objects as linked code; one alone stays as it is where LLVM loads it."""
    if not loads_itself():
        (obj,) = objs
        return obj
    return link(objs).to_bytes()


def object_key(of_text: str) -> str:
    return content_key(of_text, compiler_identity())


def came_with_rlx(of_text: str) -> bytes | None:
    """The object for a text that has been compiled beforehand, if this machine can run it."""
    if not loads_itself():
        return None
    archives = archives_of(host().features, cpuid.vendor())
    return next((obj for archive in archives if (obj := archive.find(of_text))), None)


@functools.cache
def default_cache() -> ObjectCache:
    return ObjectCache()


# The kernels of this process by key, in the code that has them: as long as a compiled graph holds that.
loaded: WeakValueDictionary[str, Library] = WeakValueDictionary()


def compile_kernels(items: Iterable[Item], *, cache: ObjectCache | None = None) -> Kernels:
    """Compiles kernels and returns their addresses by name; they stay loaded for good.

    An item is (name, IR text, optimize): a self-contained module that defines one function of that name. Equal items
    are compiled once a process and looked up on disk first. Raises CompileError for IR that LLVM rejects, a missing
    function, two kernels of one name, or a symbol that is not allowed.
    """
    with Compiling(cache) as work:
        for item in items:
            work.add(*item)
        made = work.finish()
    for library in made.code:
        library.keep()
    return made


class Compiling:
    """Kernels on their way to code: compiled in bundles, by several threads, while more are added.

    To be used in a `with` statement: what is left of it without `finish` is dropped.
    """

    def __init__(self, cache: ObjectCache | None = None, threads: int = THREADS) -> None:
        from rlx.backends.cpu.jit.workers import Crew

        self.cache = cache if cache is not None else default_cache()
        self.keys: dict[str, str] = {}  # by name
        self.given: dict[str, str] = {}
        self.pending: dict[bool, dict[str, Item]] = {False: {}, True: {}}  # by level: the bundle that fills
        self.wanted: dict[str, dict[str, str]] = {}  # bundle on disk -> symbols by key
        self.items: dict[str, tuple[str, Callable[[], str], bool]] = {}  # the same, whose text may have to be made
        self.held: dict[str, Library] = {}  # that have kernels by these keys already
        self.objects: list[Bundle] = []
        self.crew = Crew(min(host().cores, threads))
        self.times = times()  # of the thread that adds; others compile

    def __enter__(self) -> Compiling:
        return self

    def __exit__(self, *_: object) -> None:
        self.crew.cancel()

    def add(self, name: str, ir: str, optimize: bool) -> None:
        """One more kernel. Raises CompileError for another of the same name."""
        if self.given.get(name) == ir:  # kernels that are alike come many times, and what many call, which is long
            return
        self.given[name] = ir
        self.want(name, text_key(name, ir, optimize), lambda: ir, optimize)

    def add_routine(self, routine: Routine) -> None:
        """One more routine; its text is made only where it is to be compiled. Raises `CompileError` as `add` does."""
        if self.given.get(routine.symbol) != routine.ir:
            self.given[routine.symbol] = routine.ir
            self.want(routine.symbol, routine.ir, lambda: text_of(routine), False)

    def want(self, name: str, of_text: str, ir: Callable[[], str], optimize: bool) -> None:
        """A function by the key of its text: found, or compiled."""
        key = object_key(of_text)
        if self.keys.setdefault(name, key) != key:
            raise CompileError(f"two different kernels are named {name!r}")
        if key in self.held or key in self.items:
            return
        library = loaded.get(key)
        if library is not None:
            self.held[key] = library
            return
        self.items[key] = (name, ir, optimize)
        obj = came_with_rlx(of_text)
        if obj is not None:
            self.objects.append((obj, {key: symbol_of(of_text)}))
            if self.times is not None:
                self.times.came.append(name)
            return
        reference = self.cache.get(key)
        if reference is not None and reference.startswith(REFERENCE):
            bundle, _, symbol = reference[len(REFERENCE) :].decode().partition(":")
            self.wanted.setdefault(bundle, {})[key] = symbol
            if self.times is not None:
                self.times.kept.append(name)
        else:
            self.compile(key)

    def prepare(self, name: str, ir: Callable[[], str]) -> None:
        """Makes an object that `build` will ask for, where this process has none yet."""
        if name not in runtime_objects:
            text = ir()
            self.crew.add(len(text), lambda: runtime_object(name, lambda: text))

    def compile(self, key: str) -> None:
        name, ir, optimize = self.items[key]
        item = name, ir(), optimize
        bundle = self.pending[optimize]
        if len(item[1]) >= TEXT:
            self.begin({key: item})
            return
        bundle[key] = item
        if len(bundle) == BUNDLE or sum(len(ir) for _, ir, _ in bundle.values()) >= TEXT:
            self.pending[optimize] = {}
            self.begin(bundle)

    def begin(self, bundle: Mapping[str, Item]) -> None:
        def work() -> None:
            note = None
            if self.times is not None:
                names, texts, _ = zip(*bundle.values(), strict=True)
                note = Module(names, sum(map(len, texts)))
                self.times.modules.append(note)
            self.objects.append(compile_bundle(bundle, self.cache, note))

        self.crew.add(sum(len(ir) for _, ir, _ in bundle.values()), work)

    def finish(self) -> Kernels:
        """Waits until all is compiled, and loads it: the kernels by name."""
        found: list[Bundle] = []
        for bundle, symbols in self.wanted.items():
            obj = self.cache.get(bundle)
            if obj is not None:
                found.append((obj, symbols))
                continue
            for key in symbols:
                self.compile(key)
        for filled in self.pending.values():
            if filled:
                self.begin(filled)
        self.crew.finish(lambda part: report("code", 0.5 + part / 2))
        with undivided, lock:
            self.held |= load_bundles([*found, *self.objects])
        if self.objects:
            give_back_library(library_path())
        forget_texts()
        give_back_heap()
        places = {name: self.held[key].kernels[key] for name, key in self.keys.items()}
        return Kernels(places, self.held.values())


def compile_bundle(kernels: Mapping[str, Item], cache: ObjectCache, note: Module | None = None) -> Bundle:
    """Compiles kernels of one optimisation level as one module and stores the object for each of their keys."""
    bundle = content_key(*kernels)
    symbols = {key: f"rlx_{bundle[:32]}_{index}" for index, key in enumerate(kernels)}
    obj = compile_together([(kernels[key], symbol) for key, symbol in symbols.items()], note=note)
    try:
        check_object(obj)
    except CompileError as error:
        raise CompileError(f"{error} (in one of: {', '.join(name for name, _, _ in kernels.values())})") from None
    if cache.put(bundle, obj):
        for key in kernels:
            cache.put(key, REFERENCE + f"{bundle}:{symbols[key]}".encode())
    return obj, symbols


@undivided
def compile_together(
    kernels: Sequence[tuple[Item, str]], target: Target | None = None, note: Module | None = None
) -> bytes:
    """One object of kernels of one optimisation level, each under a symbol of its own."""
    machine = target_machine(target)
    with ExitStack() as stack:
        context = stack.enter_context(llvm().create_context())
        whole: Any = None
        for (name, ir, _), symbol in kernels:
            read = functools.partial(parse, ir, machine, context, name)
            module = stack.enter_context(taken(note, "parse", read))
            isolate(module, name, symbol)
            if whole is None:
                whole = module
            else:
                whole.link_in(module)
        return emit(whole, machine, optimize=kernels[0][0][2], note=note)


def isolate(module: Any, name: str, unique: str) -> None:
    """Renames a module's kernel to a unique symbol and hides everything else that the module defines."""
    try:
        kernel = module.get_function(name)
    except NameError:
        kernel = None
    if kernel is None or kernel.is_declaration:
        raise CompileError(f"the IR of kernel {name!r} defines no function of that name")
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name != name and value.linkage.name != "private":
            value.linkage = "internal"
    kernel.linkage = "external"
    kernel.name = unique


def load_bundles(objects: Sequence[Bundle]) -> dict[str, Library]:
    """Loads objects, all at once: one mapping for all. Returns what has the kernels, by their keys."""
    if not objects:
        return {}
    for obj, _ in objects:
        check_object(obj)
    library = load_object(*(obj for obj, _ in objects))
    for obj, symbols in objects:
        for key, symbol in symbols.items():
            library.kernels[key] = library.address(symbol)
            library.origins[library.kernels[key]] = (obj, symbol)
    loaded.update(dict.fromkeys(library.kernels, library))
    return dict.fromkeys(library.kernels, library)


def objects_of(kernels: Kernels) -> list[Bundle]:
    """Returns the objects that define these kernels, to be stored and loaded elsewhere.

    Where our own loader is used they are linked.
    """
    found: dict[bytes, dict[str, str]] = {}
    origins = {address: origin for library in kernels.code for address, origin in library.origins.items()}
    for name, address in kernels.items():
        obj, symbol = origins[address]
        found.setdefault(obj, {})[name] = symbol
    if not found or not loads_itself() or any(map(is_code, found)):
        return list(found.items())
    return [(linked(list(found)), {name: symbol for symbols in found.values() for name, symbol in symbols.items()})]
