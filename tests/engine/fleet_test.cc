// The choice of the device for sequences and requests.
#include "server/engine/fleet.h"

#include <array>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/attend_job.h"
#include "tests/engine/fakes.h"

namespace flashcore::server {
namespace {

using testing::AttendJob;
using ::testing::ElementsAre;
using testing::FakeDevice;
using testing::FakeDeviceControl;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr size_t kMaxDevices = 3;
constexpr size_t kPages = 32;  // of K/V memory, of each device
constexpr SequenceShape kShape = {1, 1, 32, kernels::DType::kFloat16};

using JobPtr = std::unique_ptr<AttendJob>;

class FleetTest : public ::testing::Test {
 protected:
  // Replaces the fleet.
  void Start(size_t devices, Engine::Options options = {}) {
    fleet_.reset();
    options.sequences.superblock_bytes = kShape.page_bytes();
    Metrics::Options metrics = {"test", {}, {}};
    std::vector<std::unique_ptr<Device>> fakes;
    for (size_t i = 0; i < devices; ++i) {
      FakeDevice::Options fake;
      fake.id = absl::StrCat("fake:", i);
      fake.kv_memory_bytes = kPages * kShape.page_bytes();
      fakes.push_back(std::make_unique<FakeDevice>(&controls_[i], fake));
      metrics.devices.push_back({fake.id, "fake", "fake"});
    }
    metrics_ = std::make_unique<Metrics>(metrics);
    fleet_ = std::make_unique<Fleet>(options, std::move(fakes), &clock_, metrics_.get());
  }
  ~FleetTest() override { SetOpen(true); }

  void SetOpen(bool open) {
    for (FakeDeviceControl& control : controls_) control.SetOpen(open);
  }

  absl::StatusOr<SequenceInfo> TryCreate(const std::string& device = "",
                                         const char* client = "alice") {
    return fleet_->Create(kShape, {/*pin=*/false}, {client, {}}, device);
  }
  SequenceId Create(const std::string& device = "") { return TryCreate(device)->id; }

  // Creates sequences; returns the device of each.
  std::vector<size_t> CreateMany(size_t count) {
    std::vector<size_t> devices;
    for (size_t i = 0; i < count; ++i) {
      devices.push_back(Create().DeviceOf(fleet_->engines().size()));
    }
    return devices;
  }

  // A request with one span per sequence, which attends to it and appends `rows`.
  static JobPtr JobOn(const std::vector<SequenceId>& ids, uint32_t rows = 0) {
    auto job = std::make_unique<AttendJob>();
    AttendRequest& request = job->operation.request;
    request = testing::MakeRequest(1, 1, 1, 1, kShape.head_dim);
    std::vector<SpanShape> spans;
    for (const SequenceId id : ids) spans.push_back({1, rows, id.ToBytes(), {}});
    testing::SetSpans(std::move(spans), &request);
    return job;
  }
  static JobPtr InlineJob() {
    auto job = std::make_unique<AttendJob>();
    job->operation.request = testing::MakeRequest();
    return job;
  }
  absl::Status Submit(AttendJob* job) {
    if (absl::Status status = testing::AdmitNow(fleet_.get(), &job->operation); !status.ok()) {
      return status;
    }
    return fleet_->Enqueue(&job->operation);
  }
  absl::Status Run(JobPtr job) {
    if (absl::Status status = Submit(job.get()); !status.ok()) return status;
    absl::Status status = job->ended.get();
    job->operation.tensors.TakeResults();
    return status;
  }

  // Queues inline requests, which do not complete yet; returns the device of each.
  std::vector<size_t> SubmitMany(size_t count, std::vector<JobPtr>* jobs) {
    std::vector<size_t> devices;
    for (size_t i = 0; i < count; ++i) {
      jobs->push_back(InlineJob());
      EXPECT_EQ(Submit(jobs->back().get()), absl::OkStatus());
      devices.push_back(jobs->back()->operation.device);
    }
    return devices;
  }
  void EndAll(const std::vector<JobPtr>& jobs) {
    SetOpen(true);
    for (const JobPtr& job : jobs) EXPECT_EQ(job->ended.get(), absl::OkStatus());
  }

  std::array<FakeDeviceControl, kMaxDevices> controls_;
  testing::FakeClock clock_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<Fleet> fleet_;
};

TEST_F(FleetTest, SequencesSpreadOverDevicesThatAreAlike) {
  Start(3);
  EXPECT_THAT(CreateMany(6), ElementsAre(0, 1, 2, 0, 1, 2));
}

TEST_F(FleetTest, ASequenceSaysWhereItIs) {
  Start(2);
  const SequenceId id = Create("fake:1");
  EXPECT_EQ(fleet_->DeviceIdOf(id), "fake:1");
  EXPECT_EQ(SequenceId::FromBytes(id.ToBytes())->DeviceOf(2), 1u);
  EXPECT_EQ(&fleet_->EngineOf(id), fleet_->engines()[1].get());
  EXPECT_EQ(fleet_->EngineOf(id).sequences().Get(id, {"alice", {}}).status(), absl::OkStatus());
}

TEST_F(FleetTest, FreeMemoryDecidesBeforeTheNumberOfSequences) {
  Start(2);
  CreateMany(1);
  for (int i = 0; i < 4; ++i) Create("fake:1");
  const SequenceId large = Create("fake:0");
  ASSERT_EQ(Run(JobOn({large}, 4 * kernels::kPageTokens)), absl::OkStatus());
  EXPECT_THAT(CreateMany(3), ElementsAre(1, 1, 1));
}

TEST_F(FleetTest, ALittleMemoryDoesNotDecide) {
  Start(2);
  const SequenceId small = Create("fake:0");
  ASSERT_EQ(Run(JobOn({small}, 1)), absl::OkStatus());  // 1 page of 32
  Create("fake:1");
  Create("fake:1");
  EXPECT_THAT(CreateMany(2), ElementsAre(0, 0));
}

TEST_F(FleetTest, RequestsUnderWayCountLikeSequences) {
  Start(2);
  SetOpen(false);
  const SequenceId busy = Create("fake:0");
  Create("fake:1");
  std::vector<JobPtr> jobs;
  for (int i = 0; i < 3; ++i) {
    jobs.push_back(JobOn({busy}));
    ASSERT_EQ(Submit(jobs.back().get()), absl::OkStatus());
  }
  EXPECT_THAT(CreateMany(4), ElementsAre(1, 1, 1, 0));
  EndAll(jobs);
}

TEST_F(FleetTest, ForksStayWithTheirParent) {
  Start(2);
  const SequenceId parent = Create("fake:1");
  for (int i = 0; i < 4; ++i) {
    const auto fork =
        fleet_->EngineOf(parent).sequences().Fork(parent, {}, {/*pin=*/false}, {"alice", {}});
    EXPECT_EQ(fleet_->DeviceIdOf(fork->id), "fake:1");
  }
}

TEST_F(FleetTest, ADeviceThatThereIsNotIsAnErrorThatNamesThoseThatThereAre) {
  Start(2);
  const absl::Status status = TryCreate("fake:2").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "device_id: 'fake:2' is not one of fake:0, fake:1");
}

TEST_F(FleetTest, QuotasHoldOnEachDevice) {
  Engine::Options options;
  options.sequences.client_sequences = 2;
  Start(2, options);
  EXPECT_THAT(CreateMany(4), ElementsAre(0, 1, 0, 1));
  const absl::Status status = TryCreate().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("this client has 2 sequences"));
  EXPECT_EQ(TryCreate("", "bob").status(), absl::OkStatus());
}

TEST_F(FleetTest, AFullDeviceLeavesItsTurnToTheNext) {
  Engine::Options options;
  options.sequences.client_sequences = 2;
  Start(2, options);
  SetOpen(false);
  Create("fake:0");
  Create("fake:0");
  const SequenceId busy = Create("fake:1");
  std::vector<JobPtr> jobs;
  for (int i = 0; i < 5; ++i) {  // so that fake:0 comes first
    jobs.push_back(JobOn({busy}));
    ASSERT_EQ(Submit(jobs.back().get()), absl::OkStatus());
  }
  EXPECT_THAT(CreateMany(1), ElementsAre(1));
  EXPECT_EQ(TryCreate("fake:0").status().code(), absl::StatusCode::kResourceExhausted);
  EndAll(jobs);
}

TEST_F(FleetTest, ARequestRunsWhereItsSequencesAre) {
  Start(2);
  const SequenceId a = Create("fake:1");
  const SequenceId b = Create("fake:1");
  ASSERT_EQ(Run(JobOn({a, b}, 3)), absl::OkStatus());
  EXPECT_THAT(controls_[0].BatchSizes(), IsEmpty());
  EXPECT_THAT(controls_[1].BatchSizes(), ElementsAre(1));
  EXPECT_THAT(fleet_->EngineOf(b).sequences().Get(b, {"alice", {}})->layer_lengths, ElementsAre(3));
}

TEST_F(FleetTest, SequencesOfTwoDevicesInOneRequestAreAnErrorThatNamesThem) {
  Start(2);
  const SequenceId a = Create("fake:0");
  const SequenceId b = Create("fake:1");
  const absl::Status status = Run(JobOn({a, b}));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "spans[1].sequence_id: names a sequence of fake:1, spans[0] one of fake:0; the "
            "sequences of one request must be on one device");
}

TEST_F(FleetTest, AnIdOfNoSequenceIsNotFound) {
  Start(2);
  const absl::Status status = Run(JobOn({SequenceId::Random()}));
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
}

TEST_F(FleetTest, WhatIsNoIdIsRefused) {
  Start(2);
  JobPtr job = JobOn({Create()});
  job->operation.request.spans[0].sequence_id = "short";
  EXPECT_EQ(Run(std::move(job)).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(FleetTest, InlineRequestsGoWhereTheFewestAre) {
  Start(3);
  SetOpen(false);
  std::vector<JobPtr> jobs;
  const SequenceId busy = Create("fake:1");
  for (int i = 0; i < 2; ++i) {
    jobs.push_back(JobOn({busy}));
    ASSERT_EQ(Submit(jobs.back().get()), absl::OkStatus());
  }
  EXPECT_THAT(SubmitMany(4, &jobs), ::testing::UnorderedElementsAre(0, 0, 2, 2));
  EXPECT_THAT(SubmitMany(3, &jobs), ::testing::UnorderedElementsAre(0, 1, 2));
  EndAll(jobs);
}

TEST_F(FleetTest, IdleDevicesTakeTurns) {
  Start(3);
  for (int i = 0; i < 6; ++i) ASSERT_EQ(Run(InlineJob()), absl::OkStatus());
  for (FakeDeviceControl& control : controls_) EXPECT_THAT(control.BatchSizes(), ElementsAre(1, 1));
}

TEST_F(FleetTest, WhatHasEndedOrWasRefusedIsNoLoad) {
  Engine::Options options;
  options.batcher.max_queue_requests = 1;
  Start(1, options);
  SetOpen(false);
  std::vector<JobPtr> jobs;
  SubmitMany(1, &jobs);
  controls_[0].WaitUntilEntered(1);
  SubmitMany(1, &jobs);
  EXPECT_EQ(Run(InlineJob()).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(fleet_->engines()[0]->load(), 2);
  EndAll(jobs);
  EXPECT_EQ(fleet_->engines()[0]->load(), 0);
}

TEST_F(FleetTest, EndAllEndsWhatDoesNotRunOnAllDevices) {
  Start(3);
  SetOpen(false);
  std::vector<JobPtr> running, queued;
  for (size_t device = 0; device < 3; ++device) {
    const SequenceId id = Create(absl::StrCat("fake:", device));
    ASSERT_EQ(Submit(running.emplace_back(JobOn({id})).get()), absl::OkStatus());
    controls_[device].WaitUntilEntered(1);
    ASSERT_EQ(Submit(queued.emplace_back(JobOn({id})).get()), absl::OkStatus());
  }
  const absl::Status end = absl::UnavailableError("the drain has no more time");
  fleet_->EndAll(end);
  EXPECT_EQ(fleet_->load(), 3) << "what runs";
  EndAll(running);
  for (const JobPtr& job : queued) EXPECT_EQ(job->ended.get(), end);
}

TEST_F(FleetTest, AnErrorOfOneDeviceIsNoneOfTheOthers) {
  Start(2);
  controls_[0].SetResult(absl::InternalError("the device failed"));
  const SequenceId bad = Create("fake:0");
  const SequenceId good = Create("fake:1");
  EXPECT_EQ(Run(JobOn({bad}, 1)).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(Run(JobOn({good}, 1)), absl::OkStatus());
}

TEST_F(FleetTest, EachDeviceHasItsOwnMetrics) {
  Start(2);
  ASSERT_EQ(Run(JobOn({Create("fake:1")}, 1)), absl::OkStatus());
  const auto batches = [&](size_t device) {
    return metrics_->device(device).batch_requests.Collect().histogram.sample_count;
  };
  EXPECT_EQ(batches(0), 0u);
  EXPECT_EQ(batches(1), 1u);
}

TEST_F(FleetTest, ListsPageByPageOverAllDevices) {
  Start(3);
  std::vector<SequenceId> all;  // by device, then oldest first; none on fake:1
  for (int i = 0; i < 3; ++i) all.push_back(Create("fake:0"));
  for (int i = 0; i < 4; ++i) all.push_back(Create("fake:2"));
  ASSERT_EQ(TryCreate("fake:1", "bob").status(), absl::OkStatus());
  for (size_t page_size = 1; page_size <= 8; ++page_size) {
    std::vector<SequenceId> listed;
    size_t pages = 0;
    uint64_t after = 0;
    do {
      const Fleet::Listing page = fleet_->List({"alice", {}}, after, {page_size});
      EXPECT_LE(page.sequences.size(), page_size);
      for (const SequenceInfo& info : page.sequences) listed.push_back(info.id);
      after = page.next;
      ++pages;
    } while (after != 0 && pages <= all.size());
    EXPECT_TRUE(listed == all) << "page size " << page_size;
    EXPECT_EQ(pages, (all.size() + page_size - 1) / page_size) << "page size " << page_size;
  }
  EXPECT_THAT(fleet_->List({"carol", {}}, 0, {10}).sequences, IsEmpty());
  EXPECT_THAT(fleet_->List({"alice", {}}, 77, {10}).sequences, IsEmpty());  // not a valid position
}

TEST_F(FleetTest, TheEndOfALeaseDeletesItsSequencesOnAllDevices) {
  Start(3);
  ClientLease lease = fleet_->OpenLease({"alice", {}});
  SequenceSettings leased;
  leased.lease = lease.id();
  for (const char* device : {"fake:0", "fake:1", "fake:2"}) {
    Create(device);
    ASSERT_EQ(fleet_->Create(kShape, leased, {"alice", {}}, device).status(), absl::OkStatus());
  }
  ClientLease moved = std::move(lease);
  EXPECT_FALSE(lease.open());  // NOLINT(bugprone-use-after-move): that it is empty
  const auto sequences = [&] { return fleet_->List({"alice", {}}, 0, {10}).sequences.size(); };
  EXPECT_EQ(sequences(), 6u);
  moved = ClientLease();
  // The housekeeping threads do it.
  while (sequences() > 3) std::this_thread::yield();  // gate: a hang is a failure
  EXPECT_EQ(sequences(), 3u);
  EXPECT_EQ(fleet_->Create(kShape, leased, {"alice", {}}, "").status().code(),
            absl::StatusCode::kNotFound);
  ClientLease abandoned = fleet_->OpenLease({"alice", {}});
  leased.lease = abandoned.id();
  ASSERT_EQ(fleet_->Create(kShape, leased, {"alice", {}}, "").status(), absl::OkStatus());
  abandoned.Abandon();
  EXPECT_FALSE(abandoned.open());
  EXPECT_EQ(fleet_->Create(kShape, leased, {"alice", {}}, "").status(), absl::OkStatus());
}

}  // namespace
}  // namespace flashcore::server
