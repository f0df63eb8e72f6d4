// Reads and writes protobuf messages without copying their tensors.
//
// A message of this project has a few small fields and some large `bytes` fields. The generated
// class would copy the large fields into strings, and a hostile message of many tiny submessages
// would grow by an order of magnitude. So SplitMessage collects the small fields, up to a limit,
// for the generated class to parse, and records only the position of each large field. After
// validation, CopyField copies a tensor once, to its destination. The result equals that of the
// generated parser for any order of fields, any split into slices, repeated fields (the last one
// counts) and unknown fields.
#ifndef FLASHCORE_PROTO_WIRE_MESSAGE_H_
#define FLASHCORE_PROTO_WIRE_MESSAGE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "google/protobuf/io/zero_copy_stream.h"

namespace flashcore::wire {

// A serialized message, in one piece of memory or in several, such as a transport's slices
// (proto/grpc/message_view.h). They outlive it.
class MessageView {
 public:
  using Reader = absl::FunctionRef<void(google::protobuf::io::ZeroCopyInputStream* stream)>;
  // Calls `reader` once, with a stream of the `size` bytes that `message` has.
  using Opener = void (*)(const void* message, size_t size, Reader reader);

  explicit MessageView(absl::string_view bytes);
  MessageView(const void* message, size_t size, Opener opener)
      : message_(message), size_(size), opener_(opener) {}

  size_t size() const { return size_; }
  // Calls `reader` once, with a stream of all bytes.
  void Read(Reader reader) const { opener_(message_, size_, reader); }

 private:
  const void* message_;
  size_t size_;
  Opener opener_;
};

// The position of one `bytes` field in its message.
struct LargeField {
  int number = 0;     // field number, set by the caller of SplitMessage
  size_t offset = 0;  // of the first payload byte, in the serialized message
  size_t size = 0;    // payload bytes; 0 if the field is absent
};

// Finds the fields `large` in `message` and copies all other fields, still encoded, to `*small`.
// INVALID_ARGUMENT if the message is not well-formed or if the other fields take more than
// `max_small_bytes`. Unknown groups are checked and become empty ones.
absl::Status SplitMessage(const MessageView& message, size_t max_small_bytes,
                          absl::Span<LargeField> large, std::string* small);

// Copies the payload of `field`, found by SplitMessage in `message`, to `destination`, which has
// room for field.size bytes.
void CopyField(const MessageView& message, const LargeField& field, void* destination);

// Tag and length of a `bytes` field: what precedes its payload.
std::string FieldHeader(int number, size_t payload_bytes);

}  // namespace flashcore::wire

#endif  // FLASHCORE_PROTO_WIRE_MESSAGE_H_
