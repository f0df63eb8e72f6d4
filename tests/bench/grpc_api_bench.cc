// gRPC's callback API against its completion queues, for a service that moves attention's tensors:
// the same raw echo on each, measured in turn by one client in one run.
//
// With --echo, one callback server is the baseline of other benchmarks: see MeasureLines.
//
// Each server is a process of its own, so that its threads and its memory are its own: callback
// servers and clients in one process would share gRPC's threads.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <malloc.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tests/bench/echo_servers.h"

ABSL_FLAG(int, rounds, 8, "Rounds over all cells; the servers take turns within each.");
ABSL_FLAG(double, seconds, 0.5, "Measured time of each cell in each round.");
ABSL_FLAG(int, connections, 1000, "Idle connections whose memory is measured; 0 for none.");

ABSL_FLAG(bool, handoff, false, "Answer from a thread of the service, not from gRPC's.");
ABSL_FLAG(bool, echo, false,
          "Print {\"ready\":true}, then for each line \"tcp|unix REQUEST_BYTES REPLY_BYTES "
          "SECONDS\" of standard input the latency of an echo, one at a time, in microseconds.");

namespace flashcore::bench {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// A server in a child process, which lives until this closes its pipe.
struct Child {
  std::string name;
  std::string unix_path;
  int port = 0;
  pid_t pid = 0;
  int control = -1;  // write end; the child ends when it reads the end of file
};

struct ServerKind {
  const char* name;
  int queues;         // 0: callback API
  bool keep_memory;   // see KeepFreedMemory
  bool keep_polling;  // see SelfCheck
};
constexpr ServerKind kServers[] = {
    {"callback, as is", 0, false, false},      {"1 queue, as is", 1, false, false},
    {"callback, kept memory", 0, true, false}, {"callback, kept memory and polling", 0, true, true},
    {"1 queue, kept memory", 1, true, false},  {"2 queues, kept memory", 2, true, false}};
constexpr size_t kBase = 3;  // what the ratios are to

// By default glibc gives the memory of a large message back to the system when the message is
// freed, and gets it again, page fault by page fault, for the next one; and it has an arena per
// thread, so memory that one thread frees is of no use to the next. Call before the first thread
// starts.
void KeepFreedMemory() {
  mallopt(M_ARENA_MAX, 1);
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most that glibc takes
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
}

[[noreturn]] void RunChild(const ServerKind& kind, const std::string& unix_path, int control,
                           int report) {
  if (kind.keep_memory) KeepFreedMemory();
  const EchoOptions options{unix_path, absl::GetFlag(FLAGS_handoff), kind.keep_polling};
  auto server =
      kind.queues == 0 ? StartCallbackServer(options) : StartQueueServer(options, kind.queues);
  const int port = server == nullptr ? 0 : server->port;
  if (write(report, &port, sizeof(port)) != sizeof(port) || port == 0) _exit(1);
  char byte;
  while (read(control, &byte, 1) > 0) {
  }
  server.reset();
  _exit(0);
}

// Call before this process uses gRPC, which does not survive a fork.
Child Spawn(const ServerKind& kind, const std::string& directory,
            const std::vector<Child>& others) {
  Child child;
  child.name = kind.name;
  child.unix_path = absl::StrCat(directory, "/", others.size(), ".sock");
  int control[2];
  int report[2];
  if (pipe(control) != 0 || pipe(report) != 0) std::abort();
  child.pid = fork();
  if (child.pid == 0) {
    close(control[1]);
    for (const Child& other : others) close(other.control);
    RunChild(kind, child.unix_path, control[0], report[1]);
  }
  close(control[0]);
  close(report[1]);
  child.control = control[1];
  if (read(report[0], &child.port, sizeof(child.port)) != sizeof(child.port) || child.port == 0) {
    std::fprintf(stderr, "server %s did not start\n", kind.name);
    std::exit(1);
  }
  close(report[0]);
  return child;
}

// A number of the file "status" in `directory`, /proc/PID or that of one of its threads.
long StatusField(const std::string& directory, const std::string& key) {
  std::ifstream status(directory + "/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.rfind(key + ":", 0) == 0) return std::atol(line.c_str() + key.size() + 1);
  }
  return -1;
}

// The CPU time that a server process has spent since it started.
struct ServerCost {
  double cpu_us = 0;    // all threads, user and system
  double switches = 0;  // times that a thread went to sleep

  ServerCost& operator+=(const ServerCost& other) {
    cpu_us += other.cpu_us;
    switches += other.switches;
    return *this;
  }
  ServerCost operator-(const ServerCost& other) const {
    return {cpu_us - other.cpu_us, switches - other.switches};
  }
};

ServerCost ReadCost(pid_t pid) {
  ServerCost cost;
  const std::string tasks = absl::StrCat("/proc/", pid, "/task");
  for (const auto& task : std::filesystem::directory_iterator(tasks)) {
    // schedstat: nanoseconds on a CPU, nanoseconds waiting for one, time slices.
    double cpu_ns = 0;
    std::ifstream(task.path() / "schedstat") >> cpu_ns;
    cost.cpu_us += cpu_ns / 1e3;
    cost.switches += static_cast<double>(StatusField(task.path(), "voluntary_ctxt_switches"));
  }
  return cost;
}

// "VmRSS" in kilobytes, "Threads".
long ProcessStatus(pid_t pid, const std::string& key) {
  return StatusField(absl::StrCat("/proc/", pid), key);
}

// One outstanding call of the client. Reused by its next call.
struct Slot {
  std::unique_ptr<grpc::ClientContext> context;
  std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader;
  grpc::ByteBuffer reply;
  grpc::Status status;
  Clock::time_point start;
};

struct Sizes {
  const char* name;
  size_t request_bytes;
  size_t reply_bytes;
};
constexpr Sizes kSmall = {"1 KB / 1 KB", 1024, 1024};
constexpr Sizes kLarge = {"1.5 MB / 0.5 MB", size_t{3} << 19, size_t{1} << 19};  // 1x8x512x64, FP16

struct Cell {
  bool unix_socket;
  Sizes sizes;
  int concurrency;
};

struct Result {
  std::vector<double> latency_us;    // of all rounds
  std::vector<double> round_p50_us;  // of each
  double seconds = 0;
  ServerCost cost;
};

// A closed loop: keeps `concurrency` calls in flight on one connection for `seconds`.
class Client {
 public:
  Client(const std::string& target, const Cell& cell)
      : stub_(grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), Arguments())),
        payload_(EchoRequest(cell.sizes.request_bytes, cell.sizes.reply_bytes)),
        reply_(cell.sizes.reply_bytes),
        slots_(cell.concurrency) {}

  ~Client() {
    queue_.Shutdown();
    void* tag;
    bool ok;
    while (queue_.Next(&tag, &ok)) {
    }
  }

  void Run(double seconds, Result* result) {
    std::vector<double> latencies;
    const auto begin = Clock::now();
    for (Slot& slot : slots_) Send(&slot);
    size_t flying = slots_.size();
    void* tag = nullptr;
    bool ok = false;
    while (flying > 0 && queue_.Next(&tag, &ok)) {
      auto* slot = static_cast<Slot*>(tag);
      Take(*slot);
      latencies.push_back(SecondsSince(slot->start) * 1e6);
      if (SecondsSince(begin) < seconds) {
        Send(slot);
      } else {
        --flying;
      }
    }
    if (result == nullptr) return;  // warming up
    result->seconds += SecondsSince(begin);
    result->latency_us.insert(result->latency_us.end(), latencies.begin(), latencies.end());
    std::nth_element(latencies.begin(), latencies.begin() + latencies.size() / 2, latencies.end());
    result->round_p50_us.push_back(latencies[latencies.size() / 2]);
  }

 private:
  static grpc::ChannelArguments Arguments() {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    return arguments;
  }

  void Send(Slot* slot) {
    slot->start = Clock::now();
    slot->context = std::make_unique<grpc::ClientContext>();
    slot->reply.Clear();
    const grpc::Slice slice(payload_.data(), payload_.size(), grpc::Slice::STATIC_SLICE);
    slot->reader = stub_.PrepareUnaryCall(slot->context.get(), kEchoMethod,
                                          grpc::ByteBuffer(&slice, 1), &queue_);
    slot->reader->StartCall();
    slot->reader->Finish(&slot->reply, &slot->status, slot);
  }

  // Copies the reply once, as the client of Attend does.
  void Take(const Slot& slot) {
    std::vector<grpc::Slice> slices;
    if (slot.status.ok() && slot.reply.Length() == reply_.size() && slot.reply.Dump(&slices).ok()) {
      uint8_t* end = reply_.data();
      for (const grpc::Slice& slice : slices) end = std::copy(slice.begin(), slice.end(), end);
      return;
    }
    std::fprintf(stderr, "call failed: %s (%zu reply bytes)\n", slot.status.error_message().c_str(),
                 slot.status.ok() ? slot.reply.Length() : 0);
    std::exit(1);
  }

  grpc::GenericStub stub_;
  const std::string payload_;
  std::vector<uint8_t> reply_;
  grpc::CompletionQueue queue_;
  std::vector<Slot> slots_;
};

std::string Target(const Child& child, bool unix_socket) {
  return unix_socket ? absl::StrCat("unix:", child.unix_path)
                     : absl::StrCat("127.0.0.1:", child.port);
}

double Percentile(std::vector<double>* values, double fraction) {
  const auto nth = static_cast<size_t>(fraction * static_cast<double>(values->size() - 1));
  std::nth_element(values->begin(), values->begin() + nth, values->end());
  return (*values)[nth];
}

void PrintRow(const Cell& cell, const std::string& server, Result* result, const Result& base,
              double base_p50) {
  const double p50 = Percentile(&result->latency_us, 0.50);
  const double p99 = Percentile(&result->latency_us, 0.99);
  const auto calls = static_cast<double>(result->latency_us.size());
  const double rate = calls / result->seconds;
  const double base_rate = static_cast<double>(base.latency_us.size()) / base.seconds;
  const auto [low, high] =
      std::minmax_element(result->round_p50_us.begin(), result->round_p50_us.end());
  absl::PrintF(
      "| %s | %s | %d | %s | %.0f | %.0f..%.0f | %.0f | %.0f | %.0f | %.1f | %.2f | %.2f |\n",
      cell.sizes.name, cell.unix_socket ? "unix" : "tcp", cell.concurrency, server, p50, *low,
      *high, p99, rate, result->cost.cpu_us / calls, result->cost.switches / calls, p50 / base_p50,
      rate / base_rate);
  std::fflush(stdout);
}

void MeasureCell(const std::vector<Child>& children, const Cell& cell) {
  std::vector<std::unique_ptr<Client>> clients;
  for (const Child& child : children) {
    clients.push_back(std::make_unique<Client>(Target(child, cell.unix_socket), cell));
    clients.back()->Run(0.2, nullptr);
  }
  std::vector<Result> results(children.size());
  for (int round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
    for (size_t i = 0; i < children.size(); ++i) {
      const size_t turn = (i + round) % children.size();  // no server is always first
      const ServerCost before = ReadCost(children[turn].pid);
      clients[turn]->Run(absl::GetFlag(FLAGS_seconds), &results[turn]);
      results[turn].cost += ReadCost(children[turn].pid) - before;
    }
  }
  const double base_p50 = Percentile(&results[kBase].latency_us, 0.50);
  for (size_t i = 0; i < children.size(); ++i) {
    PrintRow(cell, children[i].name, &results[i], results[kBase], base_p50);
  }
}

void MeasureIdle(const Child& child, int connections) {
  const long before_kb = ProcessStatus(child.pid, "VmRSS");
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  for (int i = 0; i < connections; ++i) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    channels.push_back(grpc::CreateCustomChannel(Target(child, false),
                                                 grpc::InsecureChannelCredentials(), arguments));
    channels.back()->GetState(true);
  }
  int connected = 0;
  for (const auto& channel : channels) {
    connected +=
        channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(30));
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the server's side settles
  const long after_kb = ProcessStatus(child.pid, "VmRSS");
  absl::PrintF("| %s | %ld | %d | %.1f | %.1f | %.1f |\n", child.name,
               ProcessStatus(child.pid, "Threads"), connected, before_kb / 1024.0,
               after_kb / 1024.0,
               connected > 0 ? static_cast<double>(after_kb - before_kb) / connected : 0.0);
}

// The first request after a burst and a pause: is anybody still listening?
void MeasurePause(const Child& child) {
  Client client(Target(child, false), Cell{false, kSmall, 1});
  Result result;
  for (const int pause_ms : {500, 1010, 1030, 1050, 1070, 1090, 1500}) {
    client.Run(0.05, nullptr);
    std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
    client.Run(0, &result);
  }
  absl::PrintF("| %s |", child.name);
  for (const double latency_us : result.latency_us) absl::PrintF(" %.1f |", latency_us / 1e3);
  absl::PrintF("\n");
}

// Measures what --echo asks for.
void MeasureLines(const Child& child) {
  absl::PrintF("{\"ready\":true}\n");
  std::fflush(stdout);
  std::string transport;
  Cell cell{false, {}, 1};
  double seconds = 0;
  while (std::cin >> transport >> cell.sizes.request_bytes >> cell.sizes.reply_bytes >> seconds) {
    Client client(Target(child, transport == "unix"), cell);
    client.Run(seconds / 5, nullptr);
    Result result;
    client.Run(seconds, &result);
    absl::PrintF("{\"p50\": %.3f, \"p99\": %.3f}\n", Percentile(&result.latency_us, 0.50),
                 Percentile(&result.latency_us, 0.99));
    std::fflush(stdout);
  }
}

void MeasureAll(const std::vector<Child>& children) {
  absl::PrintF(
      "gRPC %s, %u cores, answers from %s thread; ratios to \"%s\" of the same "
      "cell\n\n",
      grpc::Version(), std::thread::hardware_concurrency(),
      absl::GetFlag(FLAGS_handoff) ? "the service's" : "gRPC's", kServers[kBase].name);
  if (absl::GetFlag(FLAGS_connections) > 0) {  // first, while the servers have served nothing
    absl::PrintF("| server | threads | idle connections | MB before | MB after | KB each |\n");
    absl::PrintF("|---|---|---|---|---|---|\n");
    for (const Child& child : children) MeasureIdle(child, absl::GetFlag(FLAGS_connections));
    absl::PrintF("\n");
  }
  absl::PrintF(
      "| request / reply | over | in flight | server | p50 us | p50 by round | p99 us | requests/s "
      "| server CPU us/request | server sleeps/request | p50 ratio | rate ratio |\n"
      "|---|---|---|---|---|---|---|---|---|---|---|---|\n");
  for (const Sizes& sizes : {kSmall, kLarge}) {
    for (const bool unix_socket : {false, true}) {
      for (const int concurrency : {1, 8}) MeasureCell(children, {unix_socket, sizes, concurrency});
    }
  }
  absl::PrintF(
      "\n| server | ms after 500 ms idle | 1010 ms | 1030 ms | 1050 ms | 1070 ms | 1090 ms "
      "| 1500 ms |\n|---|---|---|---|---|---|---|---|\n");
  for (const Child& child : children) MeasurePause(child);
  absl::PrintF("\n| server | threads after | MB after |\n|---|---|---|\n");
  for (const Child& child : children) {
    absl::PrintF("| %s | %ld | %.1f |\n", child.name, ProcessStatus(child.pid, "Threads"),
                 ProcessStatus(child.pid, "VmRSS") / 1024.0);
  }
}

int Main() {
  rlimit files;
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);

  char directory[] = "/tmp/grpc_api_bench.XXXXXX";
  if (mkdtemp(directory) == nullptr) return 1;
  const bool echo = absl::GetFlag(FLAGS_echo);
  std::vector<Child> children;
  for (const ServerKind& kind : kServers) {
    if (!echo || &kind == &kServers[kBase]) children.push_back(Spawn(kind, directory, children));
  }
  KeepFreedMemory();  // the client is the same for all, so let it be out of the way
  if (echo) {
    MeasureLines(children.front());
  } else {
    MeasureAll(children);
  }
  for (const Child& child : children) {
    close(child.control);
    waitpid(child.pid, nullptr, 0);
    unlink(child.unix_path.c_str());
  }
  rmdir(directory);
  return 0;
}

}  // namespace
}  // namespace flashcore::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return flashcore::bench::Main();
}
