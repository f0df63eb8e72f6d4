#include "server/transport/grpc/inflow.h"

#include <dlfcn.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <utility>

#include "absl/container/inlined_vector.h"

namespace flashcore::server {
namespace {

std::array<std::atomic<Inflow*>, 1 << 22> g_inflows;  // by descriptor; never deleted
std::atomic<uint64_t> g_excess{0};                    // see SetExcessOfAll
thread_local Inflow* t_inflow = nullptr;              // of InflowOfThread

std::atomic<Inflow*>* PlaceOf(int descriptor) {
  const auto place = static_cast<size_t>(descriptor);
  return descriptor >= 0 && place < g_inflows.size() ? &g_inflows[place] : nullptr;
}

// What recvmsg and its like below call in turn.
template <typename Function>
Function* Next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

// Of the Inflow of an SSL object.
int SslIndex() {
  static const int index = SSL_get_ex_new_index(0, nullptr, nullptr, nullptr, nullptr);
  return index;
}

}  // namespace

// Only the accept loop's thread makes them, of descriptors that it has.
Inflow* Inflow::Of(int descriptor) {
  std::atomic<Inflow*>* const place = PlaceOf(descriptor);
  if (place == nullptr) return nullptr;
  Inflow* inflow = place->load();
  if (inflow == nullptr) place->store(inflow = new Inflow);
  return inflow;
}

void Inflow::SetExcessOfAll(uint64_t calls) { g_excess = calls; }

void Inflow::Begin(int descriptor, bool tls, std::shared_ptr<const ClientConnection> calls,
                   const Limits& limits) {
  MutexLock lock(&mutex_);
  descriptor_ = descriptor;
  ended_calls_ = std::move(calls);
  limits_ = limits;
  frames_ = FrameCounter();
  forgiven_calls_ = 0;
  forgiven_resets_ = 0;
  tls_ = tls;
  hung_up_ = false;
  cut_off_ = false;
}

bool Inflow::Receive(absl::Span<const absl::string_view> pieces) {
  MutexLock lock(&mutex_);
  if (cut_off_) return false;
  const uint64_t before = frames_.streams();
  for (const absl::string_view piece : pieces) frames_.Read(piece);
  const uint64_t begun = frames_.streams() - before;
  g_excess += std::min(begun, Excess());
  if (!ExceedsLimits()) return true;
  cut_off_ = true;
  forgiven_calls_ += begun;          // gRPC will not see them
  shutdown(descriptor_, SHUT_RDWR);  // the accept loop sees that
  return false;
}

bool Inflow::ExceedsLimits() const {
  return Calls() > limits_.calls || (Excess() > 0 && g_excess > limits_.excess_of_all) ||
         (!frames_.settings_acknowledged() && frames_.streams() > limits_.streams) ||
         frames_.resets() - forgiven_resets_ > limits_.resets ||
         frames_.longest_headers() > limits_.header_bytes;
}

uint64_t Inflow::Calls() const {
  const uint64_t ended = ended_calls_->finished() + forgiven_calls_;
  return frames_.streams() - std::min(frames_.streams(), ended);
}

uint64_t Inflow::Excess() const { return Calls() - std::min(Calls(), limits_.streams); }

uint64_t Inflow::excess() const {
  MutexLock lock(&mutex_);
  return Excess();
}

uint64_t Inflow::calls() const {
  MutexLock lock(&mutex_);
  return Calls();
}

void Inflow::ForgiveCalls(uint64_t calls) {
  MutexLock lock(&mutex_);
  // Some that were forgiven have ended meanwhile.
  const uint64_t begun = frames_.streams();
  const uint64_t unended = begun - std::min(begun, ended_calls_->finished());
  forgiven_calls_ = std::min(forgiven_calls_ + calls, unended);
}

void Inflow::ForgiveResets(uint64_t resets) {
  MutexLock lock(&mutex_);
  forgiven_resets_ = std::min(forgiven_resets_ + resets, frames_.resets());
}

InflowOfThread::InflowOfThread(Inflow* inflow) { t_inflow = inflow; }
InflowOfThread::~InflowOfThread() { t_inflow = nullptr; }

}  // namespace flashcore::server

extern "C" {

__attribute__((visibility("default"))) ssize_t recvmsg(int socket, msghdr* message, int flags) {
  using flashcore::server::Inflow;
  static auto* const next = flashcore::server::Next<decltype(recvmsg)>("recvmsg");
  const std::atomic<Inflow*>* const place = flashcore::server::PlaceOf(socket);
  Inflow* const inflow = place == nullptr ? nullptr : place->load();
  if (inflow == nullptr || flags != 0) return next(socket, message, flags);
  if (inflow->cut_off()) {
    errno = ECONNRESET;
    return -1;
  }
  if (inflow->hung_up()) return 0;
  const ssize_t size = next(socket, message, flags);
  if (size <= 0 || inflow->tls()) return size;
  absl::InlinedVector<absl::string_view, 64> pieces;
  auto left = static_cast<size_t>(size);
  for (size_t i = 0; left > 0; ++i) {
    const iovec& piece = message->msg_iov[i];
    const size_t taken = std::min(piece.iov_len, left);
    pieces.emplace_back(static_cast<const char*>(piece.iov_base), taken);
    left -= taken;
  }
  if (inflow->Receive(pieces)) return size;
  errno = ECONNRESET;
  return -1;
}

__attribute__((visibility("default"))) SSL* SSL_new(SSL_CTX* context) {
  static auto* const next = flashcore::server::Next<decltype(SSL_new)>("SSL_new");
  SSL* const ssl = next(context);
  if (ssl != nullptr) {
    SSL_set_ex_data(ssl, flashcore::server::SslIndex(), flashcore::server::t_inflow);
  }
  return ssl;
}

__attribute__((visibility("default"))) int SSL_read(SSL* ssl, void* buffer, int size) {
  using flashcore::server::Inflow;
  static auto* const next = flashcore::server::Next<decltype(SSL_read)>("SSL_read");
  const int read = next(ssl, buffer, size);
  if (read <= 0) return read;
  auto* const inflow = static_cast<Inflow*>(SSL_get_ex_data(ssl, flashcore::server::SslIndex()));
  const absl::string_view bytes(static_cast<const char*>(buffer), static_cast<size_t>(read));
  if (inflow == nullptr || inflow->Receive({&bytes, 1})) return read;
  ERR_raise(ERR_LIB_SSL, ERR_R_OPERATION_FAIL);  // SSL_get_error then says SSL_ERROR_SSL
  return -1;
}

}  // extern "C"
