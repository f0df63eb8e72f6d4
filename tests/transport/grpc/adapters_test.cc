// gRPC's calls, as the code that all transports share sees them.
#include "server/transport/grpc/adapters.h"

#include "gmock/gmock.h"
#include "grpcpp/test/server_context_test_spouse.h"
#include "gtest/gtest.h"
#include "tests/transport/rpc_setup.h"

namespace flashcore::server {
namespace {

TEST(GrpcClaimsTest, HasAllValuesOfAKeyInOrder) {
  grpc::ServerContext context;
  grpc::testing::ServerContextTestSpouse call(&context);
  for (const char* value : {"one", "two"}) call.AddClientMetadata("key", value);
  call.AddClientMetadata("keys", "three");
  const GrpcClaims claims(&context);
  EXPECT_THAT(claims.Metadata("key"), ::testing::ElementsAre("one", "two"));
  EXPECT_THAT(claims.Metadata("ke"), ::testing::IsEmpty());
  EXPECT_EQ(claims.NameInCertificate(CallerClaims::CertificateName::kUri), "");
}

TEST(CancelRpcTest, OneThatDoesNotEndLosesItsConnection) {
  ClientConnection connection("fd:1", {});
  const UnsentReply::OnCutOff cancel = CancelRpc(nullptr, &connection);
  cancel(CutOff::kTimeout, /*again=*/true);
  EXPECT_TRUE(connection.broken());
}

// Its client sees UNAVAILABLE.
TEST(CancelRpcTest, InADrainTheConnectionEndsAtOnce) {
  ClientConnection connection("fd:1", {});
  CancelRpc(nullptr, &connection)(CutOff::kDrain, /*again=*/false);
  EXPECT_TRUE(connection.broken());
}

}  // namespace
}  // namespace flashcore::server
