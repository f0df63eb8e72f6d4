// Writes log records to a file descriptor without making the caller wait for whoever reads it.
//
// Not spdlog: its JSON patterns do not escape, so the records and the sink would still be ours. Its
// thread pool bounds a queue by records, not bytes, and its destructor waits for a blocked writer.
#ifndef FLASHCORE_SERVER_TELEMETRY_LOG_WRITER_H_
#define FLASHCORE_SERVER_TELEMETRY_LOG_WRITER_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>

#include "absl/strings/string_view.h"
#include "server/base/mutex.h"

namespace flashcore::server {

// Thread-safe. One thread, started with the first record, does all writing.
class LogWriter {
 public:
  // `fd` stays open and keeps its flags: other processes may share it. The queue holds at most
  // `queue_bytes`, and the thread as much again. `dropped_record` returns the record that reports
  // how many were dropped; it runs on the thread.
  LogWriter(int fd, size_t queue_bytes, std::function<std::string(uint64_t)> dropped_record);
  ~LogWriter();  // flushes for at most 200 ms; what is left then is lost
  LogWriter(const LogWriter&) = delete;
  LogWriter& operator=(const LogWriter&) = delete;

  // Queues `record`, which ends with a newline. If it does not fit, drops and counts it.
  void Write(absl::string_view record);
  // Waits until all queued records are written or dropped, at most `timeout`.
  void Flush(std::chrono::milliseconds timeout);
  // Records that did not fit or could not be written.
  uint64_t dropped() const { return dropped_; }

 private:
  struct Batch {
    std::string text;
    uint64_t reported = 0;  // dropped records that the last record of `text` reports; 0: none
  };

  void Run();
  bool Take(Batch* batch);
  bool WaitUntilWritable();
  void CountLost(const Batch& batch, absl::string_view unwritten);

  const int fd_;
  const size_t queue_bytes_;
  const std::function<std::string(uint64_t)> dropped_record_;
  std::atomic<uint64_t> dropped_{0};
  std::atomic<bool> stopping_{false};

  Mutex mutex_;
  CondVar changed_;
  std::string queue_ ABSL_GUARDED_BY(mutex_);
  uint64_t unreported_ ABSL_GUARDED_BY(mutex_) = 0;  // dropped records that no record reports yet
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_TELEMETRY_LOG_WRITER_H_
