#include "client/cpp/local/ring_request.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/answer.h"
#include "client/cpp/local/convert.h"
#include "google/protobuf/io/coded_stream.h"
#include "proto/wire/fields.h"

namespace flashcore::client::local {
namespace {

constexpr size_t kMaxAnswerBytes = 1024;  // without sequence_lengths, with a status message
constexpr size_t kVarintBytes = 10;

size_t Align(size_t bytes) {
  return (bytes + BlockPool::kAlignment - 1) / BlockPool::kAlignment * BlockPool::kAlignment;
}

absl::Status Elsewhere(const char* tensor) {
  return absl::InvalidArgumentError(
      absl::StrCat(tensor,
                   ": a request on a CUDA stream uses it in place; want it at a multiple "
                   "of 16 bytes in DeviceMemory, or in SharedMemory, of this client"));
}

}  // namespace

absl::Status RingRequest::Prepare(const AttendRequest& request, const RegionTable& regions,
                                  BlockPool* pool, SteadyTime deadline) {
  message_.Clear();
  SetSmallFields(request, &message_);
  SetDestination(request, &destination_);
  copies_ = {};

  struct Tensor {
    const char* name;
    const void* data;
    size_t bytes;
    std::byte** copy;
    int field;  // of its MemoryRange in the message
    bool to_write;
    bool registered;
  };
  Tensor tensors[] = {{"query", request.query.data(), request.query.size(), &copies_.query,
                       v1::AttendRequest::kQueryRangeFieldNumber, false, false},
                      {"key", request.key.data(), request.key.size(), &copies_.key,
                       v1::AttendRequest::kKeyRangeFieldNumber, false, false},
                      {"value", request.value.data(), request.value.size(), &copies_.value,
                       v1::AttendRequest::kValueRangeFieldNumber, false, false},
                      {"output", request.output.data(), request.output.size(), &copies_.output,
                       v1::AttendRequest::kOutputRangeFieldNumber, true, false},
                      {"lse", request.lse.data(), request.lse.size() * sizeof(float), &copies_.lse,
                       v1::AttendRequest::kLseRangeFieldNumber, true, false}};
  ranges_.clear();
  size_t block_bytes = 0;
  for (Tensor& tensor : tensors) {
    const absl::StatusOr<bool> found =
        regions.Find(tensor.name, tensor.data, tensor.bytes, tensor.to_write, &range_);
    if (!found.ok()) return found.status();
    if (*found) AddRange(tensor.field, range_.region_id(), range_.offset(), tensor.bytes);
    tensor.registered = *found || tensor.bytes == 0;
    if (tensor.registered) continue;
    if (pool == nullptr) return Elsewhere(tensor.name);
    block_bytes += Align(tensor.bytes);
  }
  if (block_bytes > 0) {
    const Status status = pool->Allocate(block_bytes, deadline, &block_);
    if (!status.ok()) return ToAbsl(status);
  }
  size_t offset = 0;
  for (const Tensor& tensor : tensors) {
    if (tensor.registered) continue;
    AddRange(tensor.field, block_.region_id(), block_.offset() + offset, tensor.bytes);
    *tensor.copy = block_.data() + offset;
    if (!tensor.to_write) std::memcpy(*tensor.copy, tensor.data, tensor.bytes);
    offset += Align(tensor.bytes);
  }
  small_bytes_ = message_.ByteSizeLong();
  return absl::OkStatus();
}

// By hand, because the generated class allocates each MemoryRange anew.
void RingRequest::AddRange(int field, const std::string& region_id, uint64_t offset,
                           uint64_t bytes) {
  using google::protobuf::io::CodedOutputStream;
  constexpr uint32_t kRegionId =
      wire::MakeTag(v1::MemoryRange::kRegionIdFieldNumber, wire::kLengthDelimited);
  constexpr uint32_t kOffset = wire::MakeTag(v1::MemoryRange::kOffsetFieldNumber, wire::kVarint);
  constexpr uint32_t kBytes = wire::MakeTag(v1::MemoryRange::kBytesFieldNumber, wire::kVarint);
  uint8_t encoded[64];
  const size_t offset_bytes = offset == 0 ? 0 : 1 + CodedOutputStream::VarintSize64(offset);
  const size_t size =
      2 + region_id.size() + offset_bytes + 1 + CodedOutputStream::VarintSize64(bytes);
  uint8_t* end = CodedOutputStream::WriteVarint32ToArray(
      wire::MakeTag(field, wire::kLengthDelimited), encoded);
  end = CodedOutputStream::WriteVarint32ToArray(static_cast<uint32_t>(size), end);
  *end++ = kRegionId;
  end = CodedOutputStream::WriteVarint32ToArray(static_cast<uint32_t>(region_id.size()), end);
  ranges_.append(encoded, end);
  ranges_.append(region_id);
  end = encoded;
  if (offset != 0) {
    *end++ = kOffset;
    end = CodedOutputStream::WriteVarint64ToArray(offset, end);
  }
  *end++ = kBytes;
  end = CodedOutputStream::WriteVarint64ToArray(bytes, end);
  ranges_.append(encoded, end);
}

size_t RingRequest::MaxAnswerBytes() const {
  return kMaxAnswerBytes + message_.request_id().size() +
         kVarintBytes * destination_.sequence_lengths.size();
}

void RingRequest::Serialize(std::byte* to) const {
  // The sizes of the submessages are those that ByteSizeLong has cached in Prepare.
  uint8_t* const end = message_.SerializeWithCachedSizesToArray(reinterpret_cast<uint8_t*>(to));
  std::memcpy(end, ranges_.data(), ranges_.size());
}

std::string RingRequest::Serialized() const {
  std::string message(Bytes(), '\0');
  Serialize(reinterpret_cast<std::byte*>(message.data()));
  return message;
}

absl::Status RingRequest::Take(absl::Span<const std::byte> answer, AttendResult* result) {
  if (!answer_.ParseFromArray(answer.data(), static_cast<int>(answer.size()))) {
    return absl::InternalError("reply: not an AttendResponse");
  }
  SetResult(answer_, result);
  result->response_bytes = answer.size();
  if (answer_.status().code() != 0) {
    return FromMessage(answer_.status());
  }
  if (!answer_.output().empty() || !answer_.lse().empty()) {
    return absl::InternalError("reply: tensors in the message, and not in their ranges");
  }
  absl::Status status =
      CheckSequenceLengths(result->sequence_lengths, destination_.sequence_lengths);
  if (!status.ok()) return status;
  if (copies_.output != nullptr) {
    std::memcpy(destination_.output.data(), copies_.output, destination_.output.size());
  }
  if (copies_.lse != nullptr) {
    std::memcpy(destination_.lse.data(), copies_.lse, destination_.lse.size() * sizeof(float));
  }
  return absl::OkStatus();
}

void RingRequest::UseCopies(AttendRequest* request) const {
  if (copies_.query != nullptr) request->query = {copies_.query, request->query.size()};
  if (copies_.key != nullptr) request->key = {copies_.key, request->key.size()};
  if (copies_.value != nullptr) request->value = {copies_.value, request->value.size()};
}

}  // namespace flashcore::client::local
