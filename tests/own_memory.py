"""A device with memory of its own, for tests: the reference over bytes that only explicit copies reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from rlx.backends.array import Array, MemorySpace, Tensor
from rlx.backends.base import Availability, Executable
from rlx.backends.reference import ReferenceBackend, ReferenceExecutable
from rlx.errors import OptionError
from rlx.ir.dtype import dtype_of
from rlx.ir.graph import Array as HostArray
from rlx.ir.graph import Graph
from rlx.options import CompileOptions

__all__ = ["OwnMemory", "OwnMemoryBackend"]


class Block:
    """Elements as bytes, several of fewer than 8 bits to a byte."""

    def __init__(self, array: HostArray) -> None:
        self.shape, self.type = array.shape, dtype_of(array.dtype)
        raw = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        if self.type.bits < 8:
            bits = np.unpackbits(raw[:, None], axis=1, count=self.type.bits, bitorder="little")
            raw = np.packbits(bits, bitorder="little")
        self.bytes = raw.tobytes()

    def array(self) -> HostArray:
        raw = np.frombuffer(self.bytes, np.uint8)
        if self.type.bits < 8:
            count = int(np.prod(self.shape))
            bits = np.unpackbits(raw, count=count * self.type.bits, bitorder="little").reshape(count, self.type.bits)
            raw = np.packbits(bits, axis=1, bitorder="little").reshape(-1)
        return np.array(raw.view(self.type.numpy).reshape(self.shape))


class OwnMemory(MemorySpace):
    """Counts the copies from the host (`puts`) and to it (`fetches`)."""

    device = "own"

    def __init__(self) -> None:
        self.puts = self.fetches = 0

    def put(self, array: HostArray) -> Block:
        self.puts += 1
        return Block(array)

    def fetch(self, held: Block) -> HostArray:
        self.fetches += 1
        return held.array()

    def type_of(self, held: Block) -> Any:
        return held.type.numpy

    def copy(self, held: Block) -> Block:
        return Block(held.array())

    def part(self, held: Block, index: tuple[int | slice, ...]) -> Block:
        return Block(np.asarray(held.array()[index]))

    def padded(self, held: Block, shape: tuple[int, ...]) -> Block:
        made = np.zeros(shape, held.type.numpy)
        made[tuple(map(slice, held.shape))] = held.array()
        return Block(made)

    def export(self, held: Block, options: Mapping[str, Any]) -> NoReturn:
        raise BufferError("no library knows this memory")

    def place(self, held: Block) -> tuple[int, int]:
        return 2, 0  # as of CUDA: nobody may read it as the host's


class OwnMemoryExecutable(Executable[Tensor]):
    """`ReferenceExecutable`, whose arrays are brought from and to the memory of the device by the device itself."""

    capabilities = frozenset({"out", "states", "dynamic", "arena"})

    def __init__(self, space: OwnMemory, inner: ReferenceExecutable) -> None:
        self.space, self.inner = space, inner

    def here(self, array: Tensor) -> HostArray:
        """The elements as the device's own code reads them."""
        block: Block = array.held if isinstance(array, Array) else self.space.put(np.asarray(array))
        return block.array()

    def there(self, array: HostArray) -> Array:
        return self.space.array(Block(array))

    def adopt(self, value: Any) -> Array | None:
        return self.space.local(value)

    def set_params(self, arrays: Mapping[str, Tensor]) -> None:
        self.inner.set_params({name: self.here(array) for name, array in arrays.items()})

    @property
    def results(self) -> Sequence[Array | None] | None:
        made = self.inner.results
        return None if made is None else [None if a is None else self.there(a) for a in made]

    @property
    def arena(self) -> Array:
        return self.there(np.zeros(64, np.uint8))

    @property
    def slots(self) -> Callable[..., NoReturn]:
        def refuse(*arrays: Any) -> NoReturn:
            raise OptionError("it has no slots")

        return refuse

    def run(self, inputs: Sequence[Tensor], out: Sequence[Tensor | None], wanted: Sequence[int]) -> list[Tensor]:
        made = self.inner.run([self.here(a) for a in inputs], [None] * len(out), range(len(out)))
        for target, array in zip(out, made, strict=True):
            if target is not None:
                np.copyto(np.asarray(target), array)
        return [self.there(made[i]) if (t := out[i]) is None else t for i in wanted]

    @property
    def bound_inputs(self) -> Mapping[str, Array]:
        return {name: self.there(array) for name, array in self.inner.bound_inputs.items()}

    @property
    def feeds(self) -> Mapping[str, int]:
        return self.inner.feeds

    def read_state(self, name: str) -> Array:
        return self.there(self.inner.read_state(name))

    def write_state(self, name: str, array: Tensor | None) -> None:
        self.inner.write_state(name, None if array is None else self.here(array))

    def keep_input(self, name: str, array: Tensor | None) -> None:
        self.inner.keep_input(name, None if array is None else self.here(array))

    def feed_state(self, name: str, output: int | None) -> None:
        self.inner.feed_state(name, output)


class OwnMemoryBackend(ReferenceBackend):
    name = "own"
    honours = frozenset()
    capabilities = OwnMemoryExecutable.capabilities

    def __init__(self) -> None:
        self.memory_space = OwnMemory()

    @property
    def space(self) -> OwnMemory:
        return self.memory_space

    def available(self) -> Availability:
        return Availability(True, "for tests")

    def build(self, graph: Graph, options: CompileOptions) -> OwnMemoryExecutable:
        return OwnMemoryExecutable(self.memory_space, ReferenceExecutable(graph))
