// Every kind of unusable file, for every flag that names a credential file: at start it ends the
// start by name, later it changes nothing, is logged and counted.
#include "server/access/credential_files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/telemetry/metrics_token.h"
#include "tests/access/test_certificates.h"
#include "tests/base/fake_clock.h"
#include "tests/transport/rpc_setup.h"

namespace flashcore::server {
namespace {

using ::testing::AllOf;
using testing::CertificateAndKey;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using testing::NewCertificate;
using ::testing::StartsWith;
using testing::WaitUntil;

// SHA-256 of "abc" and of "secret".
constexpr char kAbcLine[] =
    "alice:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad:research\n";
constexpr char kSecretLine[] =
    "bob:2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b:\n";

// The flags and, in the folder of a test, their files.
struct Kind {
  const char* flag;
  const char* name;
};
constexpr Kind kCert = {"--tls_cert_file", "cert"};
constexpr Kind kKey = {"--tls_key_file", "key"};
constexpr Kind kClientCa = {"--tls_client_ca_file", "ca"};
constexpr Kind kTokens = {"--token_file", "tokens"};
constexpr Kind kMetricsToken = {"--metrics_token_file", "metrics_token"};
constexpr Kind kKinds[] = {kCert, kKey, kClientCa, kTokens, kMetricsToken};

void Write(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

// `text` as UTF-16, the first byte of each pair first or last, without a byte order mark.
std::string Utf16(const std::string& text, bool big_endian) {
  std::string wide;
  for (const char c : text) {
    wide += big_endian ? std::string{'\0', c} : std::string{c, '\0'};
  }
  return wide;
}

// A way in which a file cannot be used. There is nothing at `path` when `make` comes.
struct Fault {
  const char* name;
  std::function<void(const std::string& path, const std::string& good)> make;
  const char* problem;         // what the error says; empty: it depends on the kind of file
  bool of_metrics_too = true;  // also a fault of a metrics token
};

std::vector<Fault> Faults() {
  const auto text = [](auto content_of) {
    return [content_of](const std::string& path, const std::string& good) {
      Write(path, content_of(good));
    };
  };
  const auto link = [](const char* target) {
    return [target](const std::string& path, const std::string&) {
      std::filesystem::create_symlink(target, path);
    };
  };
  using S = const std::string&;
  return {
      {"empty", text([](S) { return std::string(); }), "it is empty"},
      {"/dev/null", link("/dev/null"), "it is a pipe or a device; want a regular file"},
      {"blank", text([](S) { return std::string(" \t\r\n\n"); }), "it is blank"},
      {"comment only", text([](S) { return std::string("# to be filled\n"); }), ""},
      {"missing", [](S, S) {}, "No such file or directory"},
      {"folder", [](S path, S) { std::filesystem::create_directory(path); }, "it is a folder"},
      // Also for root.
      {"cannot be opened", [](S path, S) { std::filesystem::create_symlink(path, path); },
       "Too many levels of symbolic links"},
      {"cannot be read", link("/proc/self/mem"), "Input/output error"},
      {"pipe", [](S path, S) { ASSERT_EQ(mkfifo(path.c_str(), 0600), 0); },
       "it is a pipe or a device; want a regular file"},
      {"byte order mark", text([](S good) { return "\xEF\xBB\xBF" + good; }),
       "it begins with a byte order mark; save it as UTF-8 without one"},
      {"UTF-16", text([](S good) { return "\xFF\xFE" + Utf16(good, false); }),
       "it is UTF-16 or binary; save it as UTF-8 text"},
      {"UTF-16, big-endian", text([](S good) { return "\xFE\xFF" + Utf16(good, true); }),
       "it is UTF-16 or binary; save it as UTF-8 text"},
      {"UTF-16 without a mark", text([](S good) { return Utf16(good, false); }),
       "it is UTF-16 or binary; save it as UTF-8 text"},
      {"too large", text([](S good) { return good + std::string(1 << 20, '\n'); }),
       "more than 1048576 bytes"},
      {"something else", text([](S) { return std::string("<html>not found</html> here\n"); }), ""},
      // Half a token cannot be told from a token.
      {"half written", text([](S good) { return good.substr(0, good.size() / 2); }), "", false},
  };
}

class CredentialFilesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = absl::StrCat(::testing::TempDir(), "credential_files.XXXXXX");
    ASSERT_NE(mkdtemp(folder_.data()), nullptr);
    WriteGood();
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string Path(const Kind& kind) const { return absl::StrCat(folder_, "/", kind.name); }
  static std::string Good(const Kind& kind) {
    static const CertificateAndKey pair = NewCertificate();
    if (kind.name == kCert.name || kind.name == kClientCa.name) return pair.certificate;
    if (kind.name == kKey.name) return pair.key;
    return kind.name == kTokens.name ? kAbcLine : "secret\n";
  }
  void WriteGood() {
    for (const Kind& kind : kKinds) Replace(kind, Good(kind));
  }
  void Replace(const Kind& kind, const std::string& content) {
    std::filesystem::remove_all(Path(kind));
    Write(Path(kind), content);
  }
  void Break(const Kind& kind, const Fault& fault) {
    std::filesystem::remove_all(Path(kind));
    fault.make(Path(kind), Good(kind));
  }

  // As the server starts with all five flags.
  absl::Status Start() {
    metrics_ = std::make_unique<Metrics>(Metrics::Options());
    token_changes_ = 0;
    auto token = MetricsToken::Open(Path(kMetricsToken), &metrics_->metrics_token_reload_failures);
    if (!token.ok()) return token.status();
    metrics_token_ = *std::move(token);
    auto files = CredentialFiles::Start({{Path(kCert), Path(kKey), Path(kClientCa)}, Path(kTokens)},
                                        metrics_.get(), &clock_, [this](const TokenTable& tokens) {
                                          last_tokens_ = tokens.entries().size();
                                          ++token_changes_;
                                        });
    if (!files.ok()) return files.status();
    files_ = *std::move(files);
    return absl::OkStatus();
  }
  Counter& Failures(const Kind& kind) {
    if (kind.name == kTokens.name) return metrics_->token_reload_failures;
    return kind.name == kMetricsToken.name ? metrics_->metrics_token_reload_failures
                                           : metrics_->tls_reload_failures;
  }
  double AllFailures() {
    return Failures(kTokens).Value() + Failures(kMetricsToken).Value() + Failures(kCert).Value();
  }
  double Expiry() { return metrics_->tls_certificate_expiry_timestamp_seconds.Value(); }

  std::string folder_;
  testing::FakeClock clock_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<MetricsToken> metrics_token_;
  std::atomic<int> token_changes_{0};
  std::atomic<size_t> last_tokens_{0};
  std::unique_ptr<CredentialFiles> files_;  // last: its thread uses the others
};

TEST_F(CredentialFilesTest, AtStartAnUnusableOneIsAnErrorByName) {
  ASSERT_EQ(Start(), absl::OkStatus());
  EXPECT_EQ(token_changes_.load(), 1);
  files_.reset();
  for (const Kind& kind : kKinds) {
    for (const Fault& fault : Faults()) {
      if (kind.name == kMetricsToken.name && !fault.of_metrics_too) continue;
      SCOPED_TRACE(absl::StrCat(kind.flag, ": ", fault.name));
      Break(kind, fault);
      const absl::Status status = Start();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(status.message()),
                  AllOf(StartsWith(absl::StrCat(kind.flag, ": ", Path(kind), ": ")),
                        EndsWith(fault.problem)));
      EXPECT_EQ(token_changes_.load(), 0);
      files_.reset();
    }
    Replace(kind, Good(kind));
  }
}

TEST_F(CredentialFilesTest, LaterAnUnusableOneChangesNothingAndIsCounted) {
  const CertificateAndKey other = NewCertificate();
  for (const Kind& kind : kKinds) {
    for (const Fault& fault : Faults()) {
      if (kind.name == kMetricsToken.name && !fault.of_metrics_too) continue;
      SCOPED_TRACE(absl::StrCat(kind.flag, ": ", fault.name));
      ASSERT_EQ(Start(), absl::OkStatus());
      const double expiry = Expiry();
      Break(kind, fault);
      EXPECT_TRUE(metrics_token_->Is("secret"));
      EXPECT_FALSE(metrics_token_->Is(""));
      clock_.Advance(std::chrono::seconds(1));
      EXPECT_TRUE(WaitUntil([&] { return Failures(kind).Value() == 1; }));
      files_.reset();  // it has looked
      EXPECT_EQ(token_changes_.load(), 1);
      EXPECT_EQ(Expiry(), expiry);
      EXPECT_EQ(AllFailures(), 1);
      Replace(kind, Good(kind));
    }
  }
}

TEST_F(CredentialFilesTest, AGoodOneAfterAnUnusableOneIsUsed) {
  ASSERT_EQ(Start(), absl::OkStatus());
  Replace(kTokens, "");
  Replace(kMetricsToken, "");
  clock_.Advance(std::chrono::seconds(1));
  ASSERT_TRUE(WaitUntil([&] { return Failures(kTokens).Value() == 1; }));
  EXPECT_TRUE(metrics_token_->Is("secret"));
  Replace(kTokens, absl::StrCat(kAbcLine, kSecretLine));
  Replace(kMetricsToken, "next");
  clock_.Advance(std::chrono::seconds(1));
  EXPECT_TRUE(WaitUntil([&] { return last_tokens_.load() == 2; }));
  EXPECT_TRUE(metrics_token_->Is("next"));
  EXPECT_FALSE(metrics_token_->Is("secret"));
}

TEST_F(CredentialFilesTest, AreReadAtOnceWhenAsked) {
  ASSERT_EQ(Start(), absl::OkStatus());
  Replace(kTokens, absl::StrCat(kAbcLine, kSecretLine));
  files_->ReloadSoon();  // and time stands still
  EXPECT_TRUE(WaitUntil([&] { return last_tokens_.load() == 2; }));
  auto none = CredentialFiles::Start({}, metrics_.get(), &clock_, nullptr);
  ASSERT_TRUE(none.ok()) << none.status();
  (*none)->ReloadSoon();
}

TEST_F(CredentialFilesTest, AProblemIsCountedOnce) {
  Counter& failures =
      (metrics_ = std::make_unique<Metrics>(Metrics::Options()))->metrics_token_reload_failures;
  ReloadReport report(&failures);
  for (int i = 0; i < 3; ++i) report.Looked(absl::InvalidArgumentError("it is empty"));
  EXPECT_EQ(failures.Value(), 1);
  report.Looked(absl::InvalidArgumentError("it is blank"));
  EXPECT_EQ(failures.Value(), 2);
  report.Looked(absl::OkStatus());
  report.Looked(absl::InvalidArgumentError("it is blank"));
  EXPECT_EQ(failures.Value(), 3);
}

// However much of a chain, of a key or of a list of tokens has been written, it is used only where
// a whole certificate or line ends, since that is a file that somebody could mean.
TEST_F(CredentialFilesTest, NoPartOfACertificateOrKeyIsTakenForTheWhole) {
  const std::string one = Good(kCert), chain = one + NewCertificate().certificate;
  for (const Kind& kind : {kCert, kClientCa, kKey}) {
    const std::string whole = kind.name == kKey.name ? Good(kKey) : chain;
    size_t usable = 0;
    for (size_t size = 1; size <= whole.size(); ++size) {
      Replace(kind, whole.substr(0, size));
      if (TlsMaterial::Load({Path(kCert), Path(kKey), Path(kClientCa)}).ok()) ++usable;
    }
    // With and without the last line's end.
    EXPECT_EQ(usable, kind.name == kKey.name ? 2 : 4) << kind.flag;
    Replace(kind, Good(kind));
  }
}

TEST_F(CredentialFilesTest, AKeyOfAnotherCertificateIsRefused) {
  Replace(kKey, NewCertificate().key);
  EXPECT_EQ(Start().message(),
            absl::StrCat("--tls_key_file: ", Path(kKey),
                         ": not the key of the first certificate in ", Path(kCert)));
}

// gRPC would start with it, and fail every handshake.
TEST_F(CredentialFilesTest, ACertificateThatOpenSslDoesNotServeWithIsRefused) {
  const CertificateAndKey weak = testing::NewWeakCertificate();
  Replace(kCert, weak.certificate);
  Replace(kKey, weak.key);
  EXPECT_THAT(std::string(Start().message()),
              AllOf(StartsWith(absl::StrCat("--tls_cert_file: ", Path(kCert), ": ")),
                    HasSubstr("key too small")));
}

}  // namespace
}  // namespace flashcore::server
