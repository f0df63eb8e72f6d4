// Closes what clients have passed over Unix sockets, so that no thread that serves others waits for
// it.
//
// Whoever is connected to a Unix socket can pass any file (SCM_RIGHTS), and the last close of one
// can take as long as the client wants:
// - That of a socket with SO_LINGER waits until the other end has read all, up to its linger time.
//   It happens wherever the last reference goes: in close, in a read that drops files for which it
//   has no room, and in the close of the Unix socket in whose queue the file is. The kernel stops
//   waiting as soon as the thread has a signal: base/interrupted_waits.h.
// - That of a file on a file system which a user serves (FUSE) waits for that user, if the file was
//   a descriptor of ours, and no signal helps. Such files are closed on a thread of their own.
#ifndef FLASHCORE_SERVER_TRANSPORT_RPC_PASSED_FILES_H_
#define FLASHCORE_SERVER_TRANSPORT_RPC_PASSED_FILES_H_

#include <cstddef>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "server/base/mutex.h"
#include "server/base/socket.h"
#include "server/sharing/fair_jobs.h"
#include "server/sharing/shares.h"

namespace flashcore::server {

// Owns two threads: one for sockets and memory, whose ends never wait for long, and one for all
// other files. On each, the clients of files (door.h) take turns. A file system that does not
// answer keeps the second thread, and all files that come after; HasRoom bounds their number.
// Thread-safe.
class PassedFiles {
 public:
  static constexpr size_t kMaxWaiting = 256;  // sockets and memory of one client
  static constexpr size_t kMaxOthers = 16;    // other files of one client

  PassedFiles() = default;
  ~PassedFiles() = default;  // closes what it has
  PassedFiles(const PassedFiles&) = delete;
  PassedFiles& operator=(const PassedFiles&) = delete;

  // Takes over a file that `client` has passed. Does not block, except for 0.1 ms when
  // kMaxWaiting files of the client wait already.
  void Close(absl::string_view client, FileDescriptor file);
  // As Close, for a connection of `client`, in whose queue files may be. Ends it at once. Empties
  // the queue before it closes `socket`, so that nobody has to wait who closes another descriptor
  // of the connection.
  void CloseConnection(absl::string_view client, FileDescriptor socket);
  // False: kMaxOthers files of the client, neither sockets nor memory, are still to be closed. No
  // more should be taken: a file that never was a descriptor is dropped without waiting.
  bool HasRoom(absl::string_view client) const;

 private:
  class Closer {
   public:
    void Add(absl::string_view client, FairJobs::Job close, size_t most)
        ABSL_LOCKS_EXCLUDED(mutex_);
    size_t waiting(absl::string_view client) const ABSL_LOCKS_EXCLUDED(mutex_);

   private:
    mutable Mutex mutex_;
    Shares waiting_ ABSL_GUARDED_BY(mutex_){{}};  // in files
    FairJobs jobs_;                               // last: it uses the others
  };

  Closer prompt_;
  Closer others_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TRANSPORT_RPC_PASSED_FILES_H_
