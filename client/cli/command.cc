#include "client/cli/command.h"

#include <cstdio>
#include <cstdlib>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "nlohmann/json.hpp"
#include "proto/wire/flag_argument.h"

ABSL_FLAG(std::string, target, "",
          "address of the server, as host:port, unix:path or, of its --local_listen, local:/path; "
          "empty: $FLASHCORE_TARGET, else 127.0.0.1:7070");
ABSL_FLAG(absl::Duration, timeout, absl::Seconds(30),
          "deadline of each call, such as 500ms or 30s");
ABSL_FLAG(std::string, client_name, "",
          "name of this client, for servers with --insecure_client_names: they apply quotas and "
          "list sequences by it");
ABSL_FLAG(
    std::string, tls_ca_file, "",
    "PEM file with the CA that the server's certificate must be of; the system's are in "
    "/etc/ssl/certs/ca-certificates.crt. With any --tls flag, TCP connections take TLS; empty: "
    "$FLASHCORE_CLIENT_TLS_CA_FILE");
ABSL_FLAG(std::string, tls_cert_file, "",
          "PEM file with the client's certificate; empty: $FLASHCORE_CLIENT_TLS_CERT_FILE");
ABSL_FLAG(
    std::string, tls_key_file, "",
    "PEM file with the private key of --tls_cert_file; empty: $FLASHCORE_CLIENT_TLS_KEY_FILE");
ABSL_FLAG(std::string, tls_server_name, "",
          "name that the server's certificate is for, if it is not the host of --target; empty: "
          "$FLASHCORE_CLIENT_TLS_SERVER_NAME");
ABSL_FLAG(std::string, token_file, "",
          "file whose first line is the bearer token to send. Without TLS, it is only sent to an "
          "address of this host; empty: $FLASHCORE_CLIENT_TOKEN_FILE");
ABSL_FLAG(bool, http_proxy, false,
          "connect through the proxy of $grpc_proxy, $https_proxy or $http_proxy. Needs TLS; an "
          "address of this host never takes a proxy");
ABSL_FLAG(bool, json, false, "print the result as JSON");
ABSL_FLAG(flashcore::DType, dtype, flashcore::DType::kFloat16,
          "float16 or bfloat16: element type of the tensors sent");
ABSL_FLAG(flashcore::Layout, layout, flashcore::Layout::kNHD,
          "order of a tensor's axes: NHD is [rows, heads, head_dim], HND [heads, rows, head_dim]");

namespace flashcore::cli {
namespace {

std::vector<const char*> FlagNames(const Command& command) {
  std::vector<const char*> names = {
      "target",       "timeout",         "client_name", "tls_ca_file", "tls_cert_file",
      "tls_key_file", "tls_server_name", "token_file",  "http_proxy",  "json"};
  names.insert(names.end(), command.flags.begin(), command.flags.end());
  return names;
}

// Null if the command does not take it.
absl::CommandLineFlag* FindFlag(const Command& command, absl::string_view name) {
  for (const char* known : FlagNames(command)) {
    if (name == known) return absl::FindCommandLineFlag(name);
  }
  return nullptr;
}

constexpr size_t kHelpWidth = 90;

// Indents the lines of `text` and breaks them at kHelpWidth, unless they start with a space.
std::string Wrap(absl::string_view text, absl::string_view indent) {
  std::string out;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    while (line.size() > kHelpWidth && line[0] != ' ') {
      const size_t space = line.rfind(' ', kHelpWidth);
      absl::StrAppend(&out, indent, line.substr(0, space), "\n");
      line.remove_prefix(space + 1);
    }
    absl::StrAppend(&out, line.empty() ? "" : indent, line, "\n");
  }
  return out;
}

std::string TargetOfEnvironment() {
  const char* const target = std::getenv("FLASHCORE_TARGET");
  return target == nullptr ? "" : target;
}

// For an error, so that a forgotten variable is found.
std::string SourceOfTarget() {
  if (!absl::GetFlag(FLAGS_target).empty() || TargetOfEnvironment().empty()) return "";
  return absl::StrCat(" (target ", TargetOfEnvironment(), ", of $FLASHCORE_TARGET)");
}

absl::Status SetFlag(absl::CommandLineFlag* flag, absl::string_view value) {
  std::string error;
  if (flag->ParseFrom(value, &error)) return absl::OkStatus();
  // Flags with a grammar of their own say what they want.
  return absl::InvalidArgumentError(absl::StrCat(
      "--", flag->Name(), "=", value, ": ",
      absl::StrContains(error, "; ") ? error : absl::StrCat("not ", AllowedValues(*flag))));
}

}  // namespace

absl::Status ParseFlags(const Command& command, const std::vector<std::string>& args, bool* help) {
  *help = false;
  for (size_t i = 0; i < args.size(); ++i) {
    if (args[i] == "--help" || args[i] == "-h") {
      *help = true;
      return absl::OkStatus();
    }
    if (!absl::StartsWith(args[i], "--") || args[i] == "--") {
      return absl::InvalidArgumentError(absl::StrCat("stray argument '", args[i], "'"));
    }
    const auto find = [&command](absl::string_view name) { return FindFlag(command, name); };
    const absl::StatusOr<FlagArgument> given = ReadFlagArgument(args, &i, find);
    if (!given.ok()) return given.status();
    if (absl::Status status = SetFlag(given->flag, given->value); !status.ok()) return status;
  }
  return absl::OkStatus();
}

std::string HelpText(const Command& command) {
  std::string text = absl::StrCat("flashcore ", command.name, ": ", command.summary, "\n\n",
                                  Wrap(command.description, ""), "\nFlags:\n");
  for (const char* name : FlagNames(command)) {
    const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
    absl::StrAppend(&text, "  --", name);
    const std::string initial = flag->DefaultValue();
    if (!flag->IsOfType<bool>() && !initial.empty()) absl::StrAppend(&text, "=", initial);
    absl::StrAppend(&text, "\n", Wrap(flag->Help(), "      "));
  }
  return text;
}

std::string HelpText(const std::vector<Command>& commands) {
  std::string text =
      "flashcore: the command line of FlashCore, attention as a service\n\n"
      "Usage: flashcore COMMAND [--flag=value | --flag value]...\n\nCommands:\n";
  for (const Command& command : commands) {
    absl::StrAppendFormat(&text, "  %-11s%s\n", command.name, command.summary);
  }
  absl::StrAppend(&text,
                  "\n`flashcore COMMAND --help` describes a command and its flags.\n"
                  "Exit codes: 0 success, 1 an RPC, a file or a check failed, 2 usage.\n");
  return text;
}

int Main(const std::vector<Command>& commands, const std::vector<std::string>& args) {
  if (args.empty()) {
    std::fputs(HelpText(commands).c_str(), stderr);
    return kExitUsage;
  }
  if (args[0] == "--help" || args[0] == "-h" || args[0] == "help") {
    std::fputs(HelpText(commands).c_str(), stdout);
    return kExitOk;
  }
  for (const Command& command : commands) {
    if (args[0] != command.name) continue;
    bool help = false;
    const absl::Status status = ParseFlags(command, {args.begin() + 1, args.end()}, &help);
    if (!status.ok()) {
      return FailUsage(absl::StrCat(status.message(), " (see flashcore ", args[0], " --help)"));
    }
    if (help) {
      std::fputs(HelpText(command).c_str(), stdout);
      return kExitOk;
    }
    if (!command.connects) return command.run(nullptr);
    const auto client = Client::Create(Target(), OptionsFromFlags());
    return client.ok() ? command.run(client->get()) : FailTarget(client.status());
  }
  return FailUsage(absl::StrCat("unknown command '", args[0], "' (see flashcore --help)"));
}

std::string Target() {
  std::string target = absl::GetFlag(FLAGS_target);
  if (target.empty()) target = TargetOfEnvironment();
  return target.empty() ? "127.0.0.1:7070" : target;
}

ClientOptions OptionsFromFlags() {
  ClientOptions options;
  options.name = absl::GetFlag(FLAGS_client_name);
  options.timeout = absl::GetFlag(FLAGS_timeout);
  TlsOptions tls = {absl::GetFlag(FLAGS_tls_ca_file), absl::GetFlag(FLAGS_tls_cert_file),
                    absl::GetFlag(FLAGS_tls_key_file), absl::GetFlag(FLAGS_tls_server_name)};
  const bool any = !tls.ca_file.empty() || !tls.cert_file.empty() || !tls.key_file.empty() ||
                   !tls.server_name.empty();
  if (any) options.tls = std::move(tls);
  options.token_file = absl::GetFlag(FLAGS_token_file);
  options.http_proxy = absl::GetFlag(FLAGS_http_proxy);
  options.retry.max_attempts = 4;  // somebody waits: a server that is not there is said at once
  ReadEnvironment(&options);
  return options;
}

void Print(const nlohmann::ordered_json& json, const std::string& text) {
  // Bytes that are not UTF-8 become U+FFFD.
  const auto replace = nlohmann::ordered_json::error_handler_t::replace;
  const std::string line = json.dump(-1, ' ', false, replace) + "\n";
  std::fputs(absl::GetFlag(FLAGS_json) ? line.c_str() : text.c_str(), stdout);
}

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "flashcore: %s%s\n",
               status.ToString(absl::StatusToStringMode::kWithNoExtraData).c_str(),
               SourceOfTarget().c_str());
  return kExitFailure;
}

int FailTarget(const absl::Status& status) {
  return FailUsage(absl::StrCat(status.message(), SourceOfTarget()));
}

int FailUsage(absl::string_view problem) {
  std::fprintf(stderr, "flashcore: %s\n", std::string(problem).c_str());
  return kExitUsage;
}

}  // namespace flashcore::cli
