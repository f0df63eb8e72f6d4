// Protobuf messages whose tensors stay where they are.
//
// A message of this project is a few small fields and some large `bytes` fields. Parsing it with
// the generated class would copy the large ones into strings, and would let a hostile message of
// tiny submessages grow by an order of magnitude. Instead, a message is split: the small fields are
// collected (up to a limit) for the generated class to parse, and of each large field only its
// place is noted. Once the small fields have been validated, CopyField moves a tensor to its
// destination in one copy. The result is what the generated parser would give, for any order of
// fields, split of slices, repeated field (the last one counts) or unknown field.
#ifndef FLASHCORE_PROTO_WIRE_H_
#define FLASHCORE_PROTO_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/slice.h"

namespace flashcore::wire {

// One `bytes` field, left in place in its message.
struct LargeField {
  int number = 0;     // field number, set by the caller of SplitMessage
  size_t offset = 0;  // of the first payload byte, in the serialized message
  size_t size = 0;    // payload bytes; 0 if the field is absent
};

// Notes the place of each of `large` in `message` and puts all other fields, as they were, into
// `*small`. INVALID_ARGUMENT if the message is not well-formed or if its other fields take more
// than `max_small_bytes`. Unknown groups are checked and dropped.
absl::Status SplitMessage(const grpc::ByteBuffer& message, size_t max_small_bytes,
                          absl::Span<LargeField> large, std::string* small);

// Copies the payload of `field` of `message` (for which SplitMessage noted it) to `destination`,
// which has field.size bytes.
void CopyField(const grpc::ByteBuffer& message, const LargeField& field, void* destination);

// The bytes that precede the payload of `bytes` field `number`: its tag and its length.
std::string FieldHeader(int number, size_t payload_bytes);

}  // namespace flashcore::wire

#endif  // FLASHCORE_PROTO_WIRE_H_
