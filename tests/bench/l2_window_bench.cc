// flashcore-l2-window-bench: decode over hot K/V while cold K/V streams past, with an L2
// access-policy window and without. l2_window_counters.sh counts what --once launches.
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <string>
#include <vector>

#include "kernels/bench/device_kernels.h"
#include "tests/bench/l2_experiment.h"
#include "tests/bench/l2_summary.h"

namespace flashcore::kernels {
namespace {

constexpr char kUsage[] =
    R"(flashcore-l2-window-bench: when an L2 access-policy window over K/V pays.

Times decode over 16 and 32 MiB of hot K/V: alone; and with and without a window over it, and with
half of the L2 set aside, while decode over cold K/V runs between the hot launches or beside them.
The modes take turns in rounds, every other round backwards. Times are medians of the rounds. The
change is the window's time over the time without it in the same round, in percent less 100: -10 is
a gain of 10%, 10 a cost of 10%; behind it the least and greatest of the rounds.

  --rounds=N            of each row (5)
  --repeats=N           hot launches that are timed in each round (400)
  --json=FILE           write the rows there, too
  --run=JSON            "run" of that file, as kernels/bench/run_info.py prints it
  --once=MODE           launch in one mode for a profiler (alone, without, with, half), time nothing
  --launches=N          hot launches of --once (5)
  --sequences=N         hot sequences of 16 MiB of --once (1)
  --cold_mib=N          cold K/V before each of them, a multiple of 64 (256); alone: none
  --help                print this

Exit status: 0; 1 on an error; 2 without a GPU that has such windows.
)";

constexpr int kExitNoWindow = 2;
constexpr double kMiB = 1 << 20;

struct Options {
  int rounds = 5;
  int repeats = 400;
  std::string json_file;
  std::string run = "null";  // a JSON value
  std::string once;
  int launches = 5;
  int sequences = 1;
  int cold_mib = 256;
};

struct Row {
  size_t hot_bytes = 0;
  const char* mode = "";
  ColdTraffic traffic;
  L2Experiment::Granted granted;
  std::vector<double> p50_us, p90_us, p99_us;  // of each round
  std::vector<double> change_percent;          // of p50; empty without a window

  const char* traffic_name() const {
    if (traffic.concurrent) return traffic.bytes > 0 ? "beside" : "never pauses";
    return traffic.bytes > 0 ? "between" : "none";
  }
};

const char* Name(L2Mode mode) {
  return mode == L2Mode::kWithout ? "without" : mode == L2Mode::kWith ? "with" : "half";
}

// The device to measure on, described; empty, with the reason printed, if there is none.
std::string DescribeDevice() {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, 0);
  if (error != cudaSuccess) {
    std::fprintf(stderr, "flashcore-l2-window-bench: no GPU: %s\n", cudaGetErrorString(error));
    return "";
  }
  if (properties.persistingL2CacheMaxSize == 0) {
    std::fprintf(stderr, "flashcore-l2-window-bench: the L2 of the %s keeps nothing persisting\n",
                 properties.name);
    return "";
  }
  std::printf("GPU: %s, L2 %.1f MiB, at most %.1f MiB persisting, window at most %.1f MiB\n\n",
              properties.name, properties.l2CacheSize / kMiB,
              properties.persistingL2CacheMaxSize / kMiB,
              properties.accessPolicyMaxWindowSize / kMiB);
  return properties.name;
}

void PrintHeader() {
  std::printf("%7s %-12s %8s %-8s %9s %5s %8s %17s %8s %8s %8s %s\n", "hot MiB", "cold", "MiB",
              "window", "aside MiB", "ratio", "p50 us", "least..greatest", "p90 us", "p99 us",
              "hot GB/s", "change of time without the window");
}

void Print(const Row& row) {
  const Spread p50 = SpreadOf(row.p50_us);
  std::printf("%7.0f %-12s %8.0f %-8s %9.1f %5.2f %8.2f %8.2f..%-7.2f %8.2f %8.2f %8.0f",
              row.hot_bytes / kMiB, row.traffic_name(), row.traffic.bytes / kMiB, row.mode,
              row.granted.set_aside_bytes / kMiB, row.granted.hit_ratio, p50.median, p50.min,
              p50.max, SpreadOf(row.p90_us).median, SpreadOf(row.p99_us).median,
              row.hot_bytes / p50.median * 1e-3);
  if (!row.change_percent.empty()) {
    const Spread change = SpreadOf(row.change_percent);
    std::printf(" %+.1f%% (%+.1f..%+.1f)", change.median, change.min, change.max);
  }
  std::printf("\n");
  std::fflush(stdout);
}

// The modes beside one kind of traffic, in rounds.
std::vector<Row> MeasureRows(const Options& options, const ColdTraffic& traffic,
                             L2Experiment* experiment) {
  constexpr L2Mode kModes[] = {L2Mode::kWithout, L2Mode::kWith, L2Mode::kHalf};
  constexpr size_t kNumModes = std::size(kModes);
  std::vector<Row> rows;
  for (const L2Mode mode : kModes) {
    Row row;
    row.hot_bytes = experiment->hot_bytes();
    row.mode = Name(mode);
    row.traffic = traffic;
    rows.push_back(row);
  }
  if (traffic.bytes == 0 && !traffic.concurrent) rows[0].mode = "alone";
  for (int round = 0; round < options.rounds; ++round) {
    for (size_t i = 0; i < kNumModes; ++i) {
      const size_t mode = round % 2 == 0 ? i : kNumModes - 1 - i;
      rows[mode].granted = experiment->SetMode(kModes[mode]);
      const Percentiles us = experiment->Time(traffic, options.repeats);
      rows[mode].p50_us.push_back(us.p50);
      rows[mode].p90_us.push_back(us.p90);
      rows[mode].p99_us.push_back(us.p99);
    }
  }
  for (size_t mode = 1; mode < kNumModes; ++mode) {
    rows[mode].change_percent = ChangePercent(rows[mode].p50_us, rows[0].p50_us);
  }
  return rows;
}

// Every kind of traffic.
void RunTable(const Options& options, int sequences, std::vector<Row>* rows) {
  constexpr size_t kDistances[] = {0, size_t{64} << 20, size_t{256} << 20, size_t{512} << 20};
  L2Experiment experiment(sequences);
  experiment.SetMode(L2Mode::kWithout);
  experiment.Time({kDistances[3], false}, options.repeats);  // wakes the clocks up
  for (const bool concurrent : {false, true}) {
    for (const size_t distance : kDistances) {
      for (const Row& row : MeasureRows(options, {distance, concurrent}, &experiment)) {
        Print(row);
        rows->push_back(row);
      }
    }
  }
  experiment.SetMode(L2Mode::kWithout);
}

void WriteSpread(std::FILE* out, const char* key, const std::vector<double>& values) {
  const Spread spread = SpreadOf(values);
  std::fprintf(out, ", \"%s\": %.3f, \"%s_min\": %.3f, \"%s_max\": %.3f", key, spread.median, key,
               spread.min, key, spread.max);
}

bool WriteJson(const Options& options, const std::string& gpu, const std::vector<Row>& rows) {
  std::FILE* out = std::fopen(options.json_file.c_str(), "w");
  if (out == nullptr) return false;
  std::fprintf(out, "{\"gpu\": \"%s\", \"run\": %s, \"rounds\": %d, \"repeats\": %d, \"rows\": [",
               gpu.c_str(), options.run.c_str(), options.rounds, options.repeats);
  const char* separator = "\n";
  for (const Row& row : rows) {
    std::fprintf(out,
                 "%s {\"hot_bytes\": %zu, \"cold\": \"%s\", \"cold_bytes\": %zu, "
                 "\"window\": \"%s\", \"set_aside_bytes\": %zu, \"hit_ratio\": %.3f",
                 separator, row.hot_bytes, row.traffic_name(), row.traffic.bytes, row.mode,
                 row.granted.set_aside_bytes, row.granted.hit_ratio);
    WriteSpread(out, "p50_us", row.p50_us);
    WriteSpread(out, "p90_us", row.p90_us);
    WriteSpread(out, "p99_us", row.p99_us);
    if (!row.change_percent.empty()) WriteSpread(out, "change_percent", row.change_percent);
    std::fputs("}", out);
    separator = ",\n";
  }
  std::fprintf(out, "\n]}\n");
  const bool written = std::ferror(out) == 0;
  return std::fclose(out) == 0 && written;
}

bool RunOnce(const Options& options) {
  const bool alone = options.once == "alone";
  for (const L2Mode mode : {L2Mode::kWithout, L2Mode::kWith, L2Mode::kHalf}) {
    if (options.once != (alone ? "alone" : Name(mode))) continue;
    L2Experiment experiment(options.sequences);
    experiment.SetMode(mode);
    experiment.Profile(alone ? 0 : size_t{1} * options.cold_mib << 20, options.launches);
    return true;
  }
  return false;
}

// "--name=value" into `*value`; numbers are positive.
bool Parse(const std::string& argument, const std::string& name, std::string* value) {
  const std::string prefix = "--" + name + "=";
  if (argument.compare(0, prefix.size(), prefix) != 0) return false;
  *value = argument.substr(prefix.size());
  return true;
}
bool Parse(const std::string& argument, const std::string& name, int* value) {
  std::string text;
  if (!Parse(argument, name, &text)) return false;
  char* end = nullptr;
  const long number = std::strtol(text.c_str(), &end, 10);
  *value = static_cast<int>(number);
  return !text.empty() && *end == '\0' && number > 0 && number <= 1'000'000;
}

bool ParseOptions(const std::vector<std::string>& arguments, Options* options) {
  for (const std::string& argument : arguments) {
    if (!Parse(argument, "rounds", &options->rounds) &&
        !Parse(argument, "repeats", &options->repeats) && !Parse(argument, "run", &options->run) &&
        !Parse(argument, "json", &options->json_file) && !Parse(argument, "once", &options->once) &&
        !Parse(argument, "launches", &options->launches) &&
        !Parse(argument, "sequences", &options->sequences) &&
        !Parse(argument, "cold_mib", &options->cold_mib)) {
      return false;
    }
  }
  const bool run_is_json = options->run == "null" || options->run.rfind('{', 0) == 0;
  return run_is_json && options->cold_mib % 64 == 0;
}

int Main(const std::vector<std::string>& arguments) {
  Options options;
  if (arguments == std::vector<std::string>{"--help"}) {
    std::fputs(kUsage, stdout);
    return 0;
  }
  const bool parsed = ParseOptions(arguments, &options);
  if (!parsed) {
    std::fputs(kUsage, stderr);
    return 1;
  }
  const std::string gpu = DescribeDevice();
  if (gpu.empty()) return kExitNoWindow;
  if (!options.once.empty()) {
    if (RunOnce(options)) return 0;
    std::fprintf(stderr, "flashcore-l2-window-bench: no mode '%s'\n", options.once.c_str());
    return 1;
  }
  PrintHeader();
  std::vector<Row> rows;
  for (const int sequences : {1, 2}) RunTable(options, sequences, &rows);
  if (options.json_file.empty() || WriteJson(options, gpu, rows)) return 0;
  std::fprintf(stderr, "flashcore-l2-window-bench: cannot write %s\n", options.json_file.c_str());
  return 1;
}

}  // namespace
}  // namespace flashcore::kernels

int main(int argc, char** argv) { return flashcore::kernels::Main({argv + 1, argv + argc}); }
