// Checks the values of the server's flags.
#ifndef FLASHCORE_SERVER_FLAG_CHECKER_H_
#define FLASHCORE_SERVER_FLAG_CHECKER_H_

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "server/command_line.h"

namespace flashcore::server {

// Keeps the first error.
class FlagChecker {
 public:
  // Returns the flag's value. An error unless it lies in [low, high]; then returns `low`, which
  // callers can convert and scale without an overflow.
  template <typename T>
  T Range(const absl::Flag<T>& flag, std::decay_t<T> low, std::decay_t<T> high) {
    const T value = absl::GetFlag(flag);
    if (value >= low && value <= high) return value;
    if (status_.ok()) {
      status_ = FlagError(NameOf(flag), absl::StrCat(value), absl::StrCat("in ", low, "..", high));
    }
    return low;
  }
  // Returns the choice that the flag names. An error, and the first one, if it names none.
  template <typename T>
  T Choice(const absl::Flag<std::string>& flag,
           const std::vector<std::pair<absl::string_view, T>>& choices) {
    const std::string value = absl::GetFlag(flag);
    std::vector<absl::string_view> names;
    for (const auto& [name, choice] : choices) {
      if (value == name) return choice;
      names.push_back(name);
    }
    const absl::string_view last = names.back();
    names.pop_back();
    Require(false, flag, value, absl::StrCat(absl::StrJoin(names, ", "), " or ", last));
    return choices.front().second;
  }
  template <typename T>
  void Require(bool ok, const absl::Flag<T>& flag, absl::string_view value,
               absl::string_view want) {
    if (status_.ok() && !ok) {
      status_ = FlagError(NameOf(flag), value, want);
    }
  }
  const absl::Status& status() const { return status_; }

 private:
  template <typename T>
  static absl::string_view NameOf(const absl::Flag<T>& flag) {
    return absl::GetFlagReflectionHandle(flag).Name();
  }

  absl::Status status_;
};

}  // namespace flashcore::server

#endif  // FLASHCORE_SERVER_FLAG_CHECKER_H_
