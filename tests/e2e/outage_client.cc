// outage_client TARGET [once] [lease]: makes the calls that its input names, one a line: "CALL
// SECONDS", of which the second is its deadline. Prints for each the name of its status code, and
// its message. once: without retries. lease: with ClientOptions::lease.
#include <cstdio>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "flashcore/client.h"

namespace flashcore {
namespace {

class Caller {
 public:
  explicit Caller(Client* client) : client_(client), zeros_(2 * kHeadDim), output_(2 * kHeadDim) {
    request_.spans = {{1, 1}};
    request_.num_heads = request_.num_kv_heads = 1;
    request_.head_dim = kHeadDim;
    request_.request_id = "1";
    request_.query = request_.key = request_.value = zeros_;
    request_.output = absl::MakeSpan(output_);
  }

  absl::Status Call(const std::string& name, const CallOptions& call) {
    if (name == "info") return client_->GetServerInfo(call).status();
    if (name == "health") return client_->CheckHealth("", call).status();
    if (name == "attend") return client_->Attend(request_, nullptr, call);
    if (name == "async") return Async(call);
    if (name == "stream") return Stream(call);
    if (name == "manage") return Manage(call);
    if (name == "create") return Create(call);
    if (name == "append") return sequence_->Append(0, zeros_, zeros_, {}, {}, call).status();
    return absl::UnimplementedError(name);
  }

 private:
  static constexpr uint32_t kHeadDim = 32;

  static SequenceOptions Shape() {
    SequenceOptions options;
    options.num_kv_heads = 1;
    options.head_dim = kHeadDim;
    return options;
  }

  absl::Status Async(const CallOptions& call) {
    absl::Status status;
    absl::Notification done;
    client_->AttendAsync(
        request_,
        [&](absl::Status answer, const AttendResult&) {
          status = std::move(answer);
          done.Notify();
        },
        call);
    done.WaitForNotification();
    return status;
  }

  absl::Status Stream(const CallOptions& call) {
    StreamOptions options;
    options.deadline = *call.deadline;
    const auto stream = client_->OpenStream(options);
    if (absl::Status status = stream->Send(request_); !status.ok()) return status;
    AttendStream::Answer answer;
    return stream->Receive(&answer) ? answer.status : absl::InternalError("no answer");
  }

  absl::Status Manage(const CallOptions& call) {
    const auto results = client_->ManageSequences({SequenceOperation::Create(Shape())}, call);
    return results.ok() ? results->front().sequence.status() : results.status();
  }

  absl::Status Create(const CallOptions& call) {
    absl::StatusOr<Sequence> made = client_->CreateSequence(Shape(), call);
    if (!made.ok()) return made.status();
    sequence_ = *std::move(made);
    return absl::OkStatus();
  }

  Client* const client_;
  AttendRequest request_;
  const std::vector<std::byte> zeros_;
  std::vector<std::byte> output_;
  std::optional<Sequence> sequence_;
};

int Run(int argc, char** argv) {
  ClientOptions options;
  for (int i = 2; i < argc; ++i) {
    if (std::string(argv[i]) == "once") options.retry.max_attempts = 1;
    if (std::string(argv[i]) == "lease") options.lease = true;
  }
  const auto client = Client::Create(argv[1], options);
  if (!client.ok()) return 2;
  Caller caller(client->get());
  std::string name;
  double seconds = 0;
  while (std::cin >> name >> seconds) {
    const absl::Status status = caller.Call(name, {absl::Now() + absl::Seconds(seconds), ""});
    std::printf("%s %s\n", absl::StatusCodeToString(status.code()).c_str(),
                std::string(status.message()).c_str());
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace flashcore

int main(int argc, char** argv) { return argc >= 2 ? flashcore::Run(argc, argv) : 2; }
