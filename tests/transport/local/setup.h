// A server in this process with a local socket, and its raw clients.
#ifndef FLASHCORE_TESTS_TRANSPORT_LOCAL_SETUP_H_
#define FLASHCORE_TESTS_TRANSPORT_LOCAL_SETUP_H_

#include <sys/syscall.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/transport/gated_server.h"
#include "tests/transport/local/client.h"

namespace flashcore::server::testing {

inline constexpr size_t kPage = 4096;

class LocalServerTest : public GatedServerTest {
 protected:
  static Server::Options LocalServerOptions() {
    static int number = 0;
    Server::Options options = ServerOptions();
    options.local_listen =
        absl::StrCat(::testing::TempDir(), "local-", getpid(), "-", ++number, ".sock");
    options.shared_memory.total_bytes = 64 << 20;
    options.unsent_replies.timeout = std::chrono::seconds(60);
    return options;
  }
  void StartLocal(const Server::Options& options = LocalServerOptions(),
                  const Engine::Options& engine = {}) {
    path_ = options.local_listen;
    StartFake(engine, options);
  }

  // A client that has said Hello.
  std::unique_ptr<LocalClient> Greeted() const {
    auto client = std::make_unique<LocalClient>(path_);
    EXPECT_EQ(client->Hello(), absl::OkStatus());
    return client;
  }

  // The same, of another user of this host, which only root can be. The socket is open to all.
  std::unique_ptr<LocalClient> GreetedAs(uid_t user) const {
    std::unique_ptr<LocalClient> client;
    std::thread([&] {
      // The system call, unlike seteuid, is for this thread alone.
      EXPECT_EQ(syscall(SYS_setresuid, -1, user, -1), 0);
      client = Greeted();
    }).join();
    return client;
  }

  // A client with a region, and a ring at its start. Tensors lie behind it.
  struct Lane {
    explicit Lane(const std::string& path, uint32_t slots = 8, uint32_t slot_bytes = 1024)
        : client(path), memory(64 * kPage) {
      absl::Status status = client.Hello();
      status.Update(client.Register(memory.fd(), memory.bytes(), &region));
      status.Update(ring.Open(&client, memory, region, 0, slots, slot_bytes));
      EXPECT_EQ(status, absl::OkStatus());
    }

    std::string Create() {
      v1::CreateSequenceResponse response;
      EXPECT_EQ(client.Call("CreateSequence", CreateRequest(), &response), absl::OkStatus());
      return response.sequence_id();
    }
    // One query row and one row to append; tensors at kTensors, O at kOutput.
    v1::AttendRequest Step(const std::string& sequence) const {
      v1::AttendRequest request = StepRequest({sequence});
      request.clear_query();
      request.clear_key();
      request.clear_value();
      const auto place = [&](v1::MemoryRange* range, uint64_t offset) {
        range->set_region_id(region);
        range->set_offset(offset);
        range->set_bytes(kRowBytes);
      };
      place(request.mutable_query_range(), kTensors);
      place(request.mutable_key_range(), kTensors + kRowBytes);
      place(request.mutable_value_range(), kTensors + 2 * kRowBytes);
      place(request.mutable_output_range(), kOutputs);
      return request;
    }
    // Sends one request and receives its answer.
    absl::Status Attend(const v1::AttendRequest& request, v1::AttendResponse* response) {
      uint64_t tag = 0;
      ring.Submit(++last_tag, request);
      if (!ring.Receive(&tag, response)) return absl::InternalError("no answer came");
      EXPECT_EQ(tag, last_tag);
      return absl::Status(static_cast<absl::StatusCode>(response->status().code()),
                          response->status().message());
    }
    absl::Status Attend(const v1::AttendRequest& request) {
      v1::AttendResponse ignored;
      return Attend(request, &ignored);
    }

    static constexpr uint64_t kTensors = 32 * kPage;
    static constexpr uint64_t kOutputs = 48 * kPage;
    LocalClient client;
    Memfd memory;
    std::string region;
    ClientRing ring;
    uint64_t last_tag = 0;
  };

  static v1::LocalRequest CallOf(const char* method, const google::protobuf::Message& request) {
    v1::LocalRequest call;
    call.mutable_call()->set_method(method);
    call.mutable_call()->set_message(request.SerializeAsString());
    return call;
  }

  // The message of the reply without an id, which is an error and the last of the connection.
  static std::string LastWords(LocalClient* client) {
    const auto reply = client->Receive();
    EXPECT_TRUE(reply.has_value());
    if (!reply.has_value()) return "";
    EXPECT_EQ(reply->id(), 0);
    EXPECT_NE(reply->status().code(), 0);
    EXPECT_FALSE(client->Receive().has_value());
    return reply->status().message();
  }

  // The server still serves another client.
  void ExpectAlive() const {
    Lane other(path_);
    EXPECT_EQ(other.Attend(other.Step(other.Create())), absl::OkStatus());
  }

  // Connections that were refused or cut off for this reason.
  double Refused(const std::string& reason) const {
    return CounterOf(*metrics_, "flashcore_local_connections_refused_total", reason);
  }

  bool AllConnectionsEnd() const {
    return WaitUntil([&] { return metrics_->local_connections.Value() == 0; }) &&
           WaitUntil([&] { return metrics_->local_rings.Value() == 0; }) &&
           WaitUntil([&] { return metrics_->shared_memory_regions.Value() == 0; });
  }

  std::string path_;
};

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_TRANSPORT_LOCAL_SETUP_H_
