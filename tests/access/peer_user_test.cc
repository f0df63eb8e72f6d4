// The user at the other end of a connection, with answers of the kernel and of a fake.
#include "server/access/peer_user.h"

#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <optional>
#include <string>

#include "gtest/gtest.h"
#include "tests/base/loopback_connection.h"

namespace flashcore::server {
namespace {

using testing::LoopbackConnection;

constexpr uid_t kUser = 4711;

// The kernel's answer for the socket that `query` asks for, in state ESTABLISHED.
inet_diag_msg Found(const inet_diag_req_v2& query) {
  inet_diag_msg found = {};
  found.idiag_family = query.sdiag_family;
  found.idiag_state = TCP_ESTABLISHED;
  found.id = query.id;
  found.idiag_uid = kUser;
  found.idiag_inode = 1;
  return found;
}

std::string Message(const inet_diag_msg& found, uint16_t type = SOCK_DIAG_BY_FAMILY) {
  nlmsghdr header = {};
  header.nlmsg_len = NLMSG_LENGTH(sizeof(found));
  header.nlmsg_type = type;
  std::string message(header.nlmsg_len, '\0');
  std::memcpy(message.data(), &header, sizeof(header));
  std::memcpy(message.data() + NLMSG_HDRLEN, &found, sizeof(found));
  return message;
}

std::optional<uid_t> Ask(const LoopbackConnection& connection, PeerUsers::Ask ask) {
  return PeerUsers(std::move(ask)).UserOf(connection.server.get(), connection.peer);
}

// With an answer that `change` has changed.
std::optional<uid_t> AskChanged(const LoopbackConnection& connection,
                                const std::function<void(inet_diag_msg*)>& change) {
  return Ask(connection, [&](const inet_diag_req_v2& query) {
    inet_diag_msg found = Found(query);
    change(&found);
    return Message(found);
  });
}

TEST(PeerUserTest, AsksForTheClientsSocketOnce) {
  const LoopbackConnection connection("127.0.0.1");
  int asked = 0;
  const auto ask = [&](const inet_diag_req_v2& query) {
    ++asked;
    EXPECT_EQ(query.sdiag_family, AF_INET);
    EXPECT_EQ(query.sdiag_protocol, IPPROTO_TCP);
    EXPECT_EQ(ntohs(query.id.idiag_sport), PortOf(LocalAddress(connection.client.get())));
    EXPECT_EQ(ntohs(query.id.idiag_dport), PortOf(LocalAddress(connection.listening.get())));
    EXPECT_EQ(query.id.idiag_src[0], htonl(INADDR_LOOPBACK));
    EXPECT_EQ(query.id.idiag_dst[0], htonl(INADDR_LOOPBACK));
    return Message(Found(query));
  };
  EXPECT_EQ(Ask(connection, ask), kUser);
  EXPECT_EQ(asked, 1);
}

TEST(PeerUserTest, OnlyTheOtherEndOfTheConnectionCounts) {
  const LoopbackConnection connection("127.0.0.1");
  const std::pair<const char*, std::function<void(inet_diag_msg*)>> wrong[] = {
      {"a listening socket", [](auto* found) { found->idiag_state = TCP_LISTEN; }},
      {"one that is connecting", [](auto* found) { found->idiag_state = TCP_SYN_SENT; }},
      {"one that is closed", [](auto* found) { found->idiag_state = TCP_FIN_WAIT1; }},
      {"one that no process has", [](auto* found) { found->idiag_inode = 0; }},
      {"another port", [](auto* found) { ++found->id.idiag_sport; }},
      {"to another port", [](auto* found) { ++found->id.idiag_dport; }},
      {"another address", [](auto* found) { ++found->id.idiag_src[0]; }},
      {"to another address", [](auto* found) { ++found->id.idiag_dst[0]; }},
      {"an unknown user", [](auto* found) { found->idiag_uid = OverflowUid(); }},
  };
  for (const auto& [what, change] : wrong) {
    EXPECT_EQ(AskChanged(connection, change), std::nullopt) << what;
  }
}

TEST(PeerUserTest, TheKernelMaySayNothing) {
  const LoopbackConnection connection("127.0.0.1");
  EXPECT_EQ(Ask(connection, [](const auto&) { return std::string(); }), std::nullopt);
  const auto error = [](const auto& query) { return Message(Found(query), NLMSG_ERROR); };
  EXPECT_EQ(Ask(connection, error), std::nullopt);
  const auto short_answer = [](const auto& query) { return Message(Found(query)).substr(0, 40); };
  EXPECT_EQ(Ask(connection, short_answer), std::nullopt);
}

// Then the socket that was found may be another's.
TEST(PeerUserTest, AConnectionThatEndsWhileTheKernelAnswersHasNoUser) {
  LoopbackConnection connection("127.0.0.1");
  const auto ask = [&](const inet_diag_req_v2& query) {
    connection.client.reset();
    pollfd ended = {connection.server.get(), POLLRDHUP, 0};
    EXPECT_EQ(poll(&ended, 1, 60'000), 1);
    return Message(Found(query));
  };
  EXPECT_EQ(Ask(connection, ask), std::nullopt);
}

TEST(PeerUserTest, OtherHostsAreNotAskedFor) {
  LoopbackConnection connection("127.0.0.1");
  reinterpret_cast<sockaddr_in*>(&connection.peer.storage)->sin_addr.s_addr = htonl(0x0a000001);
  const auto ask = [](const inet_diag_req_v2& query) {
    ADD_FAILURE();
    return Message(Found(query));
  };
  EXPECT_EQ(Ask(connection, ask), std::nullopt);
}

// Whether the kernel answers at all: a sandbox may forbid to ask.
bool KernelAnswers() { return !PeerUsers::AskKernel()(inet_diag_req_v2()).empty(); }

TEST(PeerUserTest, TheKernelKnowsTheUserOverLoopback) {
  if (!KernelAnswers()) GTEST_SKIP() << "sock_diag does not answer here";
  const PeerUsers users;
  for (const char* host : {"127.0.0.1", "127.0.0.2", "::1"}) {
    const LoopbackConnection connection(host);
    if (!connection.server.valid()) {
      std::printf("no %s here\n", host);
      continue;
    }
    EXPECT_EQ(users.UserOf(connection.server.get(), connection.peer), geteuid()) << host;
  }
}

TEST(PeerUserTest, TheKernelKnowsTheUserOfAnIpv4ClientOfAnIpv6Socket) {
  if (!KernelAnswers()) GTEST_SKIP() << "sock_diag does not answer here";
  LoopbackConnection connection("::");
  if (!connection.listening.valid()) GTEST_SKIP() << "no IPv6 here";
  const int port = PortOf(LocalAddress(connection.listening.get()));
  for (const int family : {AF_INET, AF_INET6}) {
    SocketAddress address;
    if (family == AF_INET) {
      auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
      v4->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      v4->sin_port = htons(static_cast<uint16_t>(port));
      address.size = sizeof(*v4);
    } else {
      auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
      const unsigned char mapped[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 127, 0, 0, 1};
      std::memcpy(&v6->sin6_addr, mapped, sizeof(mapped));
      v6->sin6_port = htons(static_cast<uint16_t>(port));
      address.size = sizeof(*v6);
    }
    address.storage.ss_family = static_cast<sa_family_t>(family);
    connection.client = FileDescriptor(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    connection.Connect(address);
    ASSERT_EQ(connection.peer.family(), AF_INET6);
    EXPECT_EQ(PeerUsers().UserOf(connection.server.get(), connection.peer), geteuid()) << family;
  }
}

TEST(PeerUserTest, TheKernelKnowsTheUserOfAUnixSocket) {
  SocketAddress peer;
  peer.storage.ss_family = AF_UNIX;
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  const FileDescriptor first(ends[0]), second(ends[1]);
  EXPECT_EQ(PeerUsers().UserOf(first.get(), peer), geteuid());
  EXPECT_EQ(PeerUsers().UserOf(-1, peer), std::nullopt);
}

}  // namespace
}  // namespace flashcore::server
