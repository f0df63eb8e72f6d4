// The commands that measure and check a server. client/cli/main.cc adds them to the command line.
#ifndef FLASHCORE_CLIENT_BENCH_COMMANDS_H_
#define FLASHCORE_CLIENT_BENCH_COMMANDS_H_

#include "client/cli/command.h"

namespace flashcore::cli {

Command BenchCommand();
Command VerifyCommand();

}  // namespace flashcore::cli

#endif  // FLASHCORE_CLIENT_BENCH_COMMANDS_H_
