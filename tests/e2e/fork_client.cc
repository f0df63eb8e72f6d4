// fork_client cpp TARGET | fork_client c TARGET: a client in a process that forks. In each child
// every call is refused, by name; then the child leaves in one of several ways. The parent's calls
// go on being right, also while other threads of it call. Says on stderr what was wrong, and then
// fails.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "flashcore/c.h"
#include "flashcore/client.h"

namespace flashcore {
namespace {

constexpr unsigned kPatience = 60;  // seconds, after which a child that hangs is ended

// Prints what is wrong.
bool Check(bool right, const std::string& what) {
  if (!right) std::fprintf(stderr, "process %d: %s\n", getpid(), what.c_str());
  return right;
}

// Whether `child` returns true in a forked child, which then ends by `leave`.
bool InChild(const std::function<bool()>& child, void (*leave)(int)) {
  const pid_t pid = fork();
  if (pid == 0) {
    alarm(kPatience);
    leave(child() ? 0 : 1);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  return Check(WIFEXITED(status) && WEXITSTATUS(status) == 0,
               absl::StrCat("its child ended with status ", status));
}

// Whether `status` is that of a client of this process's parent.
bool Refused(const std::string& call, const absl::Status& status) {
  const std::string words =
      absl::StrCat("belongs to process ", getppid(), ", from which process ", getpid());
  return Check(absl::IsFailedPrecondition(status) && absl::StrContains(status.message(), words),
               absl::StrCat(call, ": ", status.ToString()));
}

bool Ok(const std::string& call, const absl::Status& status) {
  return Check(status.ok(), absl::StrCat(call, ": ", status.ToString()));
}

// A request with one row of K/V: its output is V.
class OneRow {
 public:
  OneRow() {
    request.spans = {{1, 1}};
    request.num_heads = request.num_kv_heads = 1;
    request.head_dim = 32;
    request.request_id = "1";
    request.query = request.key = request.value = row;
    request.output = absl::MakeSpan(output);
  }
  bool right() const { return output == row; }

  AttendRequest request;
  const std::vector<std::byte> row = std::vector<std::byte>(64, std::byte{0x3c});
  std::vector<std::byte> output = std::vector<std::byte>(64);
};

// A client with all that it can have.
class Parent {
 public:
  explicit Parent(const std::string& target) : target_(target) {
    ClientOptions options;
    options.lease = true;
    client_ = *Client::Create(target, options);
    sequence_ = std::make_unique<Sequence>(*client_->CreateSequence(Shape()));
    stream_ = client_->OpenStream();
    if (local()) memory_ = *client_->CreateSharedMemory(4096);
  }

  bool local() const { return absl::StartsWith(target_, "local:"); }

  // Every call works.
  bool Works() {
    const auto info = sequence_->Info();
    const auto listed = client_->ListSequences();
    return Ok("Info", info.status()) && Ok("ListSequences", listed.status()) &&
           Check(listed->size() == 1, "the lease was lost") &&
           Check(info->layer_lengths(0) == 0, "a child has appended") &&
           Check(!local() || memory_->registered(), "a child has unregistered memory") &&
           Attends() && Ok("AttendAsync", AttendAsync()) && Ok("stream", SendAndReceive());
  }

  bool Attends() {
    OneRow one;
    return Ok("Attend", client_->Attend(one.request, nullptr)) &&
           Check(one.right(), "Attend: wrong output");
  }

  // In a child: every call is refused.
  bool Refuses() {
    bool all = true;
    const auto refused = [&all](const std::string& call, const absl::Status& status) {
      all = Refused(call, status) && all;
    };
    OneRow one;
    refused("Attend", client_->Attend(one.request, nullptr));
    // Before AttendAsync returns. A Notification would take locks of Abseil.
    absl::Status async;
    client_->AttendAsync(one.request,
                         [&](const absl::Status& answer, const AttendResult&) { async = answer; });
    refused("AttendAsync", async);
    refused("CreateSharedMemory", client_->CreateSharedMemory(1).status());
    refused("OpenStream, Send", client_->OpenStream()->Send(one.request));
    refused("OpenStream, Finish", client_->OpenStream()->Finish());
    refused("GetServerInfo", client_->GetServerInfo().status());
    refused("CreateSequence", client_->CreateSequence(Shape()).status());
    refused("OpenSequence", client_->OpenSequence(sequence_->id()).status());
    refused("ListSequences", client_->ListSequences().status());
    const SequenceOperation drop = SequenceOperation::Delete(*sequence_);
    refused("ManageSequences", client_->ManageSequences({drop}).status());
    refused("CheckHealth", client_->CheckHealth().status());
    all = Check(!client_->WaitForConnected(absl::InfiniteFuture()), "WaitForConnected") && all;
    refused("Append", sequence_->Append(0, one.row, one.row, Layout::kNHD).status());
    refused("Sequence::Attend", sequence_->Attend(one.request, nullptr));
    refused("Fork", sequence_->Fork().status());
    refused("Truncate", sequence_->Truncate(0).status());
    refused("Delete", sequence_->Delete());
    refused("Info", sequence_->Info().status());
    sequence_->OnLost(nullptr);
    refused("Send", stream_->Send(one.request));
    refused("Send", stream_->Send(one.request, [](const absl::Status&, const AttendResult&) {}));
    AttendStream::Answer answer;
    all = Check(!stream_->Receive(&answer), "Receive") && all;
    refused("Finish", stream_->Finish());
    stream_->Cancel();
    call_.Cancel();
    return Check(!local() || !memory_->registered(), "registered") && all;
  }

  // In a child: destroys what it has of the parent's.
  bool Drop() {
    stream_.reset();
    memory_.reset();
    client_.reset();
    sequence_.reset();
    return true;
  }

  // In a child: a client of its own.
  bool ConnectsAnew() const {
    const auto own = Client::Create(target_);
    if (!local()) {
      return Check(absl::IsFailedPrecondition(own.status()) &&
                       absl::StrContains(own.status().message(), "which has used gRPC"),
                   absl::StrCat("Create: ", own.status().ToString()));
    }
    OneRow one;
    return Ok("Create", own.status()) && Ok("own", (*own)->Attend(one.request, nullptr)) &&
           Check(one.right(), "own Attend: wrong output");
  }

 private:
  static SequenceOptions Shape() {
    SequenceOptions options;
    options.num_kv_heads = 1;
    options.head_dim = 32;
    return options;
  }

  absl::Status AttendAsync() {
    OneRow one;
    absl::Status status;
    absl::Notification done;
    call_ = client_->AttendAsync(one.request, [&](const absl::Status& answer, const AttendResult&) {
      status = answer;
      done.Notify();
    });
    done.WaitForNotification();
    return status.ok() && !one.right() ? absl::DataLossError("wrong output") : status;
  }

  absl::Status SendAndReceive() {
    OneRow one;
    AttendStream::Answer answer;
    if (absl::Status status = stream_->Send(one.request); !status.ok()) return status;
    if (!stream_->Receive(&answer)) return absl::InternalError("no answer");
    return answer.status.ok() && !one.right() ? absl::DataLossError("wrong output") : answer.status;
  }

  const std::string target_;
  std::unique_ptr<Client> client_;
  std::unique_ptr<Sequence> sequence_;
  std::unique_ptr<AttendStream> stream_;
  std::unique_ptr<SharedMemory> memory_;
  CallHandle call_;
};

// Forks while other threads call.
bool ForkAmidCalls(Parent* parent) {
  std::atomic<bool> stop{false}, right{true};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      while (!stop) {
        if (!parent->Attends()) right = false;
      }
    });
  }
  for (int i = 0; i < 5; ++i) {
    if (!InChild([&] { return parent->Refuses() && parent->Drop(); }, exit)) right = false;
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  return right;
}

bool ForkWithCppClient(const std::string& target) {
  static Parent parent(target);  // its destructor runs at exit, in children, too
  return parent.Works() && InChild([] { return parent.Refuses(); }, _exit) && parent.Works() &&
         InChild([] { return parent.Refuses(); }, exit) && parent.Works() &&
         InChild([] { return parent.Drop(); }, _exit) && parent.Works() &&
         InChild([] { return parent.ConnectsAnew(); }, _exit) && parent.Works() &&
         InChild([] { return InChild([] { return parent.Drop(); }, exit); }, exit) &&
         parent.Works() && ForkAmidCalls(&parent) && parent.Works();
}

// The C library.

bool CWorks(flashcore_client* client, bool by_event) {
  static uint64_t tag = 0;
  flashcore_bytes info = {};
  constexpr int64_t kForever = -1;
  const int called = flashcore_call(client, "GetServerInfo", nullptr, 0, kForever, &info);
  flashcore_free(&info);
  if (!Check(called == FLASHCORE_OK, flashcore_last_error())) return false;
  // An empty request, whose answer says so.
  if (flashcore_submit(client, ++tag, nullptr, 0, kForever) != FLASHCORE_OK) return false;
  flashcore_completion completion = {};
  int taken = FLASHCORE_AGAIN;
  while (taken == FLASHCORE_AGAIN) {
    taken = by_event ? flashcore_poll(client, &completion)
                     : flashcore_wait(client, kForever, &completion);
  }
  return Check(taken == FLASHCORE_OK && completion.tag == tag, "the ring is not right");
}

bool CRefuses(flashcore_client* client, const flashcore_memory& memory) {
  bool all = true;
  const auto refused = [&all](const char* call, int code) {
    const absl::Status status(static_cast<absl::StatusCode>(std::max(code, 0)),
                              flashcore_last_error());
    all = Refused(call, status) && all;
  };
  flashcore_memory made = {};
  flashcore_bytes response = {};
  flashcore_completion completion = {};
  int fd = -1;
  refused("register_memory", flashcore_register_memory(client, 1, 0, -1, &made));
  refused("unregister_memory", flashcore_unregister_memory(client, memory.region_id));
  refused("call", flashcore_call(client, "GetServerInfo", nullptr, 0, -1, &response));
  refused("submit", flashcore_submit(client, 1, nullptr, 0, -1));
  refused("poll", flashcore_poll(client, &completion));
  refused("wait", flashcore_wait(client, -1, &completion));
  refused("event_fd", flashcore_event_fd(client, &fd));
  refused("cancel", flashcore_cancel(client, 1));
  all = Check(flashcore_ended(client) == 1, "ended") && all;
  flashcore_shutdown(client);
  return all;
}

bool ForkWithCClient(const std::string& target) {
  flashcore_client* client = nullptr;
  flashcore_memory memory = {};
  if (flashcore_connect(target.c_str(), "fork", nullptr, &client) != FLASHCORE_OK ||
      flashcore_register_memory(client, 1, 0, -1, &memory) != FLASHCORE_OK) {
    return Check(false, flashcore_last_error());
  }
  const auto use = [&] { return CRefuses(client, memory); };
  const auto use_and_close = [&] {
    const bool refused = CRefuses(client, memory);
    flashcore_close(client);
    return refused;
  };
  const auto connect_anew = [&] {
    flashcore_client* own = nullptr;
    if (flashcore_connect(target.c_str(), "own", nullptr, &own) != FLASHCORE_OK) return false;
    const bool right = CWorks(own, /*by_event=*/false);
    flashcore_close(own);
    return right;
  };
  bool right = true;
  for (const bool by_event : {false, true}) {
    int fd = -1;
    if (by_event) right = flashcore_event_fd(client, &fd) == FLASHCORE_OK && right;
    right = right && CWorks(client, by_event) && InChild(use, _exit) && CWorks(client, by_event) &&
            InChild(use_and_close, exit) && CWorks(client, by_event) &&
            InChild(connect_anew, exit) && CWorks(client, by_event);
  }
  right = right && Check(flashcore_unregister_memory(client, memory.region_id) == FLASHCORE_OK,
                         "a child has unregistered memory");
  flashcore_close(client);
  return right;
}

int Main(const std::vector<std::string>& args) {
  const bool right = args[0] == "c" ? ForkWithCClient(args[1]) : ForkWithCppClient(args[1]);
  return right ? 0 : 1;
}

}  // namespace
}  // namespace flashcore

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  return flashcore::Main({argv + 1, argv + argc});
}
