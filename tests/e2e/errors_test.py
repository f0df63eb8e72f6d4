"""Why calls fail, for programs: the details of a status over the wire, as any gRPC library reads them."""

import grpc
from flashcore.v1 import attention_pb2 as pb
from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, message_factory

import harness
from harness import failure

HEADS, DIM = 1, 64
INFO = "type.googleapis.com/google.rpc.ErrorInfo"


def google_rpc_status():
    """google.rpc.Status, as google/rpc/status.proto has it."""
    pool = descriptor_pool.DescriptorPool()
    any_file = descriptor_pb2.FileDescriptorProto()
    any_pb2.DESCRIPTOR.CopyToProto(any_file)
    pool.Add(any_file)
    file = descriptor_pb2.FileDescriptorProto(
        name="google/rpc/status.proto", package="google.rpc", syntax="proto3", dependency=[any_file.name])
    message = file.message_type.add(name="Status")
    field = descriptor_pb2.FieldDescriptorProto
    message.field.add(name="code", number=1, type=field.TYPE_INT32, label=field.LABEL_OPTIONAL)
    message.field.add(name="message", number=2, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    message.field.add(name="details", number=3, type=field.TYPE_MESSAGE, label=field.LABEL_REPEATED,
                      type_name=".google.protobuf.Any")
    pool.Add(file)
    # protobuf 4.21 makes classes with a factory, later versions with a function.
    make_class = (getattr(message_factory, "GetMessageClass", None)
                  or message_factory.MessageFactory(pool).GetPrototype)
    return make_class(pool.FindMessageTypeByName("google.rpc.Status"))


class ErrorsTest(harness.ServerTest):
    flags = ("--kv_memory_bytes=8388608", "--client_kv_bytes=0")

    def create(self):
        return harness.create(self.stub, num_kv_heads=HEADS, head_dim=DIM).sequence_id

    def append(self, sequences, rows, **fields):
        tensor = bytes(sum(rows) * HEADS * DIM * 2)
        spans = [pb.Span(sequence_id=sequence, query_rows=1, kv_rows=count, **fields)
                 for sequence, count in zip(sequences, rows)]
        return self.stub.Attend(pb.AttendRequest(
            spans=spans, num_heads=HEADS, num_kv_heads=HEADS, head_dim=DIM, dtype=pb.DTYPE_FLOAT16,
            layout=pb.LAYOUT_NHD, query=bytes(len(spans) * HEADS * DIM * 2), key=tensor, value=tensor))

    def info_of(self, error):
        """Reason and metadata, from the trailing metadata of an RPC."""
        details = dict(error.trailing_metadata())["grpc-status-details-bin"]
        ours = pb.Status.FromString(details)
        rpc = google_rpc_status().FromString(details)
        for status in ours, rpc:
            self.assertEqual((status.code, status.message), (error.code().value[0], error.details()))
            self.assertEqual([detail.type_url for detail in status.details], [INFO])
        self.assertEqual(rpc.details[0].value, ours.details[0].value)
        info = pb.ErrorInfo.FromString(ours.details[0].value)
        self.assertEqual(info.domain, "flashcore")
        return info.reason, dict(info.metadata)

    def test_all_lost_sequences_are_named(self):
        here = self.create()
        lost = [bytes([0, i]) + bytes(14) for i in range(150)]
        error = failure(grpc.StatusCode.NOT_FOUND, self.append, lost[:3] + [here], [1, 1, 1, 1])
        self.assertEqual(self.info_of(error), ("SEQUENCE_LOST", {
            "lost": "3", "spans": "0,1,2", "sequence_ids": ",".join(id.hex() for id in lost[:3])}))
        # gRPC carries as many as are named.
        error = failure(grpc.StatusCode.NOT_FOUND, self.append, lost, [1] * 150)
        reason, metadata = self.info_of(error)
        self.assertEqual((reason, metadata["lost"]), ("SEQUENCE_LOST", "150"))
        self.assertEqual(metadata["sequence_ids"].split(","), [id.hex() for id in lost[:128]])

    def test_full_memory_is_told_apart_from_requests_that_never_fit(self):
        sequences = [self.create(), self.create()]
        page = 64 * HEADS * DIM * 2 * 2
        info = self.stub.GetServerInfo(pb.GetServerInfoRequest()).devices[0]
        pages = info.kv_memory_bytes // page
        self.append(sequences, [64 * (pages - 2), 0])
        error = failure(grpc.StatusCode.RESOURCE_EXHAUSTED, self.append, sequences, [64, 128])
        self.assertEqual(self.info_of(error), ("KV_FULL", {
            "needed_bytes": str(3 * page), "free_bytes": str(2 * page),
            "used_bytes": str((pages - 2) * page)}))
        error = failure(grpc.StatusCode.RESOURCE_EXHAUSTED, self.append, sequences[1:], [64 * (pages + 1)])
        self.assertEqual(self.info_of(error), ("TOO_LARGE", {
            "needed_bytes": str((pages + 1) * page), "limit_bytes": str(pages * page)}))
        for sequence in sequences:
            self.stub.DeleteSequence(pb.DeleteSequenceRequest(sequence_id=sequence))
        error = failure(grpc.StatusCode.NOT_FOUND, self.stub.DeleteSequence,
                        pb.DeleteSequenceRequest(sequence_id=sequence))
        self.assertIn("there is nothing to delete", error.details())

    def test_a_length_that_differs_is_told(self):
        sequence = self.create()
        error = failure(grpc.StatusCode.FAILED_PRECONDITION, self.append, [sequence], [1], expected_length=3)
        self.assertEqual(self.info_of(error), ("LENGTH_MISMATCH", {
            "sequence_id": sequence.hex(), "expected": "3", "actual": "0", "span": "0"}))

    def test_other_errors_have_no_details(self):
        error = failure(grpc.StatusCode.INVALID_ARGUMENT, self.append, [b"short"], [1])
        self.assertNotIn("grpc-status-details-bin", dict(error.trailing_metadata()))


if __name__ == "__main__":
    harness.main()
