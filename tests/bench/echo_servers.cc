#include "tests/bench/echo_servers.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "flashcore/v1/attention.grpc.pb.h"
#include "grpcpp/health_check_service_interface.h"
#include "server/transport/grpc/guard/self_check.h"

namespace flashcore::bench {
namespace {

using v1::AttentionService;

// The service's work on its bytes; the same code behind both APIs. Thread-safe.
class Echo {
 public:
  Echo() : reply_(kMaxReplyBytes, 'r') {}

  grpc::ByteBuffer Answer(const grpc::ByteBuffer& request) {
    uint64_t reply_bytes = 0;
    std::vector<grpc::Slice> slices;
    if (request.Length() < sizeof(reply_bytes) || request.Length() > kMaxRequestBytes ||
        !request.Dump(&slices).ok()) {
      return {};
    }
    std::vector<char> buffer = Take();
    char* end = buffer.data();
    for (const grpc::Slice& slice : slices) {
      std::memcpy(end, slice.begin(), slice.size());
      end += slice.size();
    }
    std::memcpy(&reply_bytes, buffer.data(), sizeof(reply_bytes));
    Return(std::move(buffer));
    if (reply_bytes > kMaxReplyBytes) return {};
    const grpc::Slice slice(reply_.data(), reply_bytes, grpc::Slice::STATIC_SLICE);
    return grpc::ByteBuffer(&slice, 1);
  }

 private:
  std::vector<char> Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (buffers_.empty()) return std::vector<char>(kMaxRequestBytes);
    std::vector<char> buffer = std::move(buffers_.back());
    buffers_.pop_back();
    return buffer;
  }
  void Return(std::vector<char> buffer) {
    std::lock_guard<std::mutex> lock(mutex_);
    buffers_.push_back(std::move(buffer));
  }

  const std::vector<char> reply_;
  std::mutex mutex_;                        // guards buffers_
  std::vector<std::vector<char>> buffers_;  // last returned is taken first: it is warm
};

// Runs answers: at once, or on a thread of its own. Thread-safe.
class Answerer {
 public:
  explicit Answerer(bool handoff) {
    if (handoff) thread_ = std::thread([this] { Loop(); });
  }
  ~Answerer() {
    if (!thread_.joinable()) return;
    Push(nullptr);
    thread_.join();
  }

  template <typename Answer>
  void Run(Answer answer) {
    if (thread_.joinable()) {
      Push(std::move(answer));
    } else {
      answer();
    }
  }

 private:
  void Push(std::function<void()> answer) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      answers_.push_back(std::move(answer));
    }
    ready_.notify_one();
  }
  void Loop() {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      ready_.wait(lock, [this] { return !answers_.empty(); });
      const std::function<void()> answer = std::move(answers_.front());
      answers_.pop_front();
      lock.unlock();
      if (!answer) return;
      answer();
    }
  }

  std::mutex mutex_;  // guards answers_
  std::condition_variable ready_;
  std::deque<std::function<void()>> answers_;  // an empty one ends the thread
  std::thread thread_;
};

void Listen(grpc::ServerBuilder* builder, const EchoOptions& options, int* port) {
  builder->AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), port);
  if (options.unix_path.empty()) return;
  builder->AddListeningPort("unix:" + options.unix_path, grpc::InsecureServerCredentials());
}

class CallbackServer final : public EchoServer {
 public:
  explicit CallbackServer(bool handoff) : service_(handoff) {}

  bool Start(const EchoOptions& options) {
    grpc::EnableDefaultHealthCheckService(true);  // the self-check calls it
    grpc::ServerBuilder builder;
    Listen(&builder, options, &port);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    if (options.keep_polling) self_check_.emplace(server::SelfCheck::Options(), server_.get());
    return server_ != nullptr;
  }

 private:
  class Service final
      : public AttentionService::WithRawCallbackMethod_Attend<AttentionService::Service> {
   public:
    explicit Service(bool handoff) : answerer_(handoff) {}

    grpc::ServerUnaryReactor* Attend(grpc::CallbackServerContext* context,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* reply) override {
      *reply = echo_.Answer(*request);
      grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
      answerer_.Run([reactor] { reactor->Finish(grpc::Status::OK); });
      return reactor;
    }

   private:
    Echo echo_;
    Answerer answerer_;
  };

  Service service_;
  std::unique_ptr<grpc::Server> server_;
  std::optional<server::SelfCheck> self_check_;  // destroyed first
};

class QueueServer final : public EchoServer {
 public:
  explicit QueueServer(bool handoff) : answerer_(handoff) {}
  ~QueueServer() override {
    server_->Shutdown(std::chrono::system_clock::now());
    for (auto& queue : queues_) queue->Shutdown();
    for (std::thread& thread : threads_) thread.join();
  }

  bool Start(const EchoOptions& options, int threads) {
    grpc::ServerBuilder builder;
    Listen(&builder, options, &port);
    builder.RegisterService(&service_);
    for (int i = 0; i < threads; ++i) queues_.push_back(builder.AddCompletionQueue());
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) return false;
    for (auto& queue : queues_) {
      threads_.emplace_back([this, &queue] { Serve(queue.get()); });
    }
    return true;
  }

 private:
  static constexpr int kWaitingCalls = 16;  // per queue: more than the clients have in flight

  using Service = AttentionService::WithRawMethod_Attend<AttentionService::Service>;

  struct Call {
    grpc::ServerContext context;
    grpc::ByteBuffer request;
    grpc::ByteBuffer reply;
    grpc::ServerAsyncResponseWriter<grpc::ByteBuffer> writer{&context};
    bool answered = false;
  };

  void Await(grpc::ServerCompletionQueue* queue) {
    auto* call = new Call;
    service_.RequestAttend(&call->context, &call->request, &call->writer, queue, queue, call);
  }

  void Serve(grpc::ServerCompletionQueue* queue) {
    for (int i = 0; i < kWaitingCalls; ++i) Await(queue);
    void* tag = nullptr;
    bool ok = false;
    while (queue->Next(&tag, &ok)) {
      auto* call = static_cast<Call*>(tag);
      if (!ok || call->answered) {
        delete call;
        continue;
      }
      Await(queue);
      call->answered = true;
      call->reply = echo_.Answer(call->request);
      answerer_.Run([call] { call->writer.Finish(call->reply, grpc::Status::OK, call); });
    }
  }

  Echo echo_;
  Answerer answerer_;
  Service service_;
  std::vector<std::unique_ptr<grpc::ServerCompletionQueue>> queues_;
  std::unique_ptr<grpc::Server> server_;
  std::vector<std::thread> threads_;
};

}  // namespace

std::string EchoRequest(size_t bytes, size_t reply_bytes) {
  const uint64_t in_front = reply_bytes;
  std::string request(std::max(bytes, sizeof(in_front)), 'q');
  std::memcpy(request.data(), &in_front, sizeof(in_front));
  return request;
}

std::unique_ptr<EchoServer> StartCallbackServer(const EchoOptions& options) {
  auto server = std::make_unique<CallbackServer>(options.handoff);
  if (!server->Start(options)) return nullptr;
  return server;
}

std::unique_ptr<EchoServer> StartQueueServer(const EchoOptions& options, int threads) {
  auto server = std::make_unique<QueueServer>(options.handoff);
  if (!server->Start(options, threads)) return nullptr;
  return server;
}

}  // namespace flashcore::bench
