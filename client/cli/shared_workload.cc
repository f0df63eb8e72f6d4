#include "client/cli/shared_workload.h"

#include <algorithm>
#include <type_traits>

namespace flashcore::cli {
namespace {

constexpr size_t kAlignment = 64;

template <class T>
size_t Bytes(absl::Span<T> tensor) {
  return (tensor.size() * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
}

// Copies `from` to `*at`, which then points behind it.
template <class T>
absl::Span<T> Place(absl::Span<T> from, std::byte** at) {
  auto* const to = reinterpret_cast<std::remove_const_t<T>*>(*at);
  std::copy(from.begin(), from.end(), to);
  *at += Bytes(from);
  return {to, from.size()};
}

}  // namespace

absl::Status SharedWorkload::Prepare() {
  if (absl::Status status = workload_->Prepare(); !status.ok()) return status;
  const AttendRequest& from = workload_->request();
  const size_t bytes = Bytes(from.query) + Bytes(from.key) + Bytes(from.value) +
                       Bytes(from.output) + Bytes(from.lse);
  if (memory_ == nullptr || !memory_->registered() || memory_->bytes() < bytes) {
    memory_.reset();
    absl::StatusOr<std::unique_ptr<SharedMemory>> memory = client_->CreateSharedMemory(bytes);
    if (!memory.ok()) return memory.status();
    memory_ = *std::move(memory);
  }
  request_ = from;
  std::byte* at = memory_->data();
  request_.query = Place(from.query, &at);
  request_.key = Place(from.key, &at);
  request_.value = Place(from.value, &at);
  request_.output = Place(from.output, &at);
  request_.lse = Place(from.lse, &at);
  return absl::OkStatus();
}

bool SharedWorkload::Accept(const AttendResult& result) {
  const AttendRequest& to = workload_->request();
  std::copy(request_.output.begin(), request_.output.end(), to.output.begin());
  std::copy(request_.lse.begin(), request_.lse.end(), to.lse.begin());
  return workload_->Accept(result);
}

}  // namespace flashcore::cli
