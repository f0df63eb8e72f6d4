#include "server/transport/grpc/guard/inflow.h"

#include <dlfcn.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <optional>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "server/base/interrupted_waits.h"
#include "server/transport/rpc/passed_files.h"

namespace flashcore::server {
namespace {

std::array<std::atomic<Inflow*>, 1 << 22> g_inflows;  // by descriptor; never deleted
std::atomic<uint64_t> g_excess{0};                    // see SetExcessOfAll
thread_local Inflow* t_inflow = nullptr;              // of InflowOfThread

constexpr uint64_t kBytesOfFrame = 256;  // see Inflow::Limits::frames

std::atomic<Inflow*>* PlaceOf(int descriptor) {
  const auto place = static_cast<size_t>(descriptor);
  return descriptor >= 0 && place < g_inflows.size() ? &g_inflows[place] : nullptr;
}

Inflow* InflowAt(int descriptor) {
  const std::atomic<Inflow*>* const place = PlaceOf(descriptor);
  return place == nullptr ? nullptr : place->load();
}

// The functions that recvmsg and its like below call in turn.
template <typename Function>
Function* Next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

bool IsUnix(int socket) {
  int domain = 0;
  socklen_t size = sizeof(domain);
  return getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 && domain == AF_UNIX;
}

// As `next`, which is recvmsg. A connection over which a file comes is cut off.
ssize_t ReadSocket(Inflow* inflow, decltype(recvmsg)* next, int socket, msghdr* message) {
  if (!inflow->is_unix()) return next(socket, message, 0);
  message->msg_control = nullptr;  // no file becomes a descriptor
  message->msg_controllen = 0;
  ssize_t size = 0;
  {
    const InterruptedWaits interrupted;
    size = next(socket, message, 0);
  }
  if (size < 0 || (message->msg_flags & MSG_CTRUNC) == 0) return size;
  inflow->CutOff();
  errno = ECONNRESET;
  return -1;
}

// Index of the Inflow in an SSL object.
int SslIndex() {
  static const int index = SSL_get_ex_new_index(0, nullptr, nullptr, nullptr, nullptr);
  return index;
}

}  // namespace

bool ClientInflow::AddResets(uint64_t calls) {
  if ((resets_ += calls) <= max_resets_) return true;
  resets_ -= calls;
  return false;
}

void ClientInflow::ForgiveResets(uint64_t calls) {
  uint64_t resets = resets_;
  while (!resets_.compare_exchange_weak(resets, resets - std::min(resets, calls))) {
  }
}

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
                   std::shared_ptr<ClientInflow> client, const Limits& limits) {
  MutexLock lock(&mutex_);
  descriptor_ = descriptor;
  ended_calls_ = std::move(calls);
  client_ = std::move(client);
  limits_ = limits;
  epoll_ = -1;
  postponed_ = false;
  turn_bytes_ = 0;
  frames_ = FrameCounter();
  last_all_read_ = FrameCounter();
  forgiven_calls_ = 0;
  tls_ = tls;
  is_unix_ = IsUnix(descriptor);
  hung_up_ = false;
  cut_off_ = false;
}

void Inflow::WaitBy(int epoll, const epoll_event& event) {
  MutexLock lock(&mutex_);
  epoll_ = epoll;
  event_ = event;
}

bool Inflow::TellAgain() {
  // gRPC waits for edges, so that this one, which is none, must be told again.
  return epoll_ >= 0 && epoll_ctl(epoll_, EPOLL_CTL_MOD, descriptor_, &event_) == 0;
}

void Inflow::Postpone() {
  MutexLock lock(&mutex_);
  postponed_ = true;
}

void Inflow::Resume() {
  MutexLock lock(&mutex_);
  if (std::exchange(postponed_, false)) TellAgain();
}

size_t Inflow::TurnBytes() {
  MutexLock lock(&mutex_);
  if (turn_bytes_ < limits_.turn_bytes) return limits_.turn_bytes - turn_bytes_;
  turn_bytes_ = 0;
  return TellAgain() ? 0 : limits_.turn_bytes;
}

void Inflow::HasRead(size_t bytes, bool all) {
  MutexLock lock(&mutex_);
  turn_bytes_ = bytes == 0 ? 0 : turn_bytes_ + bytes;
  if (all) last_all_read_ = frames_;
}

bool Inflow::Receive(absl::Span<const absl::string_view> pieces) {
  MutexLock lock(&mutex_);
  if (cut_off_) return false;
  const uint64_t before = frames_.streams();
  const uint64_t resets = frames_.resets();
  for (const absl::string_view piece : pieces) frames_.Read(piece);
  const uint64_t begun = frames_.streams() - before;
  g_excess += std::min(begun, Excess());
  if (!ExceedsLimits() && client_->AddResets(frames_.resets() - resets)) return true;
  forgiven_calls_ += begun;  // gRPC will not see them
  CutOffNow();
  return false;
}

void Inflow::CutOff() {
  MutexLock lock(&mutex_);
  if (!cut_off_) CutOffNow();
}

void Inflow::CutOffNow() {
  cut_off_ = true;
  client_->AddCutOff();
  shutdown(descriptor_, SHUT_RDWR);  // the accept loop sees that
}

bool Inflow::ExceedsLimits() const {
  return Calls() > limits_.calls || (Excess() > 0 && g_excess > limits_.excess_of_all) ||
         (!frames_.settings_acknowledged() && frames_.streams() > limits_.streams) ||
         frames_.frames() - last_all_read_.frames() >
             limits_.frames + (frames_.bytes() - last_all_read_.bytes()) / kBytesOfFrame ||
         frames_.pings() - last_all_read_.pings() > limits_.pings ||
         // Resets are forgiven by time, and too many for a server that is slow.
         frames_.resets() - last_all_read_.resets() > client_->max_resets() ||
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

InflowOfThread::InflowOfThread(Inflow* inflow) { t_inflow = inflow; }
InflowOfThread::~InflowOfThread() { std::exchange(t_inflow, nullptr)->Resume(); }

}  // namespace flashcore::server

extern "C" {

__attribute__((visibility("default"))) int epoll_ctl(int epoll, int operation, int descriptor,
                                                     epoll_event* event) noexcept {
  static auto* const next = flashcore::server::Next<decltype(epoll_ctl)>("epoll_ctl");
  const int result = next(epoll, operation, descriptor, event);
  if (result != 0 || operation != EPOLL_CTL_ADD) return result;
  if (auto* const inflow = flashcore::server::InflowAt(descriptor)) inflow->WaitBy(epoll, *event);
  return result;
}

__attribute__((visibility("default"))) ssize_t recvmsg(int socket, msghdr* message, int flags) {
  static auto* const next = flashcore::server::Next<decltype(recvmsg)>("recvmsg");
  auto* const inflow = flashcore::server::InflowAt(socket);
  if (inflow == nullptr || flags != 0) return next(socket, message, flags);
  if (inflow->cut_off()) {
    errno = ECONNRESET;
    return -1;
  }
  if (inflow->hung_up()) return 0;
  if (inflow == flashcore::server::t_inflow) {
    inflow->Postpone();
    errno = EAGAIN;
    return -1;
  }
  const size_t most = inflow->TurnBytes();
  if (most == 0) {
    errno = EAGAIN;
    return -1;
  }
  absl::InlinedVector<iovec, 64> room;
  size_t left = most;
  for (size_t i = 0; i < message->msg_iovlen && left > 0; ++i) {
    const iovec& piece = message->msg_iov[i];
    room.push_back({piece.iov_base, std::min(piece.iov_len, left)});
    left -= room.back().iov_len;
  }
  msghdr part = *message;
  part.msg_iov = room.data();
  part.msg_iovlen = room.size();
  const ssize_t size = flashcore::server::ReadSocket(inflow, next, socket, &part);
  message->msg_controllen = part.msg_controllen;
  message->msg_flags = part.msg_flags;
  if (size < 0 && errno != EAGAIN) return size;
  auto read = static_cast<size_t>(std::max<ssize_t>(size, 0));
  inflow->HasRead(read, /*all=*/read < most - left);
  if (size < 0) errno = EAGAIN;
  if (size <= 0 || inflow->tls()) return size;
  absl::InlinedVector<absl::string_view, 64> pieces;
  for (const iovec& piece : room) {
    const size_t taken = std::min(piece.iov_len, read);
    pieces.emplace_back(static_cast<const char*>(piece.iov_base), taken);
    read -= taken;
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
