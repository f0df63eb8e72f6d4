#include "server/command_line.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "proto/wire/flag_argument.h"

namespace flashcore::server {
namespace {

constexpr char kEnvironmentPrefix[] = "FLASHCORE_";

struct FlagGroup {
  const char* title;
  std::vector<const char*> flags;
};

// Every flag of the server once, in the order of --help. tests/check_flags.py checks that.
const std::vector<FlagGroup>& FlagGroups() {
  static const auto* const kGroups = new std::vector<FlagGroup>{
      {"The flags that matter most",
       {"listen", "metrics_listen", "device", "kv_memory_bytes", "staging_memory_bytes",
        "max_message_bytes", "evict", "sequence_idle_timeout_s", "drain_timeout_s", "log_level"}},
      {"Serving",
       {"local_listen", "metrics_token_file", "probe_listen", "max_queue_delay_us",
        "enable_reflection"}},
      {"Who may call",
       {"tls_cert_file", "tls_key_file", "tls_client_ca_file", "token_file", "trusted_proxies",
        "insecure_client_names", "insecure_listen", "unix_socket_mode", "unix_socket_group",
        "local_allow_overflow_uid"}},
      {"Connections",
       {"max_connections", "max_connections_per_host", "max_connections_per_client",
        "max_connection_streams", "handshake_timeout_s", "max_connection_age_s"}},
      {"Device",
       {"accumulate", "cpu_threads", "lanes", "idle_spin_us", "direct_io_bytes", "l2_window",
        "l2_budget_bytes", "pin_threads", "local_device_tensors"}},
      {"Memory",
       {"sequence_metadata_bytes", "staging_wait_ms", "client_staging_bytes",
        "transport_memory_bytes", "unsent_reply_bytes", "shared_memory_bytes",
        "device_tensor_bytes"}},
      {"Limits",
       {"max_queue_requests", "reply_timeout_s", "max_request_gflop", "max_launch_ms",
        "client_kv_bytes", "client_sequences"}},
      {"Logs", {"log_format"}},
  };
  return *kGroups;
}

// " (64 MiB)" for a number of bytes that is a whole number of MiB, else nothing.
std::string SizeNote(absl::string_view name, absl::string_view value) {
  int64_t bytes = 0;
  if (!absl::EndsWith(name, "_bytes") || !absl::SimpleAtoi(value, &bytes)) return "";
  if (bytes == 0 || bytes % (1 << 20) != 0) return "";
  return absl::StrCat("  (", bytes >> 20, " MiB)");
}

// `text` in lines of at most 88 columns, indented by six.
std::string Wrap(absl::string_view text) {
  constexpr size_t kColumns = 88;
  constexpr absl::string_view kIndent = "      ";
  std::string result, line;
  for (absl::string_view word : absl::StrSplit(text, ' ')) {
    if (!line.empty() && kIndent.size() + line.size() + 1 + word.size() > kColumns) {
      absl::StrAppend(&result, kIndent, line, "\n");
      line.clear();
    }
    absl::StrAppend(&line, line.empty() ? "" : " ", word);
  }
  absl::StrAppend(&result, kIndent, line, "\n");
  return result;
}

std::string FlagHelp(const char* name) {
  const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
  const std::string value = flag->DefaultValue();
  return absl::StrCat("  --", name, "=", value, SizeNote(name, value), "\n", Wrap(flag->Help()));
}

struct Unit {
  absl::string_view name;
  double size;  // in what the flag counts
};

// A flag that counts something, by the end of its name.
struct Quantity {
  absl::string_view suffix;
  absl::string_view want;
  std::vector<Unit> units;
};

const std::vector<Quantity>& Quantities() {
  static const auto* const kQuantities = [] {
    const std::vector<Unit> bytes = {{"B", 1},        {"kB", 1e3},     {"MB", 1e6},
                                     {"GB", 1e9},     {"TB", 1e12},    {"KiB", 0x1p10},
                                     {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
    const auto times = [](double second) {
      return std::vector<Unit>{{"us", second * 1e-6},
                               {"ms", second * 1e-3},
                               {"s", second},
                               {"m", second * 60},
                               {"h", second * 3600}};
    };
    return new std::vector<Quantity>{
        {"_bytes", "a number of bytes, such as 1073741824, 512MiB or 1GiB", bytes},
        {"_us", "a number of microseconds, such as 500 or 2ms", times(1e6)},
        {"_ms", "a number of milliseconds, such as 500 or 2s", times(1e3)},
        {"_s", "a number of seconds, such as 2.5, 500ms or 5m", times(1)}};
  }();
  return *kQuantities;
}

// Null: the flag counts nothing that has units.
const Quantity* QuantityOf(absl::string_view name) {
  for (const Quantity& quantity : Quantities()) {
    if (absl::EndsWith(name, quantity.suffix)) return &quantity;
  }
  return nullptr;
}

// "1.5GiB" as "1610612736": what the flag's own parser takes. `text` itself where it has no unit of
// `quantity`, or where a flag of whole numbers would not get one.
std::string WithoutUnit(const absl::CommandLineFlag& flag, const Quantity& quantity,
                        absl::string_view text) {
  const size_t digits = text.find_last_of("0123456789.") + 1;  // npos + 1 is 0
  double number = 0;
  if (!absl::SimpleAtod(text.substr(0, digits), &number)) return std::string(text);
  for (const Unit& unit : quantity.units) {
    if (text.substr(digits) != unit.name) continue;
    const double value = number * unit.size;
    if (flag.IsOfType<double>()) return absl::StrFormat("%.17g", value);
    constexpr double kExact = 0x1p53;
    if (value == std::floor(value) && std::abs(value) <= kExact) {
      return absl::StrCat(static_cast<int64_t>(value));
    }
  }
  return std::string(text);
}

std::string VariableOf(absl::string_view flag) {
  return absl::StrCat(kEnvironmentPrefix, absl::AsciiStrToUpper(flag));
}

// The flags whose values are the environment's.
std::set<std::string, std::less<>>& FromEnvironment() {
  static auto* const kNames = new std::set<std::string, std::less<>>;
  return *kNames;
}

// Variables that the clients read: they say nothing to the server.
bool IsOfClients(absl::string_view variable) {
  return variable == "FLASHCORE_TARGET" || variable == "FLASHCORE_C_LIBRARY" ||
         variable == "FLASHCORE_CLIENT_TOKEN_FILE" ||
         absl::StartsWith(variable, "FLASHCORE_CLIENT_TLS_");
}

absl::Status ReadEnvironment(std::vector<std::string>* unknown) {
  std::set<std::string, std::less<>> known;
  for (const FlagGroup& group : FlagGroups()) {
    for (const char* name : group.flags) {
      const std::string& variable = *known.insert(VariableOf(name)).first;
      const char* value = std::getenv(variable.c_str());
      if (value == nullptr) continue;
      FromEnvironment().insert(name);
      const absl::Status status = SetFlag(absl::FindCommandLineFlag(name), value);
      if (!status.ok()) return status;
    }
  }
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const absl::string_view text = *entry;
    const absl::string_view variable = text.substr(0, text.find('='));
    if (absl::StartsWith(variable, kEnvironmentPrefix) && known.count(variable) == 0 &&
        !IsOfClients(variable)) {
      unknown->emplace_back(variable);
    }
  }
  return absl::OkStatus();
}

// A flag of the server; null if there is none.
absl::CommandLineFlag* FindFlag(absl::string_view name) {
  for (const FlagGroup& group : FlagGroups()) {
    for (const char* known : group.flags) {
      if (name == known) return absl::FindCommandLineFlag(name);
    }
  }
  return nullptr;
}

absl::Status ReadCommandLine(const std::vector<std::string>& args) {
  std::vector<std::string> listen;  // --listen may be given several times
  for (size_t i = 0; i < args.size(); ++i) {
    if (!absl::StartsWith(args[i], "-") || args[i] == "-" || args[i] == "--") {
      return absl::InvalidArgumentError(absl::StrCat("unexpected argument '", args[i], "'"));
    }
    absl::StatusOr<FlagArgument> given = ReadFlagArgument(args, &i, FindFlag);
    if (!given.ok()) return given.status();
    const absl::string_view name = given->flag->Name();
    FromEnvironment().erase(std::string(name));
    if (name == "listen") {
      listen.push_back(std::move(given->value));
      given->value = absl::StrJoin(listen, ",");
    }
    if (absl::Status status = SetFlag(given->flag, given->value); !status.ok()) return status;
  }
  return absl::OkStatus();
}

std::string HelpText() {
  std::string text =
      "flashcore-server: serves attention over gRPC\n\n"
      "Usage: flashcore-server [--flag=value | --flag value]...\n\n"
      "Each flag can also be set in the environment, as FLASHCORE_ and its name in capitals:\n"
      "FLASHCORE_LISTEN. The command line wins. Bytes and times take units: 512MiB, 1GiB, 500ms,\n"
      "2s, 5m.\n";
  for (const FlagGroup& group : FlagGroups()) {
    absl::StrAppend(&text, "\n", group.title, ":\n");
    for (const char* name : group.flags) absl::StrAppend(&text, FlagHelp(name));
  }
  return text;
}

}  // namespace

std::string FlagName(absl::string_view name) {
  if (FromEnvironment().count(name) == 0) return absl::StrCat("--", name);
  return absl::StrCat("environment variable ", VariableOf(name));
}

absl::Status FlagError(absl::string_view name, absl::string_view value, absl::string_view want) {
  return absl::InvalidArgumentError(absl::StrCat(FlagName(name), ": '", value, "' is not ", want));
}

absl::Status SetFlag(absl::CommandLineFlag* flag, absl::string_view text) {
  const Quantity* quantity = QuantityOf(flag->Name());
  const std::string value = quantity ? WithoutUnit(*flag, *quantity, text) : std::string(text);
  std::string ignored;
  if (flag->ParseFrom(value, &ignored)) return absl::OkStatus();
  return FlagError(flag->Name(), text, quantity ? quantity->want : AllowedValues(*flag));
}

absl::Status ReadFlags(int argc, char** argv, std::vector<std::string>* unknown_variables) {
  const std::vector<std::string> args(argv + std::min(argc, 1), argv + argc);
  for (const std::string& arg : args) {
    if (arg == "--help" || arg == "-help" || arg == "-h") {
      std::fputs(HelpText().c_str(), stdout);
      std::exit(0);
    }
    if (arg == "--version" || arg == "-version") {
      std::fputs("flashcore-server " FLASHCORE_VERSION "\n", stdout);
      std::exit(0);
    }
  }
  FromEnvironment().clear();
  if (absl::Status status = ReadEnvironment(unknown_variables); !status.ok()) return status;
  return ReadCommandLine(args);
}

}  // namespace flashcore::server
