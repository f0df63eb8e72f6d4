// The requests of another workload, with tensors that lie in memory shared with the server.
#ifndef FLASHCORE_CLIENT_CLI_SHARED_WORKLOAD_H_
#define FLASHCORE_CLIENT_CLI_SHARED_WORKLOAD_H_

#include <memory>
#include <utility>

#include "client/cli/workload.h"
#include "client/cpp/client.h"

namespace flashcore::cli {

// Prepare copies the tensors there, and Accept the results back, so neither copy is measured: a
// frontend would have its tensors there.
class SharedWorkload final : public Workload {
 public:
  SharedWorkload(Client* client, std::unique_ptr<Workload> workload)
      : client_(client), workload_(std::move(workload)) {}

  absl::Status Setup() override { return workload_->Setup(); }
  absl::Status Prepare() override;
  AttendRequest& request() override { return request_; }
  double RequestFlop() const override { return workload_->RequestFlop(); }
  bool Accept(const AttendResult& result) override;
  void OnError(const absl::Status& status) override { workload_->OnError(status); }
  absl::Status Teardown() override { return workload_->Teardown(); }

 private:
  Client* const client_;
  const std::unique_ptr<Workload> workload_;
  std::unique_ptr<SharedMemory> memory_;
  AttendRequest request_;  // over memory_
};

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_CLI_SHARED_WORKLOAD_H_
