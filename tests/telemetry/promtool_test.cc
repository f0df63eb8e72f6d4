// The endpoint's output, judged by Prometheus's own linter.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "server/telemetry/metrics.h"
#include "server/telemetry/metrics_server.h"
#include "tests/telemetry/example_metrics.h"
#include "tests/telemetry/http_get.h"

namespace flashcore::server {
namespace {

// The output of `command`, standard error included; its exit status in `status`.
std::string RunCommand(const std::string& command, int* status) {
  std::FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  std::string output;
  char buffer[4096];
  size_t bytes;
  while ((bytes = std::fread(buffer, 1, sizeof(buffer), pipe)) > 0) output.append(buffer, bytes);
  *status = pclose(pipe);
  return output;
}

TEST(PromtoolStressTest, HasNothingToSay) {
  int status = 0;
  RunCommand("command -v promtool", &status);
  if (status != 0) GTEST_SKIP() << "promtool is not installed (Debian: package prometheus)";

  Metrics metrics(ExampleOptions());
  metrics.Rpc(kExampleService, "Attend")->RecordEnd(3);
  auto server = MetricsServer::Start({"127.0.0.1:0"}, &metrics);
  ASSERT_TRUE(server.ok()) << server.status();
  HttpGet((*server)->port(), "/metrics");  // the second scrape also shows what the first one cost
  const std::string text = HttpBody(HttpGet((*server)->port(), "/metrics"));
  ASSERT_THAT(text, ::testing::HasSubstr("grpc_server_handled_total"));

  const std::string file = ::testing::TempDir() + "promtool_test." + std::to_string(getpid());
  std::ofstream(file) << text;
  const std::string output = RunCommand("promtool check metrics < " + file, &status);
  std::remove(file.c_str());
  EXPECT_EQ(status, 0) << output;
  EXPECT_EQ(output, "");
}

}  // namespace
}  // namespace flashcore::server
