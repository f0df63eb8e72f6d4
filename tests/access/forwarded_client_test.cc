// Envoy's x-forwarded-client-cert.
#include "server/access/forwarded_client.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace flashcore::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

// The names of the elements; the error if there is one.
std::vector<std::string> Names(absl::string_view header) {
  const auto clients = ParseForwardedClients(header);
  if (!clients.ok()) return {clients.status().ToString()};
  std::vector<std::string> names;
  for (const ForwardedClient& client : *clients) names.push_back(client.Name());
  return names;
}

TEST(ForwardedClientTest, ReadsTheExamplesOfEnvoysDocumentation) {
  EXPECT_THAT(
      Names("By=http://frontend.lyft.com;Hash=468ed33be74eee6556d90c0149c1309e9ba61d6425303443c074"
            "8a02dd8de688;Subject=\"/C=US/ST=CA/L=San Francisco/OU=Lyft/CN=Test Client\";"
            "URI=http://testclient.lyft.com"),
      ElementsAre("http://testclient.lyft.com"));
  EXPECT_THAT(Names("By=http://frontend.lyft.com;Hash=468e;URI=http://testclient.lyft.com,"
                    "By=http://backend.lyft.com;Hash=9ba6;URI=http://frontend.lyft.com"),
              ElementsAre("http://testclient.lyft.com", "http://frontend.lyft.com"));
  EXPECT_THAT(Names("By=http://frontend.lyft.com;Hash=468e;Subject=\"CN=Test Client\";"
                    "URI=http://testclient.lyft.com;DNS=lyft.com;DNS=www.lyft.com"),
              ElementsAre("http://testclient.lyft.com"));
}

TEST(ForwardedClientTest, TakesTheUriThenTheDnsNameThenTheCommonName) {
  EXPECT_THAT(Names("Subject=\"CN=c,O=o\";DNS=d1;DNS=d2;URI=u1;URI=u2"), ElementsAre("u1"));
  EXPECT_THAT(Names("Subject=\"CN=c,O=o\";DNS=d1;DNS=d2"), ElementsAre("d1"));
  EXPECT_THAT(Names("Subject=\"O=o,CN=c\""), ElementsAre("c"));
  EXPECT_THAT(Names("uri=U;SUBJECT=\"CN=c\""), ElementsAre("U"));
  EXPECT_THAT(Names("Hash=1;URI=;Subject=\"\""), ElementsAre(""));
}

TEST(ForwardedClientTest, ASubjectCannotPretendToHaveAnotherName) {
  EXPECT_THAT(Names(R"(Subject="O=a\,CN=admin,CN=me")"), ElementsAre("me"));
  EXPECT_THAT(Names(R"(Subject="CN=a\2CCN\=b")"), ElementsAre("a,CN=b"));
  EXPECT_THAT(Names(R"(Subject="O=\",URI=admin,CN=me")"), ElementsAre("me"));
  EXPECT_THAT(Names(R"(Subject="O=x\\";URI=me)"), ElementsAre("me"));
  EXPECT_THAT(Names(R"(Subject="CN=me,CN=admin")"), ElementsAre(""));
  EXPECT_THAT(Names(R"(Subject="CN=me+CN=admin")"), ElementsAre(""));
  EXPECT_THAT(Names(R"(Subject="/O=x/CN=admin")"), ElementsAre(""));
}

TEST(ForwardedClientTest, ReadsQuotedValuesWithSeparators) {
  const auto clients = ParseForwardedClients(
      R"(Hash=ab;Cert="-----BEGIN%20CERTIFICATE-----%0A,;=";Chain="a,b";URI="u,;=\"x" , Hash=cd)");
  ASSERT_TRUE(clients.ok()) << clients.status();
  ASSERT_THAT(*clients, SizeIs(2));
  EXPECT_THAT((*clients)[0].uris, ElementsAre("u,;=\"x"));
  EXPECT_EQ((*clients)[0].hash, "ab");
  EXPECT_EQ((*clients)[1].hash, "cd");
  EXPECT_THAT(Names("URI=http://a?b=c"), ElementsAre("http://a?b=c"));
}

TEST(ForwardedClientTest, RefusesOtherForms) {
  for (const char* bad : {"", ",", ";", "URI", "URI=a,", "URI=a;", ",URI=a", "URI=a;;DNS=b", "=a",
                          "Key=a", "URI=\"a", "URI=\"a\\\"", "URI=a\"b\"", "URI=\"a\"b",
                          "Subject=\"\";Subject=\"CN=x\"", "Hash=1;hash=2", "URI;DNS=a"}) {
    EXPECT_FALSE(ParseForwardedClients(bad).ok()) << bad;
  }
}

TEST(ForwardedClientTest, HasLimits) {
  EXPECT_THAT(ParseForwardedClients("URI=" + std::string(9000, 'a')).status().message(),
              HasSubstr("more than 8192 bytes"));
  std::string many = "URI=a";
  for (int i = 1; i < 16; ++i) many += ",URI=a";
  EXPECT_THAT(Names(many), SizeIs(16));
  EXPECT_THAT(ParseForwardedClients(many + ",URI=a").status().message(),
              HasSubstr("more than 16 elements"));
}

}  // namespace
}  // namespace flashcore::server
