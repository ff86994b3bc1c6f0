"""The options of a compile: one dataclass, whose fields are the keywords of `compile`, `load` and `Session`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from rlx.boundary import bounded_class
from rlx.errors import OptionError
from rlx.records import dataclass, names_of, replace
from rlx.units import as_int, int_or_same, with_ints

__all__ = ["DEVICE_OPTIONS", "PRECISIONS", "CompileOptions", "DeviceOptions", "EveryDevicesOptions", "Options"]

DimSpec = int | tuple[int, int]

# What a device itself has to do something about; the others are the runtime's, for every device alike.
DEVICE_OPTIONS = ("threads", "alignment", "search", "reuse", "packing", "trap", "debug")

# What `precision` may be. For values that a graph declares as f32: the type they are stored in, the type that operands
# of products are rounded to (of "q8": activations alone, where weights have 8 bits or fewer), and the type that sums
# of products are kept in. docs/design.md, section 7, defines it.
PRECISIONS: Mapping[str, tuple[str, str, str]] = {
    "f32": ("f32", "f32", "f32"),
    "bf16": ("f32", "bf16", "f32"),
    "f16": ("f32", "f16", "f32"),
    "q8": ("f32", "q8", "f32"),
}

ELSEWHERE = {  # what other runtimes call it -> what is written here
    "providers": "device= says where a model runs: 'cpu', 'xla', or 'auto' for the one predicted to be fastest; ",
    "sess_options": "what SessionOptions holds are keywords here, such as threads=; ",
    "intra_op_num_threads": "threads= is the number of threads of a run; ",
    "num_threads": "threads= is the number of threads of a run; ",
    "dtype": "precision= is what products are computed in; ",
    "dynamic_axes": "dims= gives sizes, or bounds of sizes, by name; ",
    "input_shapes": "dims= gives sizes, or bounds of sizes, by input; ",
    "backend": "device= says where a model runs; ",
    "n_threads": "threads= is the number of threads of a run; ",
    "context": "context= is for rlx.load_llm, and dims={'context': 4096} says the same here; ",
    "n_ctx": "context= of rlx.load_llm is the number of tokens that the cache has room for; ",
    "max_model_len": "context= of rlx.load_llm is the number of tokens that the cache has room for; ",
}


@bounded_class(OptionError)
@dataclass(frozen=True)
class CompileOptions:
    """What a compile can be told. Unknown names and values are `OptionError`s."""

    device: str = "auto"  # "auto", or a name that `rlx devices` lists
    dims: Mapping[str, Any] | None = None  # name -> int or (lo, hi); input -> tuple of those, or {axis: own}
    threads: int | None = None  # CPU threads of a run, the caller's too, 64 at most; None: what the machine grants
    precision: Literal["f32", "bf16", "f16", "q8"] = "f32"  # what operands of products are rounded to
    budget: int | str | None = None  # bytes ("8GiB", 123456) that the model may take; None: what is free
    over_budget: Literal["error", "warn", "allow"] = "error"  # where it does not fit
    deterministic: bool = True  # equal inputs give equal bits on one machine for any `threads`; so far they always do
    alignment: int = 64  # bytes that every buffer of the arena is aligned to
    search: Literal["off", "auto"] | int = "auto"  # exact search for the least arena; int: visits, 10**8 take a second
    reuse: bool = True  # let buffers share memory when their lives do not overlap (False: for debugging)
    cache_dir: str | os.PathLike[str] | None = None  # where compiled code is kept; None: the user's cache folder
    cache: bool = True  # keep what was compiled from a file, with its packed weights, for the next load of that file
    packing: Literal["fast", "shared", "none"] = "fast"  # weights packed for these sizes, as others share them, or not
    queue: int | None = None  # runs that `submit` takes before it waits for one to end; None: 4; int: in the estimate
    busy: Literal["error", "wait"] = "error"  # what a call of a graph does that runs in another thread
    trap: Literal["off", "nan", "inf"] = "off"  # stop at the first kernel that gives NaN (inf: or infinities); slow
    debug: bool = False  # fill the arena with NaN before each run, and refuse views of an earlier run; slow

    def __post_init__(self) -> None:
        for name in ("threads", "budget", "alignment", "search", "queue"):
            object.__setattr__(self, name, int_or_same(getattr(self, name)))
        if isinstance(self.dims, Mapping):
            object.__setattr__(self, "dims", with_ints(self.dims))
        if not isinstance(self.device, str) or not self.device:
            raise OptionError(f"device={self.device!r}: expected the name of a device, see `rlx devices`")
        if self.dims is not None and not isinstance(self.dims, Mapping):
            raise OptionError(f"dims={self.dims!r}: expected a mapping, such as {{'batch': 4, 'seq': (1, 512)}}")
        if self.threads is not None and not (_is_int(self.threads) and self.threads >= 1):
            raise OptionError(f"threads={self.threads!r}: expected an int >= 1, or None for all that are granted")
        if not _is_one(self.precision, *PRECISIONS):
            raise OptionError(f"precision={self.precision!r}: expected {', '.join(map(repr, PRECISIONS))}")
        if not _is_one(self.over_budget, "error", "warn", "allow"):
            raise OptionError(f"over_budget={self.over_budget!r}: expected 'error', 'warn' or 'allow'")
        if not _is_one(self.packing, "fast", "shared", "none"):
            raise OptionError(
                f"packing={self.packing!r}: expected 'fast', 'shared' for one copy in several graphs, or 'none' for"
                " weights that are read where they lie"
            )
        if self.queue is not None and not (_is_int(self.queue) and self.queue >= 1):
            raise OptionError(f"queue={self.queue!r}: expected an int >= 1, the runs that submit takes, or None for 4")
        if not _is_one(self.busy, "error", "wait"):
            raise OptionError(f"busy={self.busy!r}: expected 'error', or 'wait' to wait for the other thread")
        if not _is_one(self.trap, "off", "nan", "inf"):
            raise OptionError(f"trap={self.trap!r}: expected 'off', 'nan', or 'inf' for NaN and infinities")
        if not _is_int(self.alignment) or not 8 <= self.alignment <= 65536 or self.alignment & (self.alignment - 1):
            raise OptionError(f"alignment={self.alignment!r}: expected a power of two from 8 to 65536 (bytes)")
        visits = -1 if isinstance(self.search, bool) or not isinstance(self.search, int) else self.search
        if not _is_one(self.search, "off", "auto") and visits < 0:
            raise OptionError(f"search={self.search!r}: expected 'off', 'auto' or a number of visits, 0 or more")
        for name in ("deterministic", "reuse", "cache", "debug"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name}={getattr(self, name)!r}: expected True or False")
        folder = self.cache_dir
        named = isinstance(folder, str | os.PathLike) and os.fsdecode(folder) and "\0" not in os.fsdecode(folder)
        if folder is not None and not named:
            raise OptionError(f"cache_dir={folder!r}: expected a folder, or None for the user's cache folder")
        if self.budget is not None:
            parse_bytes(self.budget, "budget")

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes, None where none was set."""
        return None if self.budget is None else parse_bytes(self.budget)

    @property
    def input_sets(self) -> int:
        """The sets of inputs that are there at once: the caller's, and those of a queue that was asked for."""
        return 1 + (self.queue or 0)

    def of_device(self) -> dict[str, Any]:
        """The `DEVICE_OPTIONS` that are set to something else than their default."""
        default = CompileOptions()
        given = {name: getattr(self, name) for name in DEVICE_OPTIONS}
        return {name: value for name, value in given.items() if value != getattr(default, name)}

    def with_options(self, changes: Mapping[str, object], *also: str) -> CompileOptions:
        """A copy with other values; `OptionError` names an unknown option and lists the known ones, those `also` that
        the caller takes itself.
        """
        known = names_of(self)
        for name in changes:
            if name not in known:
                raise _unknown(name, (*known, *also))
        return replace(self, **dict[str, Any](changes))


def _unknown(name: str, known: Sequence[str]) -> OptionError:
    """The error for an option that there is not: what is written instead, or those there are."""
    from difflib import get_close_matches

    close = get_close_matches(name, known, 1)
    meant = ELSEWHERE.get(name) or (f"did you mean {close[0]!r}? " if close else "")
    return OptionError(f"unknown option {name!r}: {meant}known are {', '.join(known)}")


def _is_one(value: object, *known: str) -> bool:
    return isinstance(value, str) and value in known


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(size: int | str, name: str = "") -> int:
    """Bytes from an int or a text such as "8GiB", "500 MB" or "1e9"; `OptionError` for anything else.

    The error names the option, where `name` is that.
    """
    whole = as_int(size)
    if whole is not None and whole >= 0:
        return whole
    if isinstance(size, str):
        text = size.strip().lower()
        number = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
        unit = text[len(number) :].strip()
        try:
            value = float(number) * UNITS[unit]
            if value >= 0:
                return int(value)
        except (ValueError, KeyError, OverflowError):
            pass
    what = f"{name}={size!r}" if name else f"size {size!r}"
    raise OptionError(f"{what}: expected bytes as an int or a text such as '8GiB' or '500MB'")


class EveryDevicesOptions(TypedDict, total=False):
    """The fields of `CompileOptions` as keywords of functions, for type checkers: all but the device and dims."""

    threads: int | None
    precision: Literal["f32", "bf16", "f16", "q8"]
    budget: int | str | None
    over_budget: Literal["error", "warn", "allow"]
    deterministic: bool
    alignment: int
    search: Literal["off", "auto"] | int
    reuse: bool
    cache_dir: str | os.PathLike[str] | None
    cache: bool
    packing: Literal["fast", "shared", "none"]
    queue: int | None
    busy: Literal["error", "wait"]
    trap: Literal["off", "nan", "inf"]
    debug: bool


class DeviceOptions(EveryDevicesOptions, total=False):
    """Those of functions that say in a way of their own what is dynamic."""

    device: str


class Options(DeviceOptions, total=False):
    """All of them."""

    dims: Mapping[str, Any] | None
