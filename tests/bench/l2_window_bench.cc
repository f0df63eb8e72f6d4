// flashcore-l2-window-bench: decode over hot K/V while other reads stream past, with an L2
// access-policy window and without. l2_window_counters.sh counts what --once launches.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/bench/background_reader.h"
#include "tests/bench/kernels/device_kernels.h"
#include "tests/bench/l2_experiment.h"
#include "tests/bench/l2_summary.h"

namespace flashcore::kernels {
namespace {

constexpr char kUsage[] =
    R"(flashcore-l2-window-bench: when an L2 access-policy window over K/V pays.

Times decode over 4 to 32 MiB of hot K/V with and without a window over it, for which as much of
the L2 is set aside as the hot K/V takes or the GPU allows. Before each hot launch, decode over cold
K/V reads nothing, once or 4 times the L2's size, in units of 64 MiB. All the while a background
kernel takes none, 1/4, 1/2 or 3/4 of the bandwidth of the DRAM, as if the DRAM were slower: a share
of the rate that this kernel reaches alone. Its own rate is printed as measured alone and beside the
launches.

Rounds are with and without the window in turn, every other one backwards. Times are medians of the
rounds. The change is the window's time over the time without it in the same round, in percent less
100: -10 is a gain of 10%, 10 a cost of 10%; behind it the least and greatest of the rounds.

  --rounds=N            of each row (5)
  --repeats=N           hot launches that are timed in each round, rounded up to a multiple of 20
                        (200)
  --json=FILE           write the rows there, too
  --run=JSON            "run" of that file, as tests/bench/kernels/run_info.py prints it
  --once=MODE           launch in one mode for a profiler (alone, without, with), time nothing
  --launches=N          hot launches of --once (5)
  --hot_mib=N           hot K/V of --once (16): at most 16, or a multiple of 16
  --cold_mib=N          cold K/V before each of them, a multiple of 64 (256); alone: none
  --help                print this

Exit status: 0; 1 on an error; 2 without a GPU that has such windows.
)";

constexpr int kExitNoWindow = 2;
constexpr double kMiB = 1 << 20;

constexpr size_t kHotMib[] = {4, 8, 16, 32};
constexpr double kBackgroundShares[] = {0, 0.25, 0.5, 0.75};
constexpr size_t kColdPerL2[] = {0, 1, 4};

struct Options {
  int rounds = 5;
  int repeats = 200;
  std::string json_file;
  std::string run = "null";  // a JSON value
  std::string once;
  int launches = 5;
  int hot_mib = 16;
  int cold_mib = 256;
};

struct Row {
  size_t hot_bytes = 0;
  BackgroundLoad background;
  size_t cold_bytes = 0;
  bool window = false;
  L2Experiment::Granted granted;
  std::vector<double> p50_us, p90_us, p99_us;  // of each round
  std::vector<double> background_gbps;         // of each round, beside the launches
  std::vector<double> change_percent;          // of p50; empty without a window
};

const char* Name(bool window) { return window ? "with" : "without"; }

struct Gpu {
  std::string name;
  size_t l2_bytes = 0;
};

// The device to measure on; nameless, with the reason printed, if there is none.
Gpu FindGpu() {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, 0);
  if (error != cudaSuccess) {
    std::fprintf(stderr, "flashcore-l2-window-bench: no GPU: %s\n", cudaGetErrorString(error));
    return {};
  }
  if (properties.persistingL2CacheMaxSize == 0) {
    std::fprintf(stderr, "flashcore-l2-window-bench: the L2 of the %s keeps nothing persisting\n",
                 properties.name);
    return {};
  }
  std::printf("GPU: %s, L2 %.1f MiB, at most %.1f MiB persisting, window at most %.1f MiB\n",
              properties.name, properties.l2CacheSize / kMiB,
              properties.persistingL2CacheMaxSize / kMiB,
              properties.accessPolicyMaxWindowSize / kMiB);
  return {properties.name, static_cast<size_t>(properties.l2CacheSize)};
}

// Whole cold launches.
size_t ColdBytes(size_t at_least) {
  constexpr size_t kLaunch = L2Experiment::kColdLaunchBytes;
  return (at_least + kLaunch - 1) / kLaunch * kLaunch;
}

void PrintHeader() {
  std::printf("%7s %11s %8s %8s %8s %-8s %9s %5s %8s %17s %8s %8s %8s %s\n", "hot MiB",
              "background", "alone", "beside", "cold MiB", "window", "aside MiB", "ratio", "p50 us",
              "least..greatest", "p90 us", "p99 us", "hot GB/s", "change by the window");
}

void Print(const Row& row) {
  const Spread p50 = SpreadOf(row.p50_us);
  std::printf(
      "%7.0f %10.0f%% %8.0f %8.0f %8.0f %-8s %9.1f %5.2f %8.2f %8.2f..%-7.2f %8.2f %8.2f "
      "%8.0f",
      row.hot_bytes / kMiB, 100 * row.background.share, row.background.alone_gbps,
      SpreadOf(row.background_gbps).median, row.cold_bytes / kMiB, Name(row.window),
      row.granted.set_aside_bytes / kMiB, row.granted.hit_ratio, p50.median, p50.min, p50.max,
      SpreadOf(row.p90_us).median, SpreadOf(row.p99_us).median, row.hot_bytes / p50.median * 1e-3);
  if (!row.change_percent.empty()) {
    const Spread change = SpreadOf(row.change_percent);
    std::printf(" %+.1f%% (%+.1f..%+.1f)", change.median, change.min, change.max);
  }
  std::printf("\n");
  std::fflush(stdout);
}

// Without the window and with it, in rounds.
std::array<Row, 2> MeasureRows(const Options& options, const BackgroundLoad& background,
                               size_t cold_bytes, L2Experiment* experiment) {
  std::array<Row, 2> rows;
  for (const bool window : {false, true}) {
    rows[window].hot_bytes = experiment->hot_bytes();
    rows[window].background = background;
    rows[window].cold_bytes = cold_bytes;
    rows[window].window = window;
  }
  for (int round = 0; round < options.rounds; ++round) {
    const bool first = round % 2 == 1;
    for (const bool window : {first, !first}) {
      Row& row = rows[window];
      row.granted = experiment->SetWindow(window);
      const L2Experiment::Times times =
          experiment->Time({cold_bytes, background.blocks}, options.repeats);
      row.p50_us.push_back(times.us.p50);
      row.p90_us.push_back(times.us.p90);
      row.p99_us.push_back(times.us.p99);
      row.background_gbps.push_back(times.background_gbps);
    }
  }
  rows[true].change_percent = ChangePercent(rows[true].p50_us, rows[false].p50_us);
  return rows;
}

struct Table {
  double background_full_gbps = 0;
  std::vector<Row> rows;
};

// Every size beside every background and cold traffic.
Table MeasureTable(const Options& options, size_t l2_bytes) {
  Table table;
  BackgroundReader reader;
  table.background_full_gbps = reader.full_gbps();
  std::printf("background: %.0f GB/s at its full rate", table.background_full_gbps);
  std::vector<BackgroundLoad> loads;
  for (const double share : kBackgroundShares) {
    loads.push_back(reader.LoadFor(share));
    if (share > 0) std::printf(", %.0f%% by %d blocks", 100 * share, loads.back().blocks);
  }
  std::printf("; below in GB/s\n\n");
  PrintHeader();
  for (const size_t hot_mib : kHotMib) {
    L2Experiment experiment(hot_mib << 20, &reader);
    experiment.SetWindow(false);
    experiment.Time({ColdBytes(l2_bytes), 0}, options.repeats);  // wakes the clocks up
    for (const BackgroundLoad& load : loads) {
      for (const size_t cold_per_l2 : kColdPerL2) {
        const size_t cold_bytes = ColdBytes(cold_per_l2 * l2_bytes);
        for (const Row& row : MeasureRows(options, load, cold_bytes, &experiment)) {
          Print(row);
          table.rows.push_back(row);
        }
      }
    }
    experiment.SetWindow(false);
  }
  return table;
}

void WriteSpread(std::FILE* out, const char* key, const std::vector<double>& values) {
  const Spread spread = SpreadOf(values);
  std::fprintf(out, ", \"%s\": %.3f, \"%s_min\": %.3f, \"%s_max\": %.3f", key, spread.median, key,
               spread.min, key, spread.max);
}

bool WriteJson(const Options& options, const std::string& gpu, const Table& table) {
  std::FILE* out = std::fopen(options.json_file.c_str(), "w");
  if (out == nullptr) return false;
  std::fprintf(out,
               "{\"gpu\": \"%s\", \"run\": %s, \"rounds\": %d, \"repeats\": %d, "
               "\"background_full_gbps\": %.3f, \"rows\": [",
               gpu.c_str(), options.run.c_str(), options.rounds, options.repeats,
               table.background_full_gbps);
  const char* separator = "\n";
  for (const Row& row : table.rows) {
    std::fprintf(out,
                 "%s {\"hot_bytes\": %zu, \"background_share\": %.2f, \"background_blocks\": %d, "
                 "\"background_alone_gbps\": %.3f, \"cold\": \"%s\", \"cold_bytes\": %zu, "
                 "\"window\": \"%s\", \"set_aside_bytes\": %zu, \"hit_ratio\": %.3f",
                 separator, row.hot_bytes, row.background.share, row.background.blocks,
                 row.background.alone_gbps, row.cold_bytes > 0 ? "between" : "none", row.cold_bytes,
                 Name(row.window), row.granted.set_aside_bytes, row.granted.hit_ratio);
    WriteSpread(out, "background_gbps", row.background_gbps);
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
  for (const bool window : {false, true}) {
    if (options.once != (alone ? "alone" : Name(window))) continue;
    L2Experiment experiment(size_t{1} * options.hot_mib << 20, nullptr);
    experiment.SetWindow(window);
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
        !Parse(argument, "hot_mib", &options->hot_mib) &&
        !Parse(argument, "cold_mib", &options->cold_mib)) {
      return false;
    }
  }
  const bool run_is_json = options->run == "null" || options->run.rfind('{', 0) == 0;
  const bool hot_fits = options->hot_mib <= 16 || options->hot_mib % 16 == 0;
  return run_is_json && hot_fits && options->cold_mib % 64 == 0;
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
  const Gpu gpu = FindGpu();
  if (gpu.name.empty()) return kExitNoWindow;
  if (!options.once.empty()) {
    if (RunOnce(options)) return 0;
    std::fprintf(stderr, "flashcore-l2-window-bench: no mode '%s'\n", options.once.c_str());
    return 1;
  }
  const Table table = MeasureTable(options, gpu.l2_bytes);
  if (options.json_file.empty() || WriteJson(options, gpu.name, table)) return 0;
  std::fprintf(stderr, "flashcore-l2-window-bench: cannot write %s\n", options.json_file.c_str());
  return 1;
}

}  // namespace
}  // namespace flashcore::kernels

int main(int argc, char** argv) { return flashcore::kernels::Main({argv + 1, argv + argc}); }
