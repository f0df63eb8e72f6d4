#include "server/transport/attend_call.h"

#include <utility>

#include "flashcore/v1/attention.pb.h"
#include "google/protobuf/arena.h"
#include "grpcpp/support/slice.h"
#include "proto/wire.h"
#include "server/transport/convert.h"

namespace flashcore::server {
namespace {

// A message without its tensors. With few spans, it needs no heap memory.
template <typename Message>
class SmallMessage {
 public:
  Message* operator->() { return message_; }
  Message& operator*() { return *message_; }

 private:
  alignas(8) char block_[2048];
  google::protobuf::Arena arena_{block_, sizeof(block_)};
  Message* const message_ = google::protobuf::Arena::CreateMessage<Message>(&arena_);
};

constexpr size_t kMaxHeaderBytes = 20;  // tag and length of a tensor field

}  // namespace

absl::Status ParseAttend(const grpc::ByteBuffer& message, const SharedMemory* memory,
                         AttendOperation* operation, TensorFields* tensors, bool* well_formed) {
  *well_formed = false;
  (*tensors)[kQuery].number = v1::AttendRequest::kQueryFieldNumber;
  (*tensors)[kKey].number = v1::AttendRequest::kKeyFieldNumber;
  (*tensors)[kValue].number = v1::AttendRequest::kValueFieldNumber;
  SmallMessage<v1::AttendRequest> parsed;
  absl::Status status = ParseMessage(message, absl::MakeSpan(*tensors), &*parsed);
  if (!status.ok()) return status;
  *well_formed = true;
  AttendRequest& request = operation->request;
  request.query_bytes = (*tensors)[kQuery].size;
  request.key_bytes = (*tensors)[kKey].size;
  request.value_bytes = (*tensors)[kValue].size;
  status = ToRequest(*parsed, &request);
  return status.ok() ? ToMemoryRanges(*parsed, memory, &request) : status;
}

grpc::ByteBuffer EncodeReply(AttendOperation* operation) {
  const AttendRequest& request = operation->request;
  SmallMessage<v1::AttendResponse> small;
  small->set_request_id(request.request_id);
  *small->mutable_timing() = ToTiming(operation->times);
  for (const uint64_t length : operation->sequence_lengths) small->add_sequence_lengths(length);
  grpc::Slice slices[4];
  size_t count = 0;
  std::string header;
  header.reserve(small->ByteSizeLong() + kMaxHeaderBytes);
  small->AppendToString(&header);
  const size_t lse_offset = operation->tensors.lse_offset();
  auto* memory = new StagingBuffer(operation->tensors.TakeResults());
  const grpc::Slice results(
      memory->data(), memory->capacity(),
      [](void* buffer) { delete static_cast<StagingBuffer*>(buffer); }, memory);
  const auto add = [&](int number, size_t offset, size_t bytes) {
    header += wire::FieldHeader(number, bytes);
    slices[count++] = grpc::Slice(header);
    slices[count++] = results.sub(offset, offset + bytes);
    header.clear();
  };
  if (request.ranges[kOutput].region == nullptr) {
    add(v1::AttendResponse::kOutputFieldNumber, 0, request.output_bytes());
  }
  if (request.return_lse && request.ranges[kLse].region == nullptr) {
    add(v1::AttendResponse::kLseFieldNumber, lse_offset, request.lse_bytes());
  }
  if (!header.empty()) slices[count++] = grpc::Slice(header);
  return grpc::ByteBuffer(slices, count);
}

grpc::ByteBuffer EncodeError(const std::string& request_id, const absl::Status& status) {
  v1::AttendResponse response;
  response.set_request_id(request_id);
  response.mutable_status()->set_code(static_cast<int>(status.code()));
  response.mutable_status()->set_message(std::string(status.message()));
  const grpc::Slice slice(response.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace flashcore::server
