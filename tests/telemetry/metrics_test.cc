#include "server/telemetry/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/base/error_info.h"
#include "server/telemetry/metrics_server.h"
#include "tests/telemetry/example_metrics.h"
#include "tests/telemetry/http_get.h"

namespace flashcore::server {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

constexpr char kAttendLabels[] =
    "grpc_method=\"Attend\",grpc_service=\"flashcore.v1.AttentionService\",grpc_type=\"unary\"";

std::string RejectedSeries(absl::string_view reason) {
  return absl::StrCat("flashcore_rejected_requests_total{reason=\"", reason, "\"}");
}

// Errors, with the reason that they count as and the outcome.
struct Rejection {
  absl::Status status;
  std::string reason;
  Outcome outcome;
};
std::vector<Rejection> Rejections() {
  std::vector<Rejection> rejections = {
      {absl::UnavailableError(""), "UNAVAILABLE", Outcome::kRefused},
      {absl::ResourceExhaustedError(""), "RESOURCE_EXHAUSTED", Outcome::kRefused},
      {absl::InvalidArgumentError(""), "INVALID_ARGUMENT", Outcome::kClientError},
      {absl::NotFoundError(""), "NOT_FOUND", Outcome::kClientError},
      {absl::PermissionDeniedError(""), "PERMISSION_DENIED", Outcome::kClientError},
      {absl::UnauthenticatedError(""), "UNAUTHENTICATED", Outcome::kClientError},
      {absl::FailedPreconditionError(""), "FAILED_PRECONDITION", Outcome::kClientError},
      {absl::UnimplementedError(""), "UNIMPLEMENTED", Outcome::kClientError},
      {absl::CancelledError(""), "CANCELLED", Outcome::kClientError},
      {absl::DeadlineExceededError(""), "DEADLINE_EXCEEDED", Outcome::kExpired},
      {absl::InternalError(""), "INTERNAL", Outcome::kError},
      {absl::DataLossError(""), "INTERNAL", Outcome::kError},
      {absl::UnknownError(""), "INTERNAL", Outcome::kError},
      {WithInfo(absl::ResourceExhaustedError(""), "SOMETHING_ELSE"), "INTERNAL", Outcome::kError}};
  for (const char* full : {"QUEUE_FULL", "STAGING_FULL", "KV_FULL", "SERVER_FULL"}) {
    rejections.push_back(
        {WithInfo(absl::ResourceExhaustedError(""), full), full, Outcome::kRefused});
  }
  for (const char* of_client : {"QUOTA_EXCEEDED", "REPLIES_FULL", "TOO_LARGE", "SEQUENCE_LOST",
                                "REGION_LOST", "LEASE_LOST", "LENGTH_MISMATCH", "UNKNOWN_FIELD"}) {
    rejections.push_back(
        {WithInfo(absl::ResourceExhaustedError(""), of_client), of_client, Outcome::kClientError});
  }
  return rejections;
}

class MetricsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto server = MetricsServer::Start({"127.0.0.1:0"}, &metrics_);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  std::string Scrape() { return HttpBody(HttpGet(server_->port(), "/metrics")); }

  // By series, its labels included.
  std::map<std::string, double> ScrapeValues() {
    std::map<std::string, double> values;
    for (absl::string_view line : absl::StrSplit(Scrape(), '\n', absl::SkipEmpty())) {
      if (line[0] == '#') continue;
      const size_t space = line.rfind(' ');
      double value = std::nan("");
      EXPECT_TRUE(absl::SimpleAtod(line.substr(space + 1), &value)) << line;
      EXPECT_TRUE(values.emplace(std::string(line.substr(0, space)), value).second)
          << "twice: " << line;
    }
    return values;
  }

  Metrics metrics_{ExampleOptions()};
  std::unique_ptr<MetricsServer> server_;
};

TEST_F(MetricsTest, AllSeriesAreThereAtZeroFromTheStart) {
  const std::map<std::string, double> values = ScrapeValues();
  const auto expect_zero = [&](const std::string& series) {
    const auto found = values.find(series);
    ASSERT_NE(found, values.end()) << series;
    EXPECT_EQ(found->second, 0) << series;
  };
  const auto expect_empty_histogram = [&](const std::string& name, const std::string& labels) {
    const std::string braces = labels.empty() ? "" : "{" + labels + "}";
    expect_zero(name + "_count" + braces);
    expect_zero(name + "_sum" + braces);
    expect_zero(name + "_bucket{" + labels + (labels.empty() ? "" : ",") + "le=\"+Inf\"}");
  };
  const std::vector<std::string> attending = {"Attend", "AttendStream", "LoadSequence"};
  for (const std::string& rpc : attending) {
    for (const char* phase : {"receive", "reply", "staging_wait"}) {
      expect_empty_histogram(
          "flashcore_request_phase_seconds",
          absl::StrCat("phase=\"", phase, "\",rpc=\"", rpc, "\",transport=\"grpc\""));
    }
  }
  for (const char* rpc : {"Attend", "AttendStream", "LoadSequence", "Delete"}) {
    for (const char* outcome : {"ok", "refused", "client_error", "expired", "error"}) {
      expect_empty_histogram(
          "flashcore_request_duration_seconds",
          absl::StrCat("outcome=\"", outcome, "\",rpc=\"", rpc, "\",transport=\"grpc\""));
    }
  }
  expect_zero("flashcore_inflight_requests");
  expect_zero("flashcore_serving");
  expect_zero("flashcore_log_records_dropped_total");
  for (const char* name : {"cpu", "cuda:0"}) {
    const std::string device = absl::StrCat("device=\"", name, "\"");
    const auto of_device = [&](const std::string& series, const std::string& labels) {
      return absl::StrCat(series, "{", device, labels.empty() ? "" : ",", labels, "}");
    };
    for (const std::string& rpc : attending) {
      for (const char* phase : {"queue", "copy_in", "kernel", "copy_out"}) {
        expect_empty_histogram(
            "flashcore_request_phase_seconds",
            absl::StrCat(device, ",phase=\"", phase, "\",rpc=\"", rpc, "\",transport=\"grpc\""));
      }
    }
    expect_empty_histogram("flashcore_batch_requests", device);
    expect_empty_histogram("flashcore_batch_query_rows", device);
    expect_zero(of_device("flashcore_queue_depth", ""));
    expect_zero(of_device("flashcore_queue_capacity", ""));
    expect_zero(of_device("flashcore_staging_bytes", "state=\"used\""));
    expect_zero(of_device("flashcore_staging_bytes", "state=\"free\""));
    expect_zero(of_device("flashcore_sequences", ""));
    for (const char* reason : {"idle", "lru", "lease"}) {
      expect_zero(
          of_device("flashcore_sequences_evicted_total", absl::StrCat("reason=\"", reason, "\"")));
    }
    for (const std::string segment : {"hot", "cold"}) {
      for (const char* state : {"used", "free"}) {
        expect_zero(of_device("flashcore_kv_bytes",
                              absl::StrCat("segment=\"", segment, "\",state=\"", state, "\"")));
      }
      expect_zero(of_device("flashcore_kv_read_bytes_total", "segment=\"" + segment + "\""));
      expect_zero(of_device("flashcore_kv_moved_bytes_total", "to=\"" + segment + "\""));
    }
  }
  for (const auto& [status, reason, outcome] : Rejections()) expect_zero(RejectedSeries(reason));
  expect_zero(RejectedSeries("UNREAD"));
  expect_zero(absl::StrCat("grpc_server_started_total{", kAttendLabels, "}"));
  for (const char* code :
       {"OK", "Canceled", "Unknown", "InvalidArgument", "DeadlineExceeded", "NotFound",
        "AlreadyExists", "PermissionDenied", "ResourceExhausted", "FailedPrecondition", "Aborted",
        "OutOfRange", "Unimplemented", "Internal", "Unavailable", "DataLoss", "Unauthenticated"}) {
    expect_zero(
        absl::StrCat("grpc_server_handled_total{grpc_code=\"", code, "\",", kAttendLabels, "}"));
  }
}

TEST_F(MetricsTest, InfoMetricsAreOne) {
  const std::string text = Scrape();
  EXPECT_THAT(text, HasSubstr("flashcore_build_info{version=\"1.2.3\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("flashcore_device_info{arch=\"AVX2\",device=\"cpu\","
                              "name=\"Some \\\"CPU\\\"\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("flashcore_device_info{arch=\"sm_89\",device=\"cuda:0\","
                              "name=\"NVIDIA L4\"} 1\n"));
}

TEST_F(MetricsTest, EveryDeviceSaysWhatItsL2Keeps) {
  const std::string text = Scrape();
  EXPECT_THAT(text, HasSubstr("flashcore_l2_window_bytes{device=\"cpu\"} 0\n"));
  EXPECT_THAT(text, HasSubstr("flashcore_l2_persisting_bytes{device=\"cpu\"} 0\n"));
  EXPECT_THAT(text, HasSubstr("flashcore_l2_window_bytes{device=\"cuda:0\"} 4194304\n"));
  EXPECT_THAT(text, HasSubstr("flashcore_l2_persisting_bytes{device=\"cuda:0\"} 5242880\n"));
}

TEST_F(MetricsTest, HistogramText) {
  Histogram& batch_requests = metrics_.device(0).batch_requests;
  batch_requests.Observe(1);
  batch_requests.Observe(3);
  batch_requests.Observe(1000);
  const std::string text = Scrape();
  EXPECT_THAT(text, HasSubstr("# HELP flashcore_batch_requests Requests per launch.\n"
                              "# TYPE flashcore_batch_requests histogram\n"));
  EXPECT_THAT(text, HasSubstr("flashcore_batch_requests_count{device=\"cpu\"} 3\n"
                              "flashcore_batch_requests_sum{device=\"cpu\"} 1004\n"
                              "flashcore_batch_requests_bucket{device=\"cpu\",le=\"1\"} 1\n"
                              "flashcore_batch_requests_bucket{device=\"cpu\",le=\"2\"} 1\n"
                              "flashcore_batch_requests_bucket{device=\"cpu\",le=\"4\"} 2\n"
                              "flashcore_batch_requests_bucket{device=\"cpu\",le=\"8\"} 2\n"
                              "flashcore_batch_requests_bucket{device=\"cpu\",le=\"16\"} 2\n"
                              "flashcore_batch_requests_bucket{device=\"cpu\",le=\"32\"} 2\n"
                              "flashcore_batch_requests_bucket{device=\"cpu\",le=\"64\"} 2\n"
                              "flashcore_batch_requests_bucket{device=\"cpu\",le=\"128\"} 2\n"
                              "flashcore_batch_requests_bucket{device=\"cpu\",le=\"256\"} 2\n"
                              "flashcore_batch_requests_bucket{device=\"cpu\",le=\"+Inf\"} 3\n"));
}

// Bounds as people write them in queries, not as binary fractions.
TEST_F(MetricsTest, LatencyBoundsRead) {
  const std::string text = Scrape();
  for (const char* bound : {"1e-06", "2.2e-05", "0.0005", "0.22", "10", "+Inf"}) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat(
                          "flashcore_request_phase_seconds_bucket{phase=\"receive\",rpc=\"Attend\","
                          "transport=\"grpc\",le=\"",
                          bound, "\"} 0\n")));
  }
}

TEST_F(MetricsTest, RpcRecordsSuccessAndFailure) {
  RpcMetrics* rpc = metrics_.Rpc(kExampleService, "Attend");
  ASSERT_NE(rpc, nullptr);
  for (const int code : {0, 0, 3, 16, 17, -1}) {
    rpc->RecordStart();
    rpc->RecordEnd(code);
  }
  for (const Outcome outcome : {Outcome::kOk, Outcome::kRefused, Outcome::kOk, Outcome::kError}) {
    rpc->RecordRequest(outcome, 0.25, 0);
  }
  std::map<std::string, double> values = ScrapeValues();
  const auto handled = [&](const char* code) {
    return values[absl::StrCat("grpc_server_handled_total{grpc_code=\"", code, "\",", kAttendLabels,
                               "}")];
  };
  EXPECT_EQ(handled("OK"), 2);
  EXPECT_EQ(handled("InvalidArgument"), 1);
  EXPECT_EQ(handled("Unauthenticated"), 1);
  EXPECT_EQ(handled("Unknown"), 2);
  EXPECT_EQ(values[absl::StrCat("grpc_server_started_total{", kAttendLabels, "}")], 6);
  const auto seconds = [&](const char* outcome, const char* method) {
    return values[absl::StrCat("flashcore_request_duration_seconds_sum{outcome=\"", outcome,
                               "\",rpc=\"", method, "\",transport=\"grpc\"}")];
  };
  EXPECT_EQ(seconds("ok", "Attend"), 0.5);
  EXPECT_EQ(seconds("refused", "Attend"), 0.25);
  EXPECT_EQ(seconds("client_error", "Attend"), 0);
  EXPECT_EQ(seconds("expired", "Attend"), 0);
  EXPECT_EQ(seconds("error", "Attend"), 0.25);
  EXPECT_EQ(seconds("ok", "AttendStream"), 0);
}

TEST_F(MetricsTest, UnknownRpcHasNoHandle) {
  EXPECT_EQ(metrics_.Rpc(kExampleService, "Missing"), nullptr);
  EXPECT_EQ(metrics_.Rpc("other.Service", "Attend"), nullptr);
}

TEST_F(MetricsTest, RejectionsCountByReason) {
  std::map<std::string, double> expected;
  for (const auto& [status, reason, outcome] : Rejections()) {
    metrics_.CountRejected(status);
    ++expected[RejectedSeries(reason)];
  }
  std::map<std::string, double> values = ScrapeValues();
  for (const auto& [series, count] : expected) EXPECT_EQ(values[series], count) << series;
}

TEST(OutcomeTest, FollowsFromTheReason) {
  EXPECT_EQ(OutcomeOf(absl::OkStatus()), Outcome::kOk);
  for (const auto& [status, reason, outcome] : Rejections()) {
    EXPECT_EQ(OutcomeOf(status), outcome) << status;
  }
}

TEST_F(MetricsTest, GaugesAndPhases) {
  metrics_.inflight_requests.Increment(5);
  metrics_.device(0).queue_depth.Increment(3);
  metrics_.device(1).queue_depth.Increment(4);
  metrics_.device(1).staging_free_bytes.Set(4096);
  RpcMetrics* const stream = metrics_.Rpc(kExampleService, "AttendStream");
  stream->RecordRequest(Outcome::kOk, 5, 2);
  stream->RecordReceive(1, 0);
  metrics_.Rpc(kExampleService, "Delete")->RecordRequest(Outcome::kOk, 5, 2);  // has no phases
  metrics_.device(1).PhaseSeconds(Phase::kKernel, stream->number()).Observe(3);
  std::map<std::string, double> values = ScrapeValues();
  EXPECT_EQ(values["flashcore_inflight_requests"], 5);
  const auto phase = [&](const std::string& name) {
    return values[absl::StrCat("flashcore_request_phase_seconds_", name,
                               "\",rpc=\"AttendStream\",transport=\"grpc\"}")];
  };
  EXPECT_EQ(phase("sum{phase=\"reply"), 2);
  EXPECT_EQ(phase("sum{phase=\"receive"), 1);
  EXPECT_EQ(phase("count{phase=\"staging_wait"), 0);
  EXPECT_EQ(phase("sum{device=\"cuda:0\",phase=\"kernel"), 3);
  EXPECT_EQ(values["flashcore_queue_depth{device=\"cpu\"}"], 3);
  EXPECT_EQ(values["flashcore_queue_depth{device=\"cuda:0\"}"], 4);
  EXPECT_EQ(values["flashcore_staging_bytes{device=\"cpu\",state=\"free\"}"], 0);
  EXPECT_EQ(values["flashcore_staging_bytes{device=\"cuda:0\",state=\"free\"}"], 4096);
}

TEST_F(MetricsTest, ProcessMetricsAreSane) {
  std::map<std::string, double> values = ScrapeValues();
  const double now =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  EXPECT_NEAR(values["process_start_time_seconds"], now, 600);
  EXPECT_GT(values["process_resident_memory_bytes"], 1e6);
  EXPECT_GT(values["process_virtual_memory_bytes"], values["process_resident_memory_bytes"]);
  EXPECT_GE(values["process_threads"], 2);
  EXPECT_GE(values["process_open_fds"], 3);
  EXPECT_GE(values["process_max_fds"], values["process_open_fds"]);
  EXPECT_TRUE(values.count("process_cpu_seconds_total"));
}

// CPU time of this process, in seconds: what it spent itself and in the system.
struct CpuSeconds {
  double user = 0, system = 0;
};

CpuSeconds ReadCpuSeconds() {
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  const std::vector<std::string> fields = absl::StrSplit(line.substr(line.rfind(") ") + 2), ' ');
  const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  return {std::stod(fields.at(11)) / ticks, std::stod(fields.at(12)) / ticks};
}

TEST_F(MetricsTest, CpuTimeHasThatOfTheSystem) {
  std::ifstream random("/dev/urandom");
  std::vector<char> buffer(1 << 20);
  CpuSeconds before;
  while (before.system < 0.05) {  // which the system spends for it
    random.read(buffer.data(), static_cast<std::streamsize>(buffer.size()));
    before = ReadCpuSeconds();
  }
  const double value = ScrapeValues()["process_cpu_seconds_total"];
  const CpuSeconds after = ReadCpuSeconds();
  EXPECT_LE(before.user + before.system, value + 1e-9);
  EXPECT_LE(value, after.user + after.system + 1e-9);
}

TEST(MetricsOnScrape, UpdatesGaugesFirst) {
  Metrics metrics(ExampleOptions());
  int64_t used = 0;
  metrics.OnScrape([&] { metrics.device(0).staging_used_bytes.Set(++used); });
  auto server = MetricsServer::Start({"127.0.0.1:0"}, &metrics);
  ASSERT_TRUE(server.ok()) << server.status();
  for (const char* value : {"1", "2"}) {
    EXPECT_THAT(HttpGet((*server)->port(), "/metrics"),
                HasSubstr(absl::StrCat("flashcore_staging_bytes{device=\"cpu\",state=\"used\"} ",
                                       value, "\n")));
  }
}

TEST_F(MetricsTest, ScrapesWhileRecording) {
  std::thread recorder([&] {
    RpcMetrics* rpc = metrics_.Rpc(kExampleService, "Attend");
    for (int i = 0; i < 20000; ++i) {
      rpc->RecordStart();
      rpc->RecordEnd(0);
    }
  });
  for (int i = 0; i < 10; ++i) EXPECT_THAT(Scrape(), Not(""));
  recorder.join();
  EXPECT_EQ(ScrapeValues()[absl::StrCat("grpc_server_started_total{", kAttendLabels, "}")], 20000);
}

TEST(Bounds, LatencyHasTwelveADecadeWhereRequestsLie) {
  const std::vector<double> bounds = LatencyBounds();
  EXPECT_EQ(bounds.front(), 1e-6);
  EXPECT_EQ(bounds.back(), 10);
  EXPECT_THAT(bounds, SizeIs(3 + 5 * 12 + 4));
  EXPECT_THAT(bounds, Contains(0.05));  // the alerts' objective
  for (size_t i = 1; i < bounds.size(); ++i) {
    const bool is_fine = bounds[i - 1] >= 1e-5 && bounds[i] <= 1;
    EXPECT_GT(bounds[i], bounds[i - 1]);
    EXPECT_LE(bounds[i], bounds[i - 1] * (is_fine ? 1.2501 : 2.501));
  }
}

// Prometheus's reading of a histogram: histogram_quantile interpolates within the bucket.
double HistogramQuantile(double quantile, const std::vector<double>& samples) {
  const std::vector<double> bounds = LatencyBounds();
  std::vector<double> counts(bounds.size() + 1);
  for (const double sample : samples) {
    ++counts[std::lower_bound(bounds.begin(), bounds.end(), sample) - bounds.begin()];
  }
  double rank = quantile * static_cast<double>(samples.size());
  for (size_t i = 0; i < bounds.size(); ++i) {
    if (rank <= counts[i]) {
      const double begin = i == 0 ? 0 : bounds[i - 1];
      return begin + (bounds[i] - begin) * rank / counts[i];
    }
    rank -= counts[i];
  }
  return bounds.back();
}

// Log-normal latencies with a p99 from 20 us to 1 s: it is within a tenth in at least 95 of 100.
TEST(Bounds, TellThe99thPercentile) {
  constexpr int kServices = 1000, kRequests = 2000;
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> log_p99(std::log(2e-5), std::log(1.0)), width(0.05, 1.5);
  int near = 0;
  for (int n = 0; n < kServices; ++n) {
    const double sigma = width(random);
    std::lognormal_distribution<double> latency(log_p99(random) - 2.326 * sigma, sigma);
    std::vector<double> samples(kRequests);
    for (double& sample : samples) sample = latency(random);
    const double told = HistogramQuantile(0.99, samples);
    std::sort(samples.begin(), samples.end());
    near += std::abs(told / samples[kRequests * 99 / 100 - 1] - 1) < 0.1;
  }
  EXPECT_GE(near, kServices * 95 / 100);
  RecordProperty("within_a_tenth", near);
}

TEST(Bounds, PowersOfTwo) { EXPECT_THAT(PowerOfTwoBounds(8), ElementsAre(1, 2, 4, 8)); }

}  // namespace
}  // namespace flashcore::server
