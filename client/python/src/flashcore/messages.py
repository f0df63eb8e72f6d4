"""The messages of the contract that calls return, as type checkers see them.

Each has the fields of its message in flashcore/v1/attention.proto, which says what they mean. An enumeration
is a number.
"""

from typing import Protocol, Sequence


class DeviceInfo(Protocol):
    id: str
    name: str
    arch: str
    memory_bytes: int
    l2_bytes: int
    l2_persisting_max_bytes: int
    lanes: int
    compute_units: int
    kv_memory_bytes: int
    kv_hot_bytes: int
    kv_used_bytes: int
    l2_window_bytes: int
    l2_persisting_bytes: int
    l2_note: str


class KernelInfo(Protocol):
    arch: str
    dtype: int
    head_dim: int
    accumulate: str
    features: Sequence[str]
    kv_dtype: int
    precision: int


class Limits(Protocol):
    max_message_bytes: int
    max_spans: int
    max_heads: int
    head_dims: Sequence[int]
    max_queue_requests: int
    max_batch_requests: int
    max_batch_tokens: int
    max_stream_inflight: int
    staging_memory_bytes: int
    max_request_id_bytes: int
    max_request_flop: float
    max_layers: int
    max_page_bytes: int
    client_kv_bytes: int
    client_sequences: int
    sequence_idle_timeout_seconds: float
    evicts: bool
    shared_memory_bytes: int
    client_shared_memory_bytes: int
    client_shared_regions: int
    client_metadata_bytes: int
    client_staging_bytes: int
    unsent_reply_bytes: int
    client_unsent_reply_bytes: int
    reply_timeout_seconds: float
    max_connections: int
    max_connections_per_host: int
    max_connection_streams: int
    max_connections_per_client: int
    max_connection_rings: int
    max_sequence_operations: int
    device_tensor_bytes: int
    client_device_tensor_bytes: int
    client_device_tensor_regions: int


class GetServerInfoResponse(Protocol):
    version: str
    devices: Sequence[DeviceInfo]
    kernels: Sequence[KernelInfo]
    limits: Limits


class SequenceInfo(Protocol):
    sequence_id: bytes
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: int
    layer_lengths: Sequence[int]
    kv_bytes: int
    pinned_bytes: int
    device_id: str
    idle_seconds: float
    pin: bool
    shared: bool
    group: str
    idle_timeout_seconds: float
    leased: bool
    kv_dtype: int
