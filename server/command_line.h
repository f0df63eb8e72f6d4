// Reads the server's flags from the environment and the command line, and writes their help.
#ifndef FLASHCORE_SERVER_COMMAND_LINE_H_
#define FLASHCORE_SERVER_COMMAND_LINE_H_

#include "absl/status/status.h"

namespace flashcore::server {

// Sets the flags of options.cc. The command line wins over the environment. INVALID_ARGUMENT names
// the flag or variable and the value. --help and --version print and exit with 0, a flag that does
// not exist exits with 1.
absl::Status ReadFlags(int argc, char** argv);

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_COMMAND_LINE_H_
