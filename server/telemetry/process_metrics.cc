#include "server/telemetry/process_metrics.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace flashcore::server {
namespace {

std::string ReadFile(const char* path) {
  std::ifstream file(path);
  std::ostringstream content;
  content << file.rdbuf();
  return content.str();
}

class FamilyList {
 public:
  void Counter(const char* name, const char* help, double value) {
    Add(name, help, prometheus::MetricType::Counter).counter.value = value;
  }
  void Gauge(const char* name, const char* help, double value) {
    Add(name, help, prometheus::MetricType::Gauge).gauge.value = value;
  }
  std::vector<prometheus::MetricFamily> Take() { return std::move(families_); }

 private:
  prometheus::ClientMetric& Add(const char* name, const char* help, prometheus::MetricType type) {
    families_.push_back({name, help, type, {}});
    return families_.back().metric.emplace_back();
  }

  std::vector<prometheus::MetricFamily> families_;
};

// Seconds since the epoch at which the machine started, or 0.
double BootTime() {
  const std::string stat = ReadFile("/proc/stat");
  for (absl::string_view line : absl::StrSplit(stat, '\n')) {
    double seconds = 0;
    if (absl::ConsumePrefix(&line, "btime ") && absl::SimpleAtod(line, &seconds)) return seconds;
  }
  return 0;
}

// From /proc/self/stat; see proc(5).
void AddStat(FamilyList* families) {
  const std::string stat = ReadFile("/proc/self/stat");
  // The second field is the program's name in parentheses, which may hold anything. What follows
  // starts with the third.
  const size_t name_end = stat.rfind(") ");
  if (name_end == std::string::npos) return;
  const std::vector<absl::string_view> fields =
      absl::StrSplit(absl::string_view(stat).substr(name_end + 2), ' ');
  const auto field = [&](size_t number) {
    double value = 0;
    if (number - 3 < fields.size() && !absl::SimpleAtod(fields[number - 3], &value)) value = 0;
    return value;
  };
  const double ticks_per_second = static_cast<double>(sysconf(_SC_CLK_TCK));
  families->Counter("process_cpu_seconds_total", "User and system CPU time spent, in seconds.",
                    (field(14) + field(15)) / ticks_per_second);
  families->Gauge("process_threads", "Threads of the process.", field(20));
  families->Gauge("process_start_time_seconds", "Start of the process, in seconds since the epoch.",
                  BootTime() + field(22) / ticks_per_second);
  families->Gauge("process_virtual_memory_bytes", "Virtual memory, in bytes.", field(23));
  families->Gauge("process_resident_memory_bytes", "Resident memory, in bytes.",
                  field(24) * static_cast<double>(sysconf(_SC_PAGESIZE)));
}

void AddFileDescriptors(FamilyList* families) {
  if (DIR* directory = opendir("/proc/self/fd")) {
    int entries = 0;
    while (readdir(directory) != nullptr) ++entries;
    closedir(directory);
    // Less ".", "..", and the descriptor that reads the directory.
    families->Gauge("process_open_fds", "Open file descriptors.", entries - 3);
  }
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    families->Gauge("process_max_fds", "Most file descriptors that may be open.",
                    static_cast<double>(limit.rlim_cur));
  }
}

}  // namespace

std::vector<prometheus::MetricFamily> CollectProcessMetrics() {
  FamilyList families;
  AddStat(&families);
  AddFileDescriptors(&families);
  return families.Take();
}

}  // namespace flashcore::server
