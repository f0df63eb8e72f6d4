// The one reader of flags on a command line, for the server and the command line of the client.
#ifndef FLASHCORE_PROTO_WIRE_FLAG_ARGUMENT_H_
#define FLASHCORE_PROTO_WIRE_FLAG_ARGUMENT_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"

namespace flashcore {

// The value that a flag of one of Abseil's types takes: "a whole number".
inline absl::string_view AllowedValues(const absl::CommandLineFlag& flag) {
  if (flag.IsOfType<bool>()) return "true or false";
  if (flag.IsOfType<absl::Duration>()) return "a time, such as 500ms, 2s or 5m";
  if (flag.IsOfType<float>() || flag.IsOfType<double>() || flag.IsOfType<std::optional<float>>()) {
    return "a number";
  }
  return flag.IsOfType<uint32_t>() || flag.IsOfType<uint64_t>() ? "a whole number, not negative"
                                                                : "a whole number";
}

struct FlagArgument {
  absl::CommandLineFlag* flag;
  std::string value;
};

// Reads args[*i]: "--name=value", "--name value", "--bool" or "--nobool", with one or two dashes.
// Advances *i if the value is the next argument. `find` gives the flag of a name, or null.
// INVALID_ARGUMENT: there is no such flag, or it has no value.
inline absl::StatusOr<FlagArgument> ReadFlagArgument(
    const std::vector<std::string>& args, size_t* i,
    absl::FunctionRef<absl::CommandLineFlag*(absl::string_view)> find) {
  const std::string& given = args[*i];
  absl::string_view arg = given;
  if (absl::ConsumePrefix(&arg, "-")) absl::ConsumePrefix(&arg, "-");
  const size_t equals = arg.find('=');
  const bool has_value = equals != arg.npos;
  absl::string_view name = arg.substr(0, equals);
  absl::CommandLineFlag* flag = find(name);
  if (flag == nullptr && !has_value && absl::ConsumePrefix(&name, "no")) {
    flag = find(name);
    if (flag != nullptr && flag->IsOfType<bool>()) return FlagArgument{flag, "false"};
    flag = nullptr;
  }
  if (flag == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("unknown flag ", given.substr(0, given.find('='))));
  }
  if (has_value) return FlagArgument{flag, std::string(arg.substr(equals + 1))};
  if (flag->IsOfType<bool>()) return FlagArgument{flag, "true"};
  if (*i + 1 >= args.size()) {
    return absl::InvalidArgumentError(absl::StrCat("--", name, ": no value"));
  }
  return FlagArgument{flag, args[++*i]};
}

}  // namespace flashcore

#endif  // FLASHCORE_PROTO_WIRE_FLAG_ARGUMENT_H_
