"""NVRTC by ctypes: CUDA C++ text to machine code, kept on disk by text, architecture and version."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from rlx.backends.codegen.object_cache import ObjectCache
from rlx.errors import CompileError, DeviceUnavailable
from rlx.lazy_imports import sha256

__all__ = ["OPTIONS", "Compiler", "compiler"]

NAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
OPTIONS = ("-std=c++17", "-fmad=false", "-default-device", "-w")  # products say where a sum is fused: `k_fma`


class Compiler:
    """The library; raises `DeviceUnavailable` where it is not installed."""

    def __init__(self) -> None:
        self.library: Any = _library()
        major, minor = c_int(), c_int()
        self.library.nvrtcVersion(byref(major), byref(minor))
        self.version = f"{major.value}.{minor.value}"
        self.library.nvrtcGetErrorString.restype = c_char_p

    def compile(self, text: str, arch: str) -> bytes:
        """Machine code for an architecture such as "sm_90a". Raises `CompileError` with what the compiler says."""
        program, status = c_void_p(), 0
        status = self.library.nvrtcCreateProgram(byref(program), text.encode(), b"rlx.cu", 0, None, None)
        if status:
            raise CompileError(f"NVRTC: {self.said(status)}")
        try:
            options = [f"-arch={arch}".encode(), *(o.encode() for o in OPTIONS)]
            status = self.library.nvrtcCompileProgram(program, len(options), (c_char_p * len(options))(*options))
            if status:
                raise CompileError(f"NVRTC for {arch}: {self.said(status)}\n{self.log(program)}")
            size = c_size_t()
            status = self.library.nvrtcGetCUBINSize(program, byref(size))
            image = ctypes.create_string_buffer(size.value)
            status = status or self.library.nvrtcGetCUBIN(program, image)
            if status:
                raise CompileError(f"NVRTC for {arch}: {self.said(status)}")
            return image.raw
        finally:
            self.library.nvrtcDestroyProgram(byref(program))

    def said(self, status: int) -> str:
        return str((self.library.nvrtcGetErrorString(status) or b"unknown error").decode(errors="replace"))

    def log(self, program: c_void_p) -> str:
        size = c_size_t()
        self.library.nvrtcGetProgramLogSize(program, byref(size))
        text = ctypes.create_string_buffer(max(size.value, 2))
        self.library.nvrtcGetProgramLog(program, text)
        return text.value.decode(errors="replace")

    def image(self, text: str, arch: str) -> bytes:
        """The same, from the cache on disk where it is there."""
        key = sha256(f"cuda {self.version} {arch} {OPTIONS}\0{text}".encode()).hexdigest()
        store = ObjectCache()
        made = store.get(key)
        if made is None:
            made = self.compile(text, arch)
            store.put(key, made)
        return made


def _library() -> Any:
    folders = [Path(p, "nvidia", kind, "lib") for p in sys.path for kind in ("cu13", "cuda_nvrtc")]
    for path in (*(folder / name for name in NAMES for folder in folders), *map(Path, NAMES)):
        if path.parent == Path(".") or path.is_file():
            with suppress(OSError):
                for needed in path.parent.glob("libnvrtc-builtins.so.*") if path.parent != Path(".") else ():
                    ctypes.CDLL(os.fspath(needed))  # which the library asks for by its name alone
                return ctypes.CDLL(os.fspath(path))
    raise DeviceUnavailable("NVRTC is not installed")


@cache
def _found() -> Compiler | DeviceUnavailable:
    try:
        return Compiler()
    except DeviceUnavailable as error:
        return error


def compiler() -> Compiler:
    """NVRTC. Raises `DeviceUnavailable`."""
    found = _found()
    if isinstance(found, DeviceUnavailable):
        raise found
    return found
