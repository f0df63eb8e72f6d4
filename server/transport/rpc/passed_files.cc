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
  bool is_too_many = false;
  {
    MutexLock lock(&mutex_);
    size_t& waiting = waiting_[std::string(client)];
    is_too_many = waiting >= most;
    if (!is_too_many) ++waiting;
  }
  if (is_too_many) {
    const InterruptedWaits interrupted(InterruptedWaits::kAtOnce);
    return close();
  }
  jobs_.Add(client, [this, name = std::string(client), close = std::move(close)]() mutable {
    {
      const InterruptedWaits interrupted(InterruptedWaits::kAtOnce);
      close();
    }
    Done(name);
  });
}

void PassedFiles::Closer::Done(const std::string& client) {
  MutexLock lock(&mutex_);
  const auto found = waiting_.find(client);
  if (--found->second == 0) waiting_.erase(found);
}

size_t PassedFiles::Closer::waiting(absl::string_view client) const {
  MutexLock lock(&mutex_);
  const auto found = waiting_.find(client);
  return found == waiting_.end() ? 0 : found->second;
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
