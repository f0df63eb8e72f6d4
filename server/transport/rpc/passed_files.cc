#include "server/transport/rpc/passed_files.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <array>
#include <limits>
#include <utility>

#include "server/base/interrupted_waits.h"

namespace flashcore::server {
namespace {

// Whether the file is a memfd or a socket. Asks no file system.
bool IsPrompt(int file) {
  int type = 0;
  socklen_t size = sizeof(type);
  return fcntl(file, F_GET_SEALS) >= 0 || getsockopt(file, SOL_SOCKET, SO_TYPE, &type, &size) == 0;
}

void CloseFile(FileDescriptor* file) {
  const linger none = {};
  setsockopt(file->get(), SOL_SOCKET, SO_LINGER, &none, sizeof(none));
  file->reset();
}

void EmptyAndClose(FileDescriptor* socket) {
  std::array<char, 16384> buffer;
  while (recv(socket->get(), buffer.data(), buffer.size(), MSG_DONTWAIT) > 0) {
  }
  socket->reset();
}

}  // namespace

void PassedFiles::Closer::Add(absl::string_view client, FairJobs::Job close, size_t most) {
  Shares::Client* waiting = nullptr;  // null: too many of the client wait
  {
    MutexLock lock(&mutex_);
    if (waiting_.held(client) < most) waiting = waiting_.Take(client, 1);
  }
  if (waiting == nullptr) {
    const InterruptedWaits interrupted(InterruptedWaits::kAtOnce);
    return close();
  }
  jobs_.Add(client, [this, waiting, close = std::move(close)]() mutable {
    {
      const InterruptedWaits interrupted(InterruptedWaits::kAtOnce);
      close();
    }
    MutexLock lock(&mutex_);
    waiting_.Give(waiting, 1);
  });
}

size_t PassedFiles::Closer::waiting(absl::string_view client) const {
  MutexLock lock(&mutex_);
  return waiting_.held(client);
}

void PassedFiles::Close(absl::string_view client, FileDescriptor file) {
  const bool is_prompt = IsPrompt(file.get());
  auto close = [file = std::move(file)]() mutable { CloseFile(&file); };
  if (is_prompt) return prompt_.Add(client, std::move(close), kMaxWaiting);
  others_.Add(client, std::move(close), std::numeric_limits<size_t>::max());
}

void PassedFiles::CloseConnection(absl::string_view client, FileDescriptor socket) {
  shutdown(socket.get(), SHUT_RDWR);
  prompt_.Add(
      client, [socket = std::move(socket)]() mutable { EmptyAndClose(&socket); }, kMaxWaiting);
}

bool PassedFiles::HasRoom(absl::string_view client) const {
  return others_.waiting(client) < kMaxOthers;
}

}  // namespace flashcore::server
