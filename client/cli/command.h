// Subcommands and what they share. Single-threaded.
#ifndef FLASHCORE_CLIENT_CLI_COMMAND_H_
#define FLASHCORE_CLIENT_CLI_COMMAND_H_

#include <string>
#include <vector>

#include "absl/flags/declare.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/cli/flag_types.h"
#include "flashcore/client.h"
#include "nlohmann/json_fwd.hpp"

// Defined in command.cc. Command::flags lists those that a subcommand takes.
ABSL_DECLARE_FLAG(bool, json);
ABSL_DECLARE_FLAG(flashcore::DType, dtype);
ABSL_DECLARE_FLAG(flashcore::Layout, layout);

namespace flashcore::cli {

// Exit codes.
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;  // an RPC, a file or a check failed
inline constexpr int kExitUsage = 2;    // the command line is wrong

struct Command {
  const char* name;
  const char* summary;  // one line
  // Paragraphs for --help. Lines are wrapped, unless they start with a space.
  const char* description;
  std::vector<const char*> flags;  // besides the common ones
  int (*run)(Client* client);      // after the flags were parsed; returns the exit code
  bool connects = true;            // to Target(); if false, `client` is null
};

Command InfoCommand();
Command SequencesCommand();
Command HealthCommand();
Command AttendCommand();

// Sets the flags of `command` from `args` ("--name=value", "--name value", "--bool", "--nobool").
// INVALID_ARGUMENT for a flag it does not take, a value that does not parse, or a stray argument;
// `*help` is set if --help was asked for.
absl::Status ParseFlags(const Command& command, const std::vector<std::string>& args, bool* help);

// The text of --help of a command, and of a program with these commands.
std::string HelpText(const Command& command);
std::string HelpText(const std::vector<Command>& commands);

// Runs the one of `commands` that args names: argv without the program's name. Returns the exit
// code.
int Main(const std::vector<Command>& commands, const std::vector<std::string>& args);

// The address to talk to: --target, else $FLASHCORE_TARGET, else 127.0.0.1:7070.
std::string Target();

// From the common flags, and from the environment where they are unset.
ClientOptions OptionsFromFlags();

// Prints `json` as one line if --json is set, else `text`. Numbers that JSON cannot express (NaN,
// infinities) become null.
void Print(const nlohmann::ordered_json& json, const std::string& text);

// Print "flashcore: ..." to stderr, and return kExitFailure and kExitUsage. Fail, and FailTarget of
// options that a client refuses, say so if the target is of the environment.
int Fail(const absl::Status& status);
int FailTarget(const absl::Status& status);
int FailUsage(absl::string_view problem);

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_CLI_COMMAND_H_
