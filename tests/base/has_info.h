// A status's information for programs.
#ifndef FLASHCORE_TESTS_BASE_HAS_INFO_H_
#define FLASHCORE_TESTS_BASE_HAS_INFO_H_

#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "server/base/error_info.h"

namespace flashcore::server::testing {

// Matches a status whose ErrorInfo has exactly this.
inline ::testing::Matcher<const absl::Status&> HasInfo(
    const std::string& reason, const std::map<std::string, std::string>& metadata = {}) {
  return ::testing::ResultOf(
      [](const absl::Status& status) {
        ErrorInfo info = GetErrorInfo(status).value_or(ErrorInfo());
        return std::make_pair(std::move(info.reason), std::move(info.metadata));
      },
      ::testing::Eq(std::make_pair(reason, metadata)));
}

}  // namespace flashcore::server::testing

#endif  // FLASHCORE_TESTS_BASE_HAS_INFO_H_
