// A raw client of the local socket, of proto/wire/ alone: tests can break each rule with it.
#ifndef FLASHCORE_TESTS_TRANSPORT_LOCAL_CLIENT_H_
#define FLASHCORE_TESTS_TRANSPORT_LOCAL_CLIENT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "flashcore/v1/attention.pb.h"
#include "flashcore/v1/local.pb.h"
#include "proto/wire/ring.h"
#include "server/base/socket.h"
#include "tests/memory/memfd.h"

namespace flashcore::server::testing {

class LocalClient {
 public:
  // Connects; says nothing yet.
  explicit LocalClient(const std::string& path);

  bool connected() const { return socket_.valid(); }
  int fd() const { return socket_.get(); }

  // False: the server has ended the connection.
  bool SendBytes(const std::string& bytes, int file = -1);
  bool Send(const v1::LocalRequest& request, int file = -1);
  // The next reply, and the file descriptor that came with it. Nullopt: the connection has ended.
  std::optional<v1::LocalReply> Receive();
  FileDescriptor TakeFile() { return std::move(file_); }

  // Sends the request with the next id and waits for its reply. UNAVAILABLE: the connection ended.
  absl::Status Do(v1::LocalRequest request, v1::LocalReply* reply = nullptr, int file = -1);
  absl::Status Hello();
  // Returns the region's id in `*id`.
  absl::Status Register(int file, uint64_t bytes, std::string* id, bool read_only = false);
  absl::Status Unregister(const std::string& id);
  absl::Status Call(const std::string& method, const google::protobuf::Message& request,
                    google::protobuf::Message* response);

  uint64_t NextId() { return ++last_id_; }

 private:
  std::optional<std::string> ReceiveBytes(size_t size);

  FileDescriptor socket_;
  FileDescriptor file_;
  uint64_t last_id_ = 0;
};

// The client's end of a ring. It checks nothing, so that a test may break the counters.
class ClientRing {
 public:
  // Opens it in `memory`, at `offset`, which is registered as `region_id`.
  absl::Status Open(LocalClient* client, const Memfd& memory, const std::string& region_id,
                    uint64_t offset, uint32_t slots, uint32_t slot_bytes);

  void Write(uint64_t tag, const std::string& message, uint64_t timeout_ns = 0);
  void Ring() const;  // the doorbell, if the server sleeps
  void Submit(uint64_t tag, const std::string& message, uint64_t timeout_ns = 0) {
    Write(tag, message, timeout_ns);
    Ring();
  }
  void Submit(uint64_t tag, const v1::AttendRequest& request, uint64_t timeout_ns = 0) {
    Submit(tag, request.SerializeAsString(), timeout_ns);
  }
  // Waits for the next answer, asleep. False: none came in a long time.
  bool Receive(uint64_t* tag, v1::AttendResponse* response);
  bool HasAnswer() const;

  wire::RingHeader* header() const { return header_; }
  uint32_t number() const { return number_; }
  int doorbell() const { return doorbell_.get(); }
  std::byte* SubmissionSlot(uint64_t number) const;

 private:
  wire::RingHeader* header_ = nullptr;
  std::byte* slots_begin_ = nullptr;
  uint32_t slots_ = 0;
  uint32_t slot_bytes_ = 0;
  uint32_t number_ = 0;
  FileDescriptor doorbell_;
  uint64_t submitted_ = 0;
  uint64_t received_ = 0;
};

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_TRANSPORT_LOCAL_CLIENT_H_
