#include "flashcore/shared_memory.h"

#include <utility>

#include "absl/memory/memory.h"
#include "client/cpp/connection.h"
#include "client/cpp/transport.h"

namespace flashcore {

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Create(
    std::shared_ptr<const client::Connection> connection, size_t bytes,
    const SharedMemoryOptions& options, const CallOptions& call) {
  if (absl::Status status = connection->CheckProcess(); !status.ok()) return status;
  if (bytes == 0) return absl::InvalidArgumentError("bytes: 0; want at least 1");
  absl::StatusOr<std::shared_ptr<client::local::Memory>> memory =
      connection->transport().CreateMemory(bytes, options.inputs_only,
                                           {connection->Deadline(call), call.affinity});
  if (!memory.ok()) return memory.status();
  return absl::WrapUnique(new SharedMemory(std::move(connection), *std::move(memory), bytes));
}

SharedMemory::SharedMemory(std::shared_ptr<const client::Connection> connection,
                           std::shared_ptr<client::local::Memory> memory, size_t bytes)
    : connection_(std::move(connection)), memory_(std::move(memory)), bytes_(bytes) {}

SharedMemory::~SharedMemory() {
  if (connection_->OfThisProcess()) connection_->transport().RemoveMemory(memory_.get());
}

std::byte* SharedMemory::data() const { return memory_->data(); }

bool SharedMemory::registered() const {
  return connection_->OfThisProcess() && connection_->transport().HasMemory(memory_.get());
}

}  // namespace flashcore
