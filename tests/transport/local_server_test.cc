// The local socket: what its requests do, without faults.
#include <cstring>

#include "absl/strings/str_cat.h"
#include "tests/transport/local_setup.h"

namespace flashcore::server {
namespace {

using ::testing::HasSubstr;
using testing::LocalClient;
using testing::LocalServerTest;

class LocalTest : public LocalServerTest {};

TEST_F(LocalTest, AnswersThroughARing) {
  StartLocal();
  Lane lane(path_);
  const std::string id = lane.Create();
  std::memset(lane.memory.data() + Lane::kTensors, 0x11, testing::kRowBytes);
  v1::AttendResponse response;
  ASSERT_EQ(lane.Attend(lane.Step(id), &response), absl::OkStatus());
  EXPECT_EQ(response.sequence_lengths(0), 1);
  EXPECT_TRUE(response.output().empty());
  // The fake device copies Q to O.
  EXPECT_EQ(std::memcmp(lane.memory.data() + Lane::kTensors, lane.memory.data() + Lane::kOutputs,
                        testing::kRowBytes),
            0);
}

}  // namespace
}  // namespace flashcore::server
