#include "flashcore/sequence.h"

#include <map>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/request_fixture.h"
#include "tests/client/sequence_fixture.h"

namespace flashcore {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kId[] = "0123456789abcdef";

TEST_F(SequenceTest, CreateSaysWhatIsAskedAndInfoWhatThereIs) {
  v1::CreateSequenceRequest got;
  auto create = server_.on_create;
  server_.on_create = [&](auto* context, const auto& request, auto* response) {
    got = request;
    return create(context, request, response);
  };
  SequenceOptions options = SmallShape(3);
  options.dtype = DType::kBFloat16;
  options.kv_dtype = KvDType::kInt8;
  options.pin = true;
  options.device_id = "fake:7";
  const Sequence sequence = Create(options);
  EXPECT_EQ(got.num_layers(), 3u);
  EXPECT_EQ(got.num_kv_heads(), 2u);
  EXPECT_EQ(got.head_dim(), 8u);
  EXPECT_EQ(got.dtype(), v1::DTYPE_BFLOAT16);
  EXPECT_EQ(got.kv_dtype(), v1::KV_DTYPE_INT8);
  EXPECT_TRUE(got.pin());
  EXPECT_EQ(got.device_id(), "fake:7");
  EXPECT_EQ(sequence.options().device_id, "fake:7");
  EXPECT_EQ(sequence.id().size(), Sequence::kIdBytes);
  EXPECT_EQ(sequence.RowBytes(), 32u);
  const v1::SequenceInfo info = sequence.Info().value();
  EXPECT_EQ(info.sequence_id(), sequence.id());
  EXPECT_THAT(info.layer_lengths(), ElementsAre(0, 0, 0));

  const Sequence opened = client_->OpenSequence(sequence.id()).value();
  EXPECT_EQ(opened.id(), sequence.id());
  EXPECT_EQ(opened.options().num_layers, 3u);
  EXPECT_EQ(opened.options().num_kv_heads, 2u);
  EXPECT_EQ(opened.options().head_dim, 8u);
  EXPECT_EQ(opened.options().dtype, DType::kBFloat16);
  EXPECT_EQ(opened.options().kv_dtype, KvDType::kInt8);
  EXPECT_TRUE(opened.options().pin);
  EXPECT_EQ(opened.options().device_id, "fake:7");
  EXPECT_EQ(Create().options().device_id, "fake:1");  // the server's choice
  options.kv_dtype = KvDType::kFloat8E4M3;
  const Sequence other = Create(options);
  EXPECT_EQ(got.kv_dtype(), v1::KV_DTYPE_FLOAT8_E4M3);
  EXPECT_EQ(client_->OpenSequence(other.id())->options().kv_dtype, KvDType::kFloat8E4M3);
  EXPECT_TRUE(absl::IsNotFound(client_->OpenSequence(kId).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(client_->OpenSequence("short").status()));
}

TEST_F(SequenceTest, AnIdOfTheWrongSizeIsAnError) {
  server_.on_create = [](auto*, const auto&, v1::CreateSequenceResponse* response) {
    response->set_sequence_id("short");
    return grpc::Status::OK;
  };
  EXPECT_TRUE(absl::IsInternal(client_->CreateSequence(SmallShape()).status()));
}

TEST_F(SequenceTest, ForkTruncateAndDelete) {
  const Sequence sequence = Create();
  const auto bytes = Bytes(5 * 32, 0);
  ASSERT_TRUE(sequence.Append(0, bytes, bytes, Layout::kNHD).ok());
  const Sequence whole = sequence.Fork().value();
  const Sequence part = sequence.Fork(2, /*pin=*/true).value();
  EXPECT_NE(whole.id(), part.id());
  EXPECT_THAT(whole.Info()->layer_lengths(), ElementsAre(5));
  EXPECT_THAT(part.Info()->layer_lengths(), ElementsAre(2));
  EXPECT_TRUE(part.options().pin);
  EXPECT_TRUE(part.Info()->pin());
  EXPECT_EQ(part.options().head_dim, 8u);

  EXPECT_TRUE(absl::IsFailedPrecondition(sequence.Truncate(3, 4).status()));
  EXPECT_THAT(sequence.Truncate(3, 5)->layer_lengths(), ElementsAre(3));
  EXPECT_THAT(sequence.Truncate(0)->layer_lengths(), ElementsAre(0));
  EXPECT_EQ(sequence.Delete(), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(sequence.Delete()));
  EXPECT_TRUE(absl::IsNotFound(sequence.Info().status()));
  EXPECT_TRUE(absl::IsNotFound(sequence.Fork().status()));
  EXPECT_EQ(sequences_.size(), 2u);
}

TEST_F(SequenceTest, AHandleOutlivesItsClientAndDeletesNothing) {
  absl::StatusOr<Sequence> copy = absl::UnknownError("");
  {
    const Sequence sequence = Create();
    copy = sequence;
    client_.reset();
  }
  EXPECT_TRUE(copy->Info().ok());
  EXPECT_EQ(sequences_.size(), 1u);
}

// One query row over a sequence, two query heads a KV head, and one row to append.
struct Step {
  explicit Step(const SequenceOptions& options, std::optional<uint64_t> expected_length)
      : query(2 * 32), row(Bytes(32, 3)), output(query.size()) {
    request.spans = {{1, 1, {}, expected_length}};
    request.num_heads = 2 * options.num_kv_heads;
    request.query = query;
    request.key = request.value = row;
    request.output = absl::MakeSpan(output);
  }
  std::vector<std::byte> query, row, output;
  AttendRequest request;
};

TEST_F(SequenceTest, AttendAppendsAndSaysTheLength) {
  const Sequence sequence = Create();
  const auto bytes = Bytes(5 * 32, 0);
  ASSERT_TRUE(sequence.Append(0, bytes, bytes, Layout::kNHD).ok());
  AttendResult result;
  EXPECT_EQ(sequence.Attend(Step(sequence.options(), 5).request, &result), absl::OkStatus());
  EXPECT_THAT(result.sequence_lengths, ElementsAre(6));
  EXPECT_EQ(server_.last_request().spans(0).sequence_id(), sequence.id());
  EXPECT_EQ(server_.last_request().num_kv_heads(), 2u);
  EXPECT_EQ(server_.last_request().head_dim(), 8u);
  EXPECT_TRUE(
      absl::IsFailedPrecondition(sequence.Attend(Step(sequence.options(), 5).request, &result)));
  EXPECT_EQ(sequence.Attend(Step(sequence.options(), std::nullopt).request, &result),
            absl::OkStatus());
  EXPECT_THAT(result.sequence_lengths, ElementsAre(7));
  Step nothing_to_append(sequence.options(), 7);
  nothing_to_append.request.spans[0].kv_rows = 0;
  nothing_to_append.request.key = nothing_to_append.request.value = {};
  EXPECT_EQ(sequence.Attend(nothing_to_append.request, &result), absl::OkStatus());
  EXPECT_THAT(result.sequence_lengths, ElementsAre(7));

  AttendRequest two = Step(sequence.options(), 7).request;
  two.spans.push_back(two.spans[0]);
  EXPECT_TRUE(absl::IsInvalidArgument(sequence.Attend(two, &result)));
}

TEST_F(SequenceTest, ReplyLengthsThatDoNotFitAreErrors) {
  std::vector<uint64_t> lengths;
  server_.on_attend = [&](auto*, const v1::AttendRequest& request, v1::AttendResponse* response) {
    FakeServer::AnswerRightly(request, response);
    response->mutable_sequence_lengths()->Assign(lengths.begin(), lengths.end());
    return grpc::Status::OK;
  };
  const auto attend = [&](std::vector<uint64_t> answer, std::vector<SpanShape> spans) {
    lengths = std::move(answer);
    RequestFixture r;  // of two spans, which append 4 and 0 rows
    for (size_t i = 0; i < spans.size(); ++i) {
      r.request.spans[i].sequence_id = spans[i].sequence_id;
      r.request.spans[i].expected_length = spans[i].expected_length;
    }
    return client_->Attend(r.request, nullptr);
  };
  const SpanShape any = {0, 0, kId, std::nullopt}, ten = {0, 0, kId, 10}, inline_rows = {};
  EXPECT_EQ(attend({}, {inline_rows, inline_rows}), absl::OkStatus());
  EXPECT_EQ(attend({14, 10}, {ten, ten}), absl::OkStatus());
  EXPECT_EQ(attend({99, 0}, {any, inline_rows}), absl::OkStatus());
  EXPECT_TRUE(absl::IsInternal(attend({0, 0}, {inline_rows, inline_rows})));
  EXPECT_TRUE(absl::IsInternal(attend({}, {ten, inline_rows})));
  EXPECT_TRUE(absl::IsInternal(attend({14}, {ten, inline_rows})));
  EXPECT_TRUE(absl::IsInternal(attend({14, 10, 0}, {ten, ten})));
  EXPECT_TRUE(absl::IsInternal(attend({14, 1}, {ten, inline_rows})));
  const absl::Status status = attend({14, 11}, {ten, ten});
  EXPECT_TRUE(absl::IsInternal(status));
  EXPECT_THAT(status.message(), HasSubstr("sequence_lengths[1] is 11; want 10"));
}

TEST_F(SequenceTest, ListAsksForEveryPage) {
  server_.on_list = [](auto*, const v1::ListSequencesRequest& request,
                       v1::ListSequencesResponse* response) {
    EXPECT_EQ(request.page_size(), 1000u);
    const int page = request.page_token().empty() ? 0 : std::stoi(request.page_token());
    response->add_sequences()->set_sequence_id(absl::StrCat("a", page));
    response->add_sequences()->set_sequence_id(absl::StrCat("b", page));
    if (page < 2) response->set_next_page_token(absl::StrCat(page + 1));
    return grpc::Status::OK;
  };
  std::vector<std::string> ids;
  const auto sequences = client_->ListSequences();
  ASSERT_TRUE(sequences.ok()) << sequences.status();
  for (const v1::SequenceInfo& info : *sequences) {
    ids.push_back(info.sequence_id());
  }
  EXPECT_THAT(ids, ElementsAre("a0", "b0", "a1", "b1", "a2", "b2"));
  server_.on_list = [](auto*, const auto&, v1::ListSequencesResponse* response) {
    response->set_next_page_token("again");
    return grpc::Status::OK;
  };
  EXPECT_TRUE(absl::IsInternal(client_->ListSequences().status()));
}

TEST_F(SequenceTest, OnlyWhatIsSafeIsSentAgain) {
  const Sequence sequence = Create();
  std::map<std::string, int> calls;
  const auto count = [&](const char* method) {
    return [&calls, method](auto*, const auto&, auto*) {
      ++calls[method];
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "draining");
    };
  };
  server_.on_create = count("create");
  server_.on_fork = count("fork");
  server_.on_truncate = count("truncate");
  server_.on_delete = count("delete");
  server_.on_get = count("get");
  server_.on_list = count("list");
  EXPECT_TRUE(absl::IsUnavailable(client_->CreateSequence(SmallShape()).status()));
  EXPECT_TRUE(absl::IsUnavailable(sequence.Fork().status()));
  EXPECT_TRUE(absl::IsUnavailable(sequence.Truncate(0).status()));
  EXPECT_TRUE(absl::IsUnavailable(sequence.Delete()));
  EXPECT_TRUE(absl::IsUnavailable(sequence.Info().status()));
  EXPECT_TRUE(absl::IsUnavailable(client_->ListSequences().status()));
  EXPECT_EQ(
      calls,
      (std::map<std::string, int>{
          {"create", 1}, {"fork", 1}, {"truncate", 3}, {"delete", 3}, {"get", 3}, {"list", 3}}));
}

TEST_F(SequenceTest, ADeleteWhoseFirstAnswerWasLostSucceeds) {
  const Sequence sequence = Create();
  int calls = 0;
  server_.on_delete = [&](auto*, const auto&, auto*) {
    return ++calls == 1 ? grpc::Status(grpc::StatusCode::UNAVAILABLE, "connection reset")
                        : grpc::Status(grpc::StatusCode::NOT_FOUND, "unknown");
  };
  EXPECT_EQ(sequence.Delete(), absl::OkStatus());
}

TEST_F(SequenceTest, ATruncateWhoseFirstAnswerWasLostSucceeds) {
  const Sequence sequence = Create();
  const auto rows = Bytes(5 * 32, 0);
  ASSERT_TRUE(sequence.Append(0, rows, rows, Layout::kNHD).ok());
  const auto truncate = server_.on_truncate;
  int calls = 0;
  const auto lose_the_first = [&](bool takes_effect) {
    calls = 0;
    server_.on_truncate = [&, takes_effect](auto* context, const auto& request, auto* response) {
      if (++calls > 1) return truncate(context, request, response);
      if (takes_effect) truncate(context, request, response);
      return grpc::Status(grpc::StatusCode::UNAVAILABLE, "connection reset");
    };
  };
  lose_the_first(true);
  const auto info = sequence.Truncate(3, 5);
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_THAT(info->layer_lengths(), ElementsAre(3));
  EXPECT_EQ(calls, 2);
  lose_the_first(false);
  EXPECT_TRUE(absl::IsFailedPrecondition(sequence.Truncate(2, 5).status()));
  EXPECT_EQ(calls, 2);
  EXPECT_THAT(sequence.Info()->layer_lengths(), ElementsAre(3));
}

TEST_F(SequenceTest, ASequenceThatOthersHaveMadeShorterIsNotTruncated) {
  const Sequence sequence = Create();
  const auto rows = Bytes(5 * 32, 0);
  ASSERT_TRUE(sequence.Append(0, rows, rows, Layout::kNHD).ok());
  int calls = 0;
  server_.on_truncate = [&, truncate = server_.on_truncate](auto* context, const auto& request,
                                                            auto* response) {
    if (++calls > 1) return truncate(context, request, response);
    v1::TruncateSequenceRequest others = request;
    others.set_length(1);
    truncate(context, others, response);
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "connection reset");
  };
  EXPECT_TRUE(absl::IsFailedPrecondition(sequence.Truncate(3, 5).status()));
  EXPECT_EQ(calls, 2);
}

TEST_F(SequenceTest, EveryCallCarriesTheName) {
  server_.on_stream = [](FakeServer::Stream*) { return grpc::Status::OK; };
  ClientOptions options = Options();
  options.name = "frontend 7";
  const auto client = *Client::Create(server_.target(), options);
  const auto row = Bytes(32, 0);
  const Sequence sequence = client->CreateSequence(SmallShape()).value();
  ASSERT_TRUE(sequence.Append(0, row, row, Layout::kNHD).ok());
  ASSERT_TRUE(sequence.Fork().ok());
  ASSERT_TRUE(sequence.Truncate(1).ok());
  ASSERT_TRUE(sequence.Attend(Step(sequence.options(), 1).request, nullptr).ok());
  ASSERT_TRUE(sequence.Delete().ok());
  ASSERT_TRUE(client->ListSequences().ok());
  ASSERT_TRUE(client->GetServerInfo().ok());
  ASSERT_TRUE(client->OpenStream()->Finish().ok());
  EXPECT_EQ(server_.metadata("flashcore-client").size(), 9u);
  EXPECT_THAT(server_.metadata("flashcore-client"), Each("frontend 7"));
  ASSERT_TRUE(client_->GetServerInfo().ok());
  EXPECT_EQ(server_.metadata("flashcore-client").back(), "");
}

TEST_F(SequenceTest, NamesAreChecked) {
  const auto create = [&](const std::string& name) {
    ClientOptions options;
    options.name = name;
    return Client::Create(server_.target(), options).status();
  };
  EXPECT_EQ(create(std::string(64, 'x')), absl::OkStatus());
  EXPECT_TRUE(absl::IsInvalidArgument(create(std::string(65, 'x'))));
  EXPECT_TRUE(absl::IsInvalidArgument(create("new\nline")));
  EXPECT_TRUE(absl::IsInvalidArgument(create("na\xc3\xafve")));
}

}  // namespace
}  // namespace flashcore
