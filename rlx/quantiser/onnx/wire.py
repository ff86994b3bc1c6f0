"""Parts of ONNX files as bytes: messages are cut into their fields, put together again, and new ones are written.

Only files that `read_model` has checked are cut. Field numbers are those of onnx.proto.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from rlx.importers.onnx.tensor import ELEMENT_TYPES
from rlx.ir.graph import Array

__all__ = ["Field", "fields_of", "made_node", "made_tensor", "message", "number_field", "tensor_head", "with_values"]

Field = tuple[int, int, memoryview]  # number, where the payload begins in the bytes that follow, and the field as it is
INT, FLOAT, STRING, INTS = 2, 1, 3, 7  # AttributeProto.AttributeType
_OF_DTYPE = {kind.dtype: number for number, kind in ELEMENT_TYPES.items()}


def varint(value: int) -> bytes:
    """A number of 64 bits as protobuf writes it."""
    value &= (1 << 64) - 1
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    made.append(value)
    return bytes(made)


def message(number: int, payload: bytes) -> bytes:
    """A field that holds a message, a text or bytes."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def number_field(number: int, value: int) -> bytes:
    """A field that holds a number."""
    return varint(number << 3) + varint(value)


def fields_of(data: memoryview) -> Iterator[Field]:
    """The fields of a message in order."""
    at, end = 0, len(data)
    while at < end:
        start = at
        tag, at = _varint(data, at)
        payload = at
        match tag & 7:
            case 0:
                _, at = _varint(data, at)
            case 1:
                at += 8
            case 5:
                at += 4
            case _:
                size, payload = _varint(data, at)
                at = payload + size
        yield tag >> 3, payload - start, data[start:at]


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def with_values(node: memoryview, inputs: Iterable[str], outputs: Iterable[str]) -> bytes:
    """A NodeProto with other inputs and outputs."""
    rest = b"".join(bytes(whole) for number, _, whole in fields_of(node) if number not in (1, 2))
    names = [message(1, name.encode()) for name in inputs] + [message(2, name.encode()) for name in outputs]
    return b"".join(names) + rest


def made_node(
    op: str, inputs: Iterable[str], outputs: Iterable[str], name: str, domain: str = "", **attributes: Any
) -> bytes:
    """A NodeProto; attributes are ints, floats, texts and lists of ints."""
    parts = [message(1, i.encode()) for i in inputs] + [message(2, o.encode()) for o in outputs]
    parts += [message(3, name.encode()), message(4, op.encode())]
    parts += [message(5, _attribute(key, value)) for key, value in attributes.items()]
    if domain:
        parts.append(message(7, domain.encode()))
    return b"".join(parts)


def _attribute(name: str, value: Any) -> bytes:
    head = message(1, name.encode())
    if isinstance(value, float):
        bits = np.float32(value).tobytes()
        return head + varint(2 << 3 | 5) + bits + number_field(20, FLOAT)
    if isinstance(value, int):
        return head + number_field(3, value) + number_field(20, INT)
    if isinstance(value, str):
        return head + message(4, value.encode()) + number_field(20, STRING)
    return head + b"".join(number_field(8, v) for v in value) + number_field(20, INTS)


def tensor_head(name: str, dims: Iterable[int], elem_type: int) -> bytes:
    """A TensorProto without its data."""
    sizes = b"".join(number_field(1, d) for d in dims)
    return sizes + number_field(2, elem_type) + message(8, name.encode())


def made_tensor(name: str, array: Array) -> bytes:
    """A TensorProto of an array of whole bytes an element."""
    return tensor_head(name, array.shape, _OF_DTYPE[array.dtype]) + message(9, np.ascontiguousarray(array).tobytes())
