// Sequence::Append: how rows become messages.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/sequence_fixture.h"

namespace flashcore {
namespace {

using ::testing::ElementsAre;

using SequenceAppendTest = SequenceTest;

// A server that records the messages of a LoadSequence and answers OK.
struct Recorder {
  explicit Recorder(FakeServer* server) {
    server->on_load = [this](FakeServer::LoadReader* reader, v1::LoadSequenceResponse*) {
      v1::LoadSequenceRequest message;
      while (reader->Read(&message)) messages.push_back(message);
      return grpc::Status::OK;
    };
  }
  std::vector<v1::LoadSequenceRequest> messages;
};

TEST_F(SequenceAppendTest, AppendCutsRowsIntoMessagesInOrder) {
  const Sequence sequence = Create();
  Recorder recorder(&server_);
  // A row of K and V has 64 bytes; messages hold whole pages of 64 rows, and their small fields.
  const uint64_t chunk_rows = Sequence::kMessageBytes / 64 - 64;
  const uint64_t rows = 2 * chunk_rows + 5;
  const auto key = Bytes(rows * 32, 1), value = Bytes(rows * 32, 2);
  ASSERT_TRUE(sequence.Append(0, key, value, Layout::kNHD, /*expected_length=*/7).ok());
  ASSERT_EQ(recorder.messages.size(), 3u);
  std::string got_key, got_value;
  uint64_t first = 0;
  for (const v1::LoadSequenceRequest& message : recorder.messages) {
    EXPECT_EQ(message.sequence_id(), first == 0 ? sequence.id() : "");
    EXPECT_EQ(message.expected_length(), 7 + first);
    EXPECT_EQ(message.layer(), 0u);
    EXPECT_EQ(message.layout(), v1::LAYOUT_NHD);
    EXPECT_EQ(message.rows(), std::min(chunk_rows, rows - first));
    EXPECT_EQ(message.key().size(), message.rows() * 32);
    EXPECT_LE(message.ByteSizeLong(), Sequence::kMessageBytes);
    first += message.rows();
    got_key += message.key();
    got_value += message.value();
  }
  EXPECT_EQ(got_key, Text(key));
  EXPECT_EQ(got_value, Text(value));
}

TEST_F(SequenceAppendTest, AppendOfOneRowIsOneMessage) {
  const Sequence sequence = Create(SmallShape(2));
  Recorder recorder(&server_);
  const auto row = Bytes(32, 1);
  ASSERT_TRUE(sequence.Append(1, row, row, Layout::kHND).ok());
  ASSERT_EQ(recorder.messages.size(), 1u);
  EXPECT_FALSE(recorder.messages[0].has_expected_length());
  EXPECT_EQ(recorder.messages[0].layer(), 1u);
  EXPECT_EQ(recorder.messages[0].rows(), 1u);
}

TEST_F(SequenceAppendTest, AppendGathersTheRowsOfEachHead) {
  // Messages of three rows: 3 * 64 bytes and what surrounds them.
  ClientOptions options = Options();
  options.max_message_bytes = 128 + 3 * 64;
  const auto client = *Client::Create(server_.target(), options);
  const Sequence nhd = client->CreateSequence(SmallShape()).value();
  const Sequence hnd = client->CreateSequence(SmallShape()).value();
  constexpr size_t kRows = 10, kHeadRowBytes = 16;
  const auto key = Bytes(kRows * 32, 1), value = Bytes(kRows * 32, 2);
  const auto transposed = [&](const std::vector<std::byte>& tensor) {
    std::vector<std::byte> out(tensor.size());
    for (size_t i = 0; i < tensor.size(); ++i) {
      const size_t row = i / 32, head = i % 32 / kHeadRowBytes, byte = i % kHeadRowBytes;
      out[(head * kRows + row) * kHeadRowBytes + byte] = tensor[i];
    }
    return out;
  };
  ASSERT_TRUE(nhd.Append(0, key, value, Layout::kNHD, 0).ok());
  ASSERT_TRUE(hnd.Append(0, transposed(key), transposed(value), Layout::kHND, 0).ok());
  for (const Sequence& sequence : {nhd, hnd}) {
    EXPECT_EQ(sequences_.key(sequence.id()), Text(key));
    EXPECT_EQ(sequences_.value(sequence.id()), Text(value));
  }
}

TEST_F(SequenceAppendTest, AppendRejectsWhatIsNoRows) {
  const Sequence sequence = Create();
  Recorder recorder(&server_);
  const auto bytes = Bytes(96, 0);
  const auto append = [&](size_t key, size_t value) {
    const auto all = absl::MakeConstSpan(bytes);
    return sequence.Append(0, all.first(key), all.first(value), Layout::kNHD).status();
  };
  EXPECT_TRUE(absl::IsInvalidArgument(append(0, 0)));
  EXPECT_TRUE(absl::IsInvalidArgument(append(33, 33)));
  EXPECT_TRUE(absl::IsInvalidArgument(append(64, 32)));
  EXPECT_TRUE(recorder.messages.empty());

  ClientOptions options = Options();
  options.max_message_bytes = 100;
  const auto small = *Client::Create(server_.target(), options);
  const Sequence same = small->OpenSequence(sequence.id()).value();
  EXPECT_TRUE(absl::IsResourceExhausted(same.Append(0, bytes, bytes, Layout::kNHD).status()));
  EXPECT_TRUE(recorder.messages.empty());
}

TEST_F(SequenceAppendTest, AnErrorInTheMiddleOfALoadEndsIt) {
  const Sequence sequence = Create();
  int calls = 0;
  auto status = grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "K/V memory is full");
  server_.on_load = [&](FakeServer::LoadReader* reader, v1::LoadSequenceResponse*) {
    ++calls;
    v1::LoadSequenceRequest message;
    reader->Read(&message);
    return status;
  };
  const auto bytes = Bytes(5 * Sequence::kMessageBytes, 0);
  EXPECT_EQ(sequence.Append(0, bytes, bytes, Layout::kNHD).status(),
            absl::ResourceExhaustedError("K/V memory is full"));
  // Not retried: some of the rows may be there.
  status = grpc::Status(grpc::StatusCode::UNAVAILABLE, "draining");
  EXPECT_EQ(sequence.Append(0, bytes, bytes, Layout::kNHD, 0).status(),
            absl::UnavailableError("draining"));
  EXPECT_EQ(calls, 2);
  // An answer before the last rows were read is no success.
  status = grpc::Status::OK;
  EXPECT_TRUE(absl::IsInternal(sequence.Append(0, bytes, bytes, Layout::kNHD).status()));
}

// Zeros, of which it counts how many have been read: the kernel maps a page when it is first used.
class CountedRows {
 public:
  explicit CountedRows(size_t size)
      : size_(size), memory_(mmap(nullptr, size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (memory_ == MAP_FAILED || madvise(memory_, size, MADV_NOHUGEPAGE) != 0) std::abort();
  }
  ~CountedRows() { munmap(memory_, size_); }
  CountedRows(const CountedRows&) = delete;
  CountedRows& operator=(const CountedRows&) = delete;

  absl::Span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(memory_), size_};
  }
  // To whole pages.
  size_t BytesRead() const {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    std::vector<unsigned char> mapped((size_ + page - 1) / page);
    if (mincore(memory_, size_, mapped.data()) != 0) std::abort();
    return page * static_cast<size_t>(std::count_if(mapped.begin(), mapped.end(),
                                                    [](unsigned char m) { return (m & 1) != 0; }));
  }

 private:
  const size_t size_;
  void* const memory_;
};

TEST_F(SequenceAppendTest, AppendWaitsForASlowServer) {
  const Sequence sequence = Create();
  constexpr size_t kLimit = 4 * Sequence::kMessageBytes;
  const CountedRows key(6 * Sequence::kMessageBytes), value(6 * Sequence::kMessageBytes);
  size_t taken = 0;
  server_.on_load = [&](FakeServer::LoadReader* reader, v1::LoadSequenceResponse*) {
    // Until the client has sent as much as it will: it takes no more rows, or too many.
    for (int still = 0; taken == 0 || (still < 10 && taken <= kLimit);) {
      const size_t before = std::exchange(taken, key.BytesRead() + value.BytesRead());
      still = taken > before ? 0 : still + 1;
      absl::SleepFor(absl::Milliseconds(5));
    }
    v1::LoadSequenceRequest message;
    while (reader->Read(&message)) {
    }
    return grpc::Status::OK;
  };
  ASSERT_TRUE(sequence.Append(0, key.bytes(), value.bytes(), Layout::kNHD).ok());
  EXPECT_LE(taken, kLimit) << "of 12 messages";
  EXPECT_EQ(key.BytesRead() + value.BytesRead(), key.bytes().size() + value.bytes().size());
}

TEST_F(SequenceAppendTest, AppendTakesTheLengthThatIsExpected) {
  const Sequence sequence = Create();
  const auto bytes = Bytes(5 * 32, 0);
  EXPECT_THAT(sequence.Append(0, bytes, bytes, Layout::kNHD, 0)->layer_lengths(), ElementsAre(5));
  EXPECT_TRUE(
      absl::IsFailedPrecondition(sequence.Append(0, bytes, bytes, Layout::kNHD, 4).status()));
  EXPECT_THAT(sequence.Append(0, bytes, bytes, Layout::kNHD, 5)->layer_lengths(), ElementsAre(10));
}

}  // namespace
}  // namespace flashcore
