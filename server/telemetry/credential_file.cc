#include "server/telemetry/credential_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/base/socket.h"
#include "server/telemetry/log.h"

namespace flashcore::server {
namespace {

constexpr size_t kMaxFileBytes = 1 << 20;

// Why `content` cannot be credentials of any kind; empty: it can.
std::string ProblemOf(const std::string& content) {
  if (content.size() > kMaxFileBytes) return absl::StrCat("more than ", kMaxFileBytes, " bytes");
  if (content.empty()) return "it is empty";
  if (absl::StartsWith(content, "\xEF\xBB\xBF")) {
    return "it begins with a byte order mark; save it as UTF-8 without one";
  }
  if (absl::StartsWith(content, "\xFF\xFE") || absl::StartsWith(content, "\xFE\xFF") ||
      absl::StrContains(content, '\0')) {
    return "it is UTF-16 or binary; save it as UTF-8 text";
  }
  if (absl::StripAsciiWhitespace(content).empty()) return "it is blank";
  return "";
}

}  // namespace

absl::StatusOr<std::string> CredentialFile::Read() const {
  // Not to be held up by a pipe without a writer.
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat about = {};
  if (!file.valid() || fstat(file.get(), &about) != 0) return Error(strerror(errno));
  if (S_ISDIR(about.st_mode)) return Error("it is a folder");
  if (!S_ISREG(about.st_mode)) return Error("it is a pipe or a device; want a regular file");
  std::string content;
  char buffer[16384];
  ssize_t got = 0;
  do {
    got = read(file.get(), buffer, sizeof(buffer));
    if (got > 0) content.append(buffer, static_cast<size_t>(got));
  } while (content.size() <= kMaxFileBytes && (got > 0 || (got < 0 && errno == EINTR)));
  if (got < 0) return Error(strerror(errno));
  if (const std::string problem = ProblemOf(content); !problem.empty()) return Error(problem);
  return content;
}

absl::Status CredentialFile::Error(absl::string_view problem) const {
  return absl::InvalidArgumentError(absl::StrCat(flag, ": ", path, ": ", problem));
}

void ReloadReport::Looked(const absl::Status& status) {
  if (status.message() == last_) return;
  last_ = std::string(status.message());
  if (status.ok()) return;
  if (failures_ != nullptr) failures_->Increment();
  LogWarning("new credentials cannot be used; the ones before stay in use",
             {{"error", status.message()}});
}

}  // namespace flashcore::server
