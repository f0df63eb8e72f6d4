#include "client/cpp/connection.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/cpp/grpc/transport.h"
#include "client/cpp/local/transport.h"
#include "client/cpp/status.h"

namespace flashcore::client {
namespace {

constexpr size_t kMaxNameBytes = 64;

absl::Status CheckRetry(const RetryPolicy& retry) {
  const auto error = [](absl::string_view field, absl::Duration found) {
    return absl::InvalidArgumentError(
        absl::StrCat("retry.", field, ": ", absl::FormatDuration(found), "; want more than 0"));
  };
  if (retry.max_attempts < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("retry.max_attempts: ", retry.max_attempts, "; want at least 0"));
  }
  if (retry.initial_backoff <= absl::ZeroDuration()) {
    return error("initial_backoff", retry.initial_backoff);
  }
  if (retry.max_backoff <= absl::ZeroDuration()) return error("max_backoff", retry.max_backoff);
  return absl::OkStatus();
}

absl::Status CheckName(absl::string_view name) {
  const bool printable =
      std::all_of(name.begin(), name.end(), [](char c) { return c >= ' ' && c <= '~'; });
  if (printable && name.size() <= kMaxNameBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("name: ", name.size(), " bytes", printable ? "" : ", not all printable",
                   "; want at most ", kMaxNameBytes, " of printable ASCII"));
}

}  // namespace

bool NeverSent(const absl::Status& status) {
  return absl::IsUnavailable(status) && (absl::StartsWith(status.message(), kNotConnected) ||
                                         absl::StartsWith(status.message(), kNotResolved));
}

std::optional<absl::Duration> NextBackoff(const RetryPolicy& policy, const absl::Status& status,
                                          bool safe_to_repeat, int attempts, absl::Time now,
                                          absl::Time deadline, absl::BitGenRef random) {
  if (!absl::IsUnavailable(status) || !(safe_to_repeat || NeverSent(status))) return std::nullopt;
  if (policy.max_attempts > 0 && attempts >= policy.max_attempts) return std::nullopt;
  absl::Duration ceiling = policy.initial_backoff;
  for (int i = 1; i < attempts && ceiling < policy.max_backoff; ++i) ceiling *= 2;
  ceiling = std::min(ceiling, policy.max_backoff);
  // Jitter, so that clients that failed at the same time do not retry at the same time.
  const absl::Duration wait = ceiling * absl::Uniform(random, 0.5, 1.0);
  if (now + wait >= deadline) return std::nullopt;
  return wait;
}

absl::StatusOr<std::shared_ptr<const Connection>> Connection::Create(absl::string_view target,
                                                                     ClientOptions options) {
  absl::Status status = CheckName(options.name);
  status.Update(CheckRetry(options.retry));
  if (!status.ok()) return status;
  if (options.timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("timeout: ", absl::FormatDuration(options.timeout),
                     "; want more than 0; absl::InfiniteDuration() for none"));
  }
  absl::string_view path = target;
  absl::StatusOr<std::shared_ptr<Transport>> transport =
      absl::ConsumePrefix(&path, "local:") ? local::LocalTransport::Create(path, options)
                                           : GrpcTransport::Create(target, options);
  if (!transport.ok()) return transport.status();
  return local::OwnHere<const Connection>(
      new Connection(std::move(options), *std::move(transport)));
}

Connection::Connection(ClientOptions options, std::shared_ptr<Transport> transport)
    : options_(std::move(options)),
      transport_(std::move(transport)),
      lease_(options_.lease ? std::make_unique<Lease>(this) : nullptr) {}

Connection::~Connection() = default;

absl::Status Connection::CheckProcess() const {
  if (OfThisProcess()) return absl::OkStatus();
  return absl::FailedPreconditionError(process_.Refusal());
}

std::optional<absl::Duration> Connection::Backoff(const absl::Status& status, bool safe_to_repeat,
                                                  int attempts, absl::Time deadline) const {
  if (status.ok()) return std::nullopt;
  transport_->PrepareRetry(status);
  absl::InsecureBitGen random;
  return NextBackoff(options_.retry, status, safe_to_repeat, attempts, absl::Now(), deadline,
                     random);
}

absl::Status Transport::ExplainDeadline(absl::Status status, absl::Time begin) const {
  if (!absl::IsDeadlineExceeded(status) || status.message() != kNoAnswer) return status;
  const absl::Duration waited = absl::Trunc(absl::Now() - begin, absl::Milliseconds(1));
  return absl::DeadlineExceededError(
      absl::StrCat(kNoAnswer, ", ", absl::FormatDuration(waited),
                   " after the call began; it may have taken effect, or still may",
                   connected() ? "" : "; at the moment there is no connection to the server"));
}

}  // namespace flashcore::client
