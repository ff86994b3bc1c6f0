"""The fields of ONNX messages that rlx reads: kind and number, from onnx.proto (IR versions 1 to 14)."""

from __future__ import annotations

from rlx.importers.onnx.wire import Message

__all__ = [
    "ATTRIBUTE",
    "DIMENSION",
    "ELEMENT_TYPE",
    "ENTRY",
    "FUNCTION",
    "GRAPH",
    "MODEL",
    "NODE",
    "OPSET",
    "SHAPE",
    "SPARSE",
    "TENSOR",
    "TENSOR_TYPE",
    "TYPE",
    "VALUE_INFO",
]

MODEL = Message(
    "ModelProto",
    ir_version=("varint", 1),
    producer_name=("bytes", 2),
    producer_version=("bytes", 3),
    graph=("bytes", 7),
    opset_import=("bytes", 8),
    metadata_props=("bytes", 14),
    functions=("bytes", 25),
)
OPSET = Message("OperatorSetIdProto", domain=("bytes", 1), version=("varint", 2))
ENTRY = Message("StringStringEntryProto", key=("bytes", 1), value=("bytes", 2))
GRAPH = Message(
    "GraphProto",
    node=("bytes", 1),
    name=("bytes", 2),
    initializer=("bytes", 5),
    input=("bytes", 11),
    output=("bytes", 12),
    value_info=("bytes", 13),
    sparse_initializer=("bytes", 15),
)
FUNCTION = Message(
    "FunctionProto",
    name=("bytes", 1),
    input=("bytes", 4),
    output=("bytes", 5),
    attribute=("bytes", 6),
    node=("bytes", 7),
    opset_import=("bytes", 9),
    domain=("bytes", 10),
    attribute_proto=("bytes", 11),
    value_info=("bytes", 12),
    overload=("bytes", 13),
)
NODE = Message(
    "NodeProto",
    input=("bytes", 1),
    output=("bytes", 2),
    name=("bytes", 3),
    op_type=("bytes", 4),
    attribute=("bytes", 5),
    domain=("bytes", 7),
    overload=("bytes", 8),
)
ATTRIBUTE = Message(
    "AttributeProto",
    name=("bytes", 1),
    f=("fixed32", 2),
    i=("varint", 3),
    s=("bytes", 4),
    t=("bytes", 5),
    g=("bytes", 6),
    floats=("fixed32*", 7),
    ints=("varint*", 8),
    strings=("bytes", 9),
    tensors=("bytes", 10),
    graphs=("bytes", 11),
    tp=("bytes", 14),
    type_protos=("bytes", 15),
    type=("varint", 20),
    ref_attr_name=("bytes", 21),
    sparse_tensor=("bytes", 22),
    sparse_tensors=("bytes", 23),
)
TENSOR = Message(
    "TensorProto",
    dims=("varint*", 1),
    data_type=("varint", 2),
    segment=("bytes", 3),
    float_data=("fixed32*", 4),
    int32_data=("varint*", 5),
    string_data=("bytes", 6),
    int64_data=("varint*", 7),
    name=("bytes", 8),
    raw_data=("bytes", 9),
    double_data=("fixed64*", 10),
    uint64_data=("varint*", 11),
    external_data=("bytes", 13),
    data_location=("varint", 14),
)
SPARSE = Message("SparseTensorProto", values=("bytes", 1), indices=("bytes", 2), dims=("varint*", 3))
VALUE_INFO = Message("ValueInfoProto", name=("bytes", 1), type=("bytes", 2))
TYPE = Message(
    "TypeProto",
    tensor_type=("bytes", 1),
    sequence_type=("bytes", 4),
    map_type=("bytes", 5),
    opaque_type=("bytes", 7),
    sparse_tensor_type=("bytes", 8),
    optional_type=("bytes", 9),
)
TENSOR_TYPE = Message("TypeProto.Tensor", elem_type=("varint", 1), shape=("bytes", 2))
ELEMENT_TYPE = Message("TypeProto.Sequence", elem_type=("bytes", 1))
SHAPE = Message("TensorShapeProto", dim=("bytes", 1))
DIMENSION = Message("TensorShapeProto.Dimension", dim_value=("varint", 1), dim_param=("bytes", 2))
