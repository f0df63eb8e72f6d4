#include "server/command_line.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace flashcore::server {
namespace {

constexpr char kEnvironmentPrefix[] = "FLASHCORE_";

struct FlagGroup {
  const char* title;
  std::vector<const char*> flags;
};

// Every flag of options.cc once, in the order of --help. tests/check_flags.py checks that.
const std::vector<FlagGroup>& FlagGroups() {
  static const auto* const kGroups = new std::vector<FlagGroup>{
      {"The flags that matter most",
       {"listen", "metrics_listen", "device", "kv_memory_bytes", "staging_memory_bytes",
        "max_message_bytes", "evict", "sequence_idle_timeout_s", "drain_timeout_s", "log_level"}},
      {"Serving",
       {"local_listen", "metrics_token_file", "probe_listen", "max_queue_delay_us", "enable_echo",
        "enable_reflection"}},
      {"Who may call",
       {"tls_cert_file", "tls_key_file", "tls_client_ca_file", "token_file", "trusted_proxies",
        "insecure_client_names", "insecure_listen", "local_allow_overflow_uid"}},
      {"Connections",
       {"max_connections", "max_connections_per_host", "max_connections_per_client",
        "max_connection_streams", "handshake_timeout_s", "max_connection_age_s"}},
      {"Device",
       {"accumulate", "cpu_threads", "lanes", "idle_spin_us", "direct_io_bytes", "l2_window",
        "l2_budget_bytes", "pin_threads"}},
      {"Memory",
       {"sequence_metadata_bytes", "staging_wait_ms", "client_staging_bytes",
        "transport_memory_bytes", "unsent_reply_bytes", "shared_memory_bytes"}},
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

bool AsksForHelp(const std::vector<std::string>& args) {
  for (size_t i = 1; i < args.size() && args[i] != "--"; ++i) {
    if (args[i] == "--help" || args[i] == "-help" || args[i] == "-h") return true;
  }
  return false;
}

absl::Status ReadEnvironment() {
  for (const FlagGroup& group : FlagGroups()) {
    for (const char* name : group.flags) {
      const std::string variable = absl::StrCat(kEnvironmentPrefix, absl::AsciiStrToUpper(name));
      const char* value = std::getenv(variable.c_str());
      if (value == nullptr) continue;
      std::string error;
      if (!absl::FindCommandLineFlag(name)->ParseFrom(value, &error)) {
        return absl::InvalidArgumentError(
            absl::StrCat("environment variable ", variable, ": '", value, "': ", error));
      }
    }
  }
  return absl::OkStatus();
}

// Joins all occurrences of --listen in `args` into one: of an Abseil flag that is given twice, only
// the last value counts.
void JoinListen(std::vector<std::string>* args) {
  std::vector<std::string> rest;
  std::vector<std::string> listen;
  for (size_t i = 0; i < args->size(); ++i) {
    absl::string_view arg = (*args)[i];
    if (arg == "--") {  // no flags follow
      rest.insert(rest.end(), args->begin() + i, args->end());
      break;
    }
    if (i > 0 && (arg == "--listen" || arg == "-listen") && i + 1 < args->size()) {
      listen.push_back((*args)[++i]);
    } else if (i > 0 && (absl::StartsWith(arg, "--listen=") || absl::StartsWith(arg, "-listen="))) {
      listen.emplace_back(arg.substr(arg.find('=') + 1));
    } else {
      rest.emplace_back(arg);
    }
  }
  if (!listen.empty()) {
    rest.insert(rest.begin() + 1, absl::StrCat("--listen=", absl::StrJoin(listen, ",")));
  }
  *args = std::move(rest);
}

absl::Status ReadCommandLine(std::vector<std::string> args) {
  JoinListen(&args);
  std::vector<char*> pointers;
  pointers.reserve(args.size());
  for (std::string& arg : args) pointers.push_back(arg.data());
  const std::vector<char*> rest =
      absl::ParseCommandLine(static_cast<int>(pointers.size()), pointers.data());
  if (rest.size() > 1) {
    return absl::InvalidArgumentError(absl::StrCat("unexpected argument '", rest[1], "'"));
  }
  return absl::OkStatus();
}

std::string HelpText() {
  std::string text =
      "flashcore-server: serves attention over gRPC\n\n"
      "Usage: flashcore-server [--flag=value | --flag value]...\n\n"
      "Each flag can also be set in the environment, as FLASHCORE_ and its name in capitals:\n"
      "FLASHCORE_LISTEN. The command line wins.\n";
  for (const FlagGroup& group : FlagGroups()) {
    absl::StrAppend(&text, "\n", group.title, ":\n");
    for (const char* name : group.flags) absl::StrAppend(&text, FlagHelp(name));
  }
  return text;
}

}  // namespace

absl::Status ReadFlags(int argc, char** argv) {
  std::vector<std::string> args(argv, argv + argc);
  if (AsksForHelp(args)) {
    std::fputs(HelpText().c_str(), stdout);
    std::exit(0);
  }
  absl::FlagsUsageConfig config;
  config.version_string = [] { return "flashcore-server " FLASHCORE_VERSION "\n"; };
  absl::SetFlagsUsageConfig(config);
  if (absl::Status status = ReadEnvironment(); !status.ok()) return status;
  return ReadCommandLine(std::move(args));
}

}  // namespace flashcore::server
