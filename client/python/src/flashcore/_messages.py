"""The messages of the contract, flashcore/v1/attention.proto.

The classes are made from the compiled contract, in a pool of their own: they share a process with any
other copy of the contract.
"""

import pathlib
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "flashcore.v1.AttentionService"

_COMPILED = pathlib.Path(__file__).with_name("attention.binpb")
_pool = descriptor_pool.DescriptorPool()
for _file in descriptor_pb2.FileDescriptorSet.FromString(_COMPILED.read_bytes()).file:
    _pool.AddSerializedFile(_file.SerializeToString())
# protobuf 4.21 makes classes with a factory, later versions with a function.
_make_class = (getattr(message_factory, "GetMessageClass", None)
               or message_factory.MessageFactory(_pool).GetPrototype)


def message(name: str) -> Any:
    """The class of a message, such as "AttendRequest"."""
    return _make_class(_pool.FindMessageTypeByName(f"flashcore.v1.{name}"))


def enum(name: str) -> dict[str, int]:
    """The numbers of an enum's values by their names."""
    return {value.name: value.number for value in _pool.FindEnumTypeByName(f"flashcore.v1.{name}").values}


# Request and reply of each method, by its name.
METHODS = {method.name: (_make_class(method.input_type), _make_class(method.output_type))
           for method in _pool.FindServiceByName(SERVICE).methods}
