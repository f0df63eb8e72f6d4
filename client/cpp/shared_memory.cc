#include "flashcore/shared_memory.h"

#include <utility>

#include "absl/memory/memory.h"
#include "client/cpp/connection.h"
#include "client/cpp/local/link.h"

namespace flashcore {

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Create(
    std::shared_ptr<const client::Connection> connection, size_t bytes,
    const SharedMemoryOptions& options, const CallOptions& call) {
  if (absl::Status status = connection->CheckProcess(); !status.ok()) return status;
  if (bytes == 0) return absl::InvalidArgumentError("bytes: 0; want at least 1");
  if (connection->local() == nullptr) {
    return absl::UnimplementedError(
        "shared memory needs a local: target, of a server with --local_listen");
  }
  auto region = std::make_shared<client::local::Memory>();
  absl::Status status = client::local::ToAbsl(client::local::Memory::Create(bytes, region.get()));
  if (!status.ok()) return status;
  status = connection->local()->Add(region, options.inputs_only,
                                    client::local::ToSteady(connection->Deadline(call)));
  if (!status.ok()) return status;
  return absl::WrapUnique(new SharedMemory(std::move(connection), std::move(region), bytes));
}

SharedMemory::SharedMemory(std::shared_ptr<const client::Connection> connection,
                           std::shared_ptr<client::local::Memory> region, size_t bytes)
    : connection_(std::move(connection)), region_(std::move(region)), bytes_(bytes) {}

SharedMemory::~SharedMemory() {
  if (connection_->OfThisProcess()) connection_->local()->Remove(region_.get());
}

std::byte* SharedMemory::data() const { return region_->data(); }

bool SharedMemory::registered() const {
  return connection_->OfThisProcess() && connection_->local()->Registered(region_.get());
}

}  // namespace flashcore
