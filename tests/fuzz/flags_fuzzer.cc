// Sets the server's flags in all the ways that there are. The options are within their limits or
// the error names its flag, and the environment gives the same options as the command line.
//
// An input is a list of lines. The first character of a line says how to set the flag:
//   e  in the environment       eNAME=VALUE
//   =  --NAME=VALUE             =NAME=VALUE
//   -  -NAME=VALUE              -NAME=VALUE
//   ,  --NAME VALUE             ,NAME=VALUE
//   !  --NAME, of a bool        !NAME
//   n  --noNAME, of a bool      nNAME
//   .  an argument, not a flag  .VALUE
// Lines of other forms, and those that would end the process with help or an unknown flag, are
// left out.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/command_line.h"
#include "server/options.h"
#include "tests/fuzz/require.h"

namespace flashcore::fuzz {
namespace {

using server::Options;
using Flags = std::map<std::string, absl::CommandLineFlag*>;

const Flags& ServerFlags() {
  static const auto* const kFlags = [] {
    auto* flags = new Flags;
    for (const auto& [name, flag] : absl::GetAllFlags()) {
      if (absl::EndsWith(flag->Filename(), "server/options.cc") ||
          absl::EndsWith(flag->Filename(), "server/resource_options.cc")) {
        (*flags)[std::string(name)] = flag;
      }
    }
    return flags;
  }();
  return *kFlags;
}

std::string Variable(const std::string& name) {
  return absl::StrCat("FLASHCORE_", absl::AsciiStrToUpper(name));
}

// The lines of an input, as the server gets them.
struct Setting {
  std::map<std::string, std::string> environment;  // by flag
  std::vector<std::string> arguments = {"flashcore-server"};
  std::map<std::string, std::string> values;  // of `arguments`, by flag
  bool has_bad_value = false;
  bool has_stray_argument = false;
};

// Whether the argument would end the process, or end the flags.
bool IsSpecial(const std::string& text) {
  return text == "--help" || text == "-help" || text == "-h" || text == "--";
}

bool Accepts(absl::CommandLineFlag* flag, const std::string& value) {
  const absl::FlagSaver saver;
  return server::SetFlag(flag, value).ok();
}

void AddArgument(char form, const std::string& name, const std::string& value, Setting* setting) {
  const bool is_bool = ServerFlags().at(name)->IsOfType<bool>();
  if (form == ',' && !is_bool && !IsSpecial(value)) {
    setting->arguments.insert(setting->arguments.end(), {absl::StrCat("--", name), value});
  } else {
    setting->arguments.push_back(absl::StrCat(form == '-' ? "-" : "--", name, "=", value));
  }
  const auto [before, first] = setting->values.emplace(name, value);
  if (!first) before->second = name == "listen" ? absl::StrCat(before->second, ",", value) : value;
}

void AddBool(char form, const std::string& name, Setting* setting) {
  const auto flag = ServerFlags().find(name);
  if (flag == ServerFlags().end() || !flag->second->IsOfType<bool>()) return;
  setting->arguments.push_back(absl::StrCat(form == 'n' ? "--no" : "--", name));
  setting->values[name] = form == 'n' ? "false" : "true";
}

void AddLine(const std::string& line, Setting* setting) {
  const char form = line.empty() ? '\0' : line[0];
  const std::pair<std::string, std::string> text =
      absl::StrSplit(line.substr(std::min<size_t>(line.size(), 1)), absl::MaxSplits('=', 1));
  const auto& [name, value] = text;
  if (form == '!' || form == 'n') return AddBool(form, name, setting);
  if (form == '.') {
    if (absl::StartsWith(name, "-")) return;
    setting->arguments.push_back(name);
    setting->has_stray_argument = true;
    return;
  }
  const auto flag = ServerFlags().find(name);
  if (flag == ServerFlags().end() || !absl::StrContains("e=-,", std::string(1, form))) return;
  const bool accepted = Accepts(flag->second, value);
  setting->has_bad_value |= !accepted;
  if (form == 'e') {
    // The last value is the one that counts, so a bad one stays bad.
    if (!accepted || setting->environment.count(name) == 0) setting->environment[name] = value;
  } else {
    AddArgument(form, name, value, setting);
  }
}

struct Outcome {
  absl::StatusOr<Options> options = absl::UnknownError("");
  std::map<std::string, std::string> values;  // of every flag
};

Outcome Parse(const std::map<std::string, std::string>& environment,
              std::vector<std::string> arguments) {
  const absl::FlagSaver saver;
  for (const auto& [name, value] : environment) {
    setenv(Variable(name).c_str(), value.c_str(), /*overwrite=*/1);
  }
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  Outcome outcome;
  outcome.options = server::ParseOptions(static_cast<int>(arguments.size()), pointers.data());
  for (const auto& [name, flag] : ServerFlags()) outcome.values[name] = flag->CurrentValue();
  for (const auto& [name, value] : environment) unsetenv(Variable(name).c_str());
  return outcome;
}

// The message, with the flag's name in place of its variable's.
std::string ByFlag(const absl::Status& status) {
  absl::string_view message = status.message();
  if (!absl::ConsumePrefix(&message, "environment variable FLASHCORE_")) {
    return std::string(message);
  }
  const size_t colon = message.find(':');
  return absl::StrCat("--", absl::AsciiStrToLower(message.substr(0, colon)), message.substr(colon));
}

void CheckError(const absl::Status& status, const Setting& setting) {
  const std::string message = ByFlag(status);
  Require(status.code() == absl::StatusCode::kInvalidArgument, status.ToString());
  if (setting.has_stray_argument && absl::StartsWith(message, "unexpected argument '")) return;
  const std::string name = message.substr(2, message.find(':') - 2);
  Require(absl::StartsWith(message, "--") && ServerFlags().count(name) == 1,
          absl::StrCat("an error that names no flag: ", message));
}

template <typename T>
bool In(T value, double low, double high) {
  return static_cast<double>(value) >= low && static_cast<double>(value) <= high;
}

// The limits that the rest of the server relies on.
void CheckLimits(const Options& options) {
  const auto& server = options.server;
  Require(!server.listen.empty(), "listen");
  Require(In(server.max_message_bytes, 1024, 0x1p31 - 1) &&
              server.transport_memory_bytes / 2 >= static_cast<size_t>(server.max_message_bytes),
          "message sizes");
  Require(server.unix_sockets.mode <= 0777 && (server.unix_sockets.mode & 0600) == 0600,
          "unix_socket_mode");
  Require(In(absl::ToDoubleSeconds(options.drain_timeout), 0, 86400), "drain_timeout_s");
  const auto& engine = options.engine;
  Require(In(engine.staging_memory_bytes, 0x1p20, 0x1p46), "staging_memory_bytes");
  Require(In(engine.staging_wait.count(), 0, 3600e9), "staging_wait_ms");
  Require(In(engine.max_request_flop, 0, 1e21), "max_request_gflop");
  Require(In(engine.batcher.max_launch.count(), 1e6, 6e10), "max_launch_ms");
  Require(In(engine.batcher.max_queue_delay.count(), 0, 1e9), "max_queue_delay_us");
  Require(In(engine.batcher.max_queue_requests, 1, 0x1p20), "max_queue_requests");
  Require(In(engine.sequences.idle_timeout.count(), 0, 1e17), "sequence_idle_timeout_s");
  const auto& device = options.device;
  Require(In(device.cpu.kv_memory_bytes, 0x1p22, 0x1p44), "kv_memory_bytes");
  Require(device.cpu.kv_hot_bytes <= device.cpu.kv_memory_bytes, "kv_hot_bytes");
  std::set<int> gpus;
  for (const auto& gpu : device.cuda) {
    Require(gpu.ordinal >= 0 && gpus.insert(gpu.ordinal).second, "device");
    Require(In(gpu.lanes, 1, 64) && In(gpu.idle_spin.count(), 0, 1e12), "lanes, idle_spin_us");
  }
  Require(!gpus.empty(), "no device");
  const std::set<int> cores(options.cores.begin(), options.cores.end());
  Require(cores.size() == options.cores.size(), "pin_threads");
}

void CheckInput(const std::string& text) {
  Setting setting;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    AddLine(std::string(line.substr(0, line.find('\0'))), &setting);
  }
  const Outcome outcome = Parse(setting.environment, setting.arguments);
  const bool refused = setting.has_bad_value || setting.has_stray_argument;
  Require(!refused || !outcome.options.ok(), "a bad value or a stray argument is accepted");
  if (outcome.options.ok()) {
    CheckLimits(*outcome.options);
  } else {
    CheckError(outcome.options.status(), setting);
  }
  if (refused) return;

  // The same values in the environment alone; those of the command line win.
  std::map<std::string, std::string> environment = setting.values;
  environment.insert(setting.environment.begin(), setting.environment.end());
  const Outcome same = Parse(environment, {"flashcore-server"});
  Require(ByFlag(same.options.status()) == ByFlag(outcome.options.status()),
          absl::StrCat("the environment differs: ", same.options.status().ToString(), " and ",
                       outcome.options.status().ToString()));
  for (const auto& [name, value] : outcome.values) {
    Require(
        same.values.at(name) == value,
        absl::StrCat("--", name, " is ", value, ", and in the environment ", same.values.at(name)));
  }
}

}  // namespace
}  // namespace flashcore::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  flashcore::fuzz::CheckInput(std::string(data, data + size));
  return 0;
}
