"""The devices that rlx knows, by name, each imported when first asked for. docs/adding-a-backend.md adds one."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec

from rlx.backends.base import Backend, Restorer
from rlx.errors import DeviceUnavailable, OptionError
from rlx.options import CompileOptions

__all__ = [
    "BACKENDS",
    "BY_NAME",
    "RESTORERS",
    "backend_named",
    "check_options",
    "choose_backend",
    "device_named",
    "restorer_named",
]

BACKENDS: dict[str, str] = {
    "cpu": "rlx.backends.cpu.backend:CpuBackend",
    "reference": "rlx.backends.reference:ReferenceBackend",
    "cuda": "rlx.backends.cuda.backend:CudaBackend",
    "xla": "rlx.backends.xla.backend:XlaBackend",
    "mlx": "rlx.backends.mlx.backend:MlxBackend",
    "interp": "rlx.backends.interp.backend:InterpBackend",
}
RESTORERS: dict[str, str] = {"cpu": "rlx.backends.cpu.runtime.image:CpuRestorer"}  # devices with stored code

# devices that are used where they are named only: "auto" never chooses them
BY_NAME = frozenset({"reference", "interp"})
SURE: dict[str, str] = {"cpu": "llvmlite"}  # devices that can be used wherever this package is installed


@cache
def restorer_named(name: str) -> Restorer | None:
    """What makes executables of the device's stored code, None where there is no such thing."""
    if name not in RESTORERS:
        return None
    module, _, cls = RESTORERS[name].partition(":")
    restorer: Restorer = getattr(import_module(module), cls)()
    return restorer


ELSEWHERE = {"gpu": "cuda", "nvidia": "cuda", "jax": "xla", "metal": "mlx", "mps": "mlx", "numpy": "reference"}


def unknown_device(name: str, what: str = "unknown device ") -> OptionError:
    """The error for a device that there is not, with the one that was probably meant."""
    from difflib import get_close_matches

    plain = name.lower().partition(":")[0]
    near = [ELSEWHERE[plain]] if plain in ELSEWHERE else get_close_matches(plain, ("auto", *BACKENDS), n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return OptionError(f"{what}{name!r}: known are 'auto', {', '.join(map(repr, BACKENDS))}{meant}")


@cache
def backend_named(name: str) -> Backend:
    """The backend of that name; `OptionError` lists the known ones."""
    if name not in BACKENDS:
        raise unknown_device(name)
    module, _, cls = BACKENDS[name].partition(":")
    backend: Backend = getattr(import_module(module), cls)()
    return backend


def choose_backend(device: str) -> Backend:
    """The backend for the option `device`: the one named, or for "auto" the first that can be used here."""
    missing = []
    for name in (n for n in BACKENDS if n not in BY_NAME) if device == "auto" else (device,):
        backend = backend_named(name)
        found = backend.available()
        if found.present:
            return backend
        if device != "auto":
            raise DeviceUnavailable(f"device {name!r}: {found.why}")
        missing.append(f"{name}: {found.why}")
    raise DeviceUnavailable(f"no device can be used here. {'. '.join(missing)}")


def check_options(backend: Backend, options: CompileOptions) -> None:
    """Raises `OptionError` for options that the device would ignore."""
    ignored = backend.ignored(options)
    if ignored:
        able = [repr(name) for name in BACKENDS if not backend_named(name).ignored(options)]
        others = f", name a device that can ({', '.join(able)}), or let device='auto' choose among those"
        if not able:
            others = "; no device honours all of the options that were given"
        raise OptionError(f"device {backend.name!r} can't honour {ignored}: leave it out{others}")


def device_named(device: str) -> str:
    """The name of what `choose_backend` gives, without loading it where its package being there says enough."""
    first = next(iter(BACKENDS)) if device == "auto" else device
    if first in SURE and find_spec(SURE[first]) is not None:
        return first
    return choose_backend(device).name
