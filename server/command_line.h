// Reads the server's flags from the environment and the command line, and writes their help.
#ifndef FLASHCORE_SERVER_COMMAND_LINE_H_
#define FLASHCORE_SERVER_COMMAND_LINE_H_

#include <string>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace flashcore::server {

// Sets the flags of options.cc and resource_options.cc. The command line wins over the environment.
// Flags that end in _bytes, _us, _ms or _s take a plain number or one with a unit: 512MiB, 1GiB,
// 500ms, 2s, 5m.
// `*unknown_variables` gets the names of environment variables that look like a flag's and are none
// of the server's or the clients'. INVALID_ARGUMENT names the flag or variable, the value, and what
// is allowed. --help and --version print and exit with 0.
absl::Status ReadFlags(int argc, char** argv, std::vector<std::string>* unknown_variables);

// Sets one flag from its text. INVALID_ARGUMENT says what it takes.
absl::Status SetFlag(absl::CommandLineFlag* flag, absl::string_view text);

// How a user knows the value of the flag `name`, after ReadFlags: "--lanes", or "environment
// variable FLASHCORE_LANES".
std::string FlagName(absl::string_view name);

// INVALID_ARGUMENT: "--lanes: '0' is not in 1..64", where `want` is "in 1..64".
absl::Status FlagError(absl::string_view name, absl::string_view value, absl::string_view want);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_COMMAND_LINE_H_
