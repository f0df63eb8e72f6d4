// The accept loop without gRPC: the test serves the connections.
#include "server/transport/grpc/accept_loop.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <deque>
#include <future>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "tests/base/fake_clock.h"
#include "tests/engine/fakes.h"
#include "tests/transport/rpc_setup.h"

namespace flashcore::server {
namespace {

using testing::WaitUntil;

// What an HTTP/2 client sends first, with an empty SETTINGS frame.
const std::string kPreface =
    std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") + std::string("\0\0\0\4\0\0\0\0\0", 9);

class Client {
 public:
  explicit Client(const SocketAddress& server)
      : socket_(::socket(server.family(), SOCK_STREAM | SOCK_CLOEXEC, 0)), server_(server) {}
  Client(const SocketAddress& server, absl::string_view first_bytes) : Client(server) {
    Connect();
    Send(first_bytes);
  }

  void Connect() { ASSERT_EQ(connect(socket_.get(), server_.get(), server_.size), 0); }
  // False if the server has closed the connection.
  bool Send(absl::string_view bytes) {
    return send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }
  // Waits for so many bytes. False if the server has closed the connection.
  bool Receive(size_t bytes) {
    std::string buffer(bytes, '\0');
    return recv(socket_.get(), buffer.data(), bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes);
  }
  [[nodiscard]] bool WaitUntilClosed() const {
    pollfd ended = {socket_.get(), POLLRDHUP, 0};
    return poll(&ended, 1, 60'000) == 1;
  }
  bool closed() const {
    pollfd ended = {socket_.get(), POLLRDHUP, 0};
    return poll(&ended, 1, 0) == 1;
  }

 private:
  FileDescriptor socket_;
  SocketAddress server_;
};

class AcceptLoopTest : public ::testing::Test {
 protected:
  void Start(const AcceptLoop::Options& options, int max_connections = 1024) {
    loop_.reset();
    auto sockets = ListenTcp("127.0.0.1", 0);
    ASSERT_TRUE(sockets.ok()) << sockets.status();
    FileDescriptor listening = std::move(sockets->front());
    address_ = LocalAddress(listening.get());
    listening_ = listening.get();
    count_ = std::make_unique<ConnectionCount>(max_connections, &metrics_.connections,
                                               &metrics_.local_connections);
    const auto serve = [this](FileDescriptor connection) {
      MutexLock lock(&mutex_);
      served_.push_back(std::move(connection));
    };
    std::vector<AcceptLoop::Listener> listeners;
    listeners.push_back({"test", /*tls=*/false, std::move(listening), serve});
    loop_ = std::make_unique<AcceptLoop>(options, std::move(listeners), count_.get(), &by_client_,
                                         &metrics_, &clock_);
  }

  size_t served() {
    MutexLock lock(&mutex_);
    return served_.size();
  }
  int SocketOf(size_t connection) {
    MutexLock lock(&mutex_);
    return served_[connection].get();
  }
  // As gRPC ends a connection.
  void EndFirst() {
    MutexLock lock(&mutex_);
    shutdown(served_.front().get(), SHUT_RDWR);
    served_.pop_front();
  }
  double refused(const std::string& reason) const {
    for (const auto& family : metrics_.Collect()) {
      if (family.name != "flashcore_connections_refused_total") continue;
      for (const auto& metric : family.metric) {
        if (metric.label[0].value == reason) return metric.counter.value;
      }
    }
    return -1;
  }

  testing::FakeClock clock_;
  ClientConnections by_client_{100};
  Metrics metrics_{testing::FakeMetricsOptions({})};
  std::unique_ptr<ConnectionCount> count_;
  SocketAddress address_;
  int listening_ = -1;
  Mutex mutex_;
  std::deque<FileDescriptor> served_;
  std::unique_ptr<AcceptLoop> loop_;
};

TEST_F(AcceptLoopTest, ServesAConnectionOnceItHasSentThePreface) {
  Start({});
  Client half(address_, kPreface.substr(0, 32));
  Client whole(address_, kPreface);
  EXPECT_TRUE(WaitUntil([&] { return served() == 1; }));
  EXPECT_TRUE(half.Send(kPreface.substr(32)));
  EXPECT_TRUE(WaitUntil([&] { return served() == 2; }));
  EXPECT_EQ(metrics_.connections.Value(), 2);
  EndFirst();
  EXPECT_TRUE(WaitUntil([&] { return metrics_.connections.Value() == 1; }));
}

TEST_F(AcceptLoopTest, HoldsAConnectionUntilItsSettingsAreThere) {
  Start({});
  std::string settings = kPreface + std::string(6, '\0');  // one setting
  settings[26] = 6;
  Client half(address_, settings.substr(0, settings.size() - 1));
  Client whole(address_, settings);
  EXPECT_TRUE(WaitUntil([&] { return served() == 1; }));
  EXPECT_TRUE(half.Send(settings.substr(settings.size() - 1)));
  EXPECT_TRUE(WaitUntil([&] { return served() == 2; }));
}

TEST_F(AcceptLoopTest, HandsOverWhatIsNotHttp2) {
  Start({});
  const Client client(address_, "GET / HTTP/1.1\r\nHost: x\r\n");  // gRPC refuses it
  EXPECT_TRUE(WaitUntil([&] { return served() == 1; }));
}

TEST_F(AcceptLoopTest, TellsWhoIsAtTheOtherEndUntilTheConnectionEnds) {
  Start({});
  const Client client(address_, kPreface);
  ASSERT_TRUE(WaitUntil([&] { return served() == 1; }));
  const std::string name = DescriptorName(SocketOf(0));
  const absl::StatusOr<Peer> peer = by_client_.Find(name);
  ASSERT_TRUE(peer.ok()) << peer.status();
  EXPECT_EQ(peer->user.value_or(geteuid()), geteuid());  // a sandbox may forbid to ask
  EXPECT_TRUE(absl::StartsWith(peer->address, "ipv4:127.0.0.1:")) << peer->address;
  EndFirst();
  EXPECT_TRUE(WaitUntil([&] { return absl::IsUnavailable(by_client_.Find(name).status()); }));
}

TEST_F(AcceptLoopTest, ClosesASilentConnectionInTime) {
  AcceptLoop::Options options;
  Start(options);
  const Client silent(address_, "");
  const Client half(address_, "PRI");
  ASSERT_TRUE(WaitUntil([&] { return metrics_.connections.Value() == 2; }));
  clock_.Advance(options.first_bytes_within - Nanoseconds(1));
  const Client other(address_, kPreface);
  ASSERT_TRUE(WaitUntil([&] { return served() == 1; }));  // the loop has looked at the time
  EXPECT_FALSE(silent.closed());
  EXPECT_FALSE(half.closed());
  clock_.Advance(Nanoseconds(1));
  EXPECT_TRUE(silent.WaitUntilClosed());
  EXPECT_TRUE(half.WaitUntilClosed());
  EXPECT_TRUE(WaitUntil([&] { return refused("silent") == 2; }));
  EXPECT_TRUE(WaitUntil([&] { return metrics_.connections.Value() == 1; }));
  EXPECT_FALSE(other.closed());
}

TEST_F(AcceptLoopTest, RefusesConnectionsBeyondALimit) {
  for (const bool per_host : {false, true}) {
    AcceptLoop::Options options;
    if (per_host) options.max_connections_per_host = 2;
    Start(options, per_host ? 1024 : 2);
    const Client one(address_, kPreface);
    const Client two(address_, kPreface);
    ASSERT_TRUE(WaitUntil([&] { return served() == 2; }));
    const Client three(address_, kPreface);
    EXPECT_TRUE(three.WaitUntilClosed());
    EXPECT_EQ(refused(per_host ? "max_connections_per_host" : "max_connections"), 1);
    EXPECT_FALSE(one.closed());
    EndFirst();
    ASSERT_TRUE(WaitUntil([&] { return metrics_.connections.Value() == 1; }));
    const Client four(address_, kPreface);
    EXPECT_TRUE(WaitUntil([&] { return served() == 2; }));
    loop_.reset();
    served_.clear();
  }
}

TEST_F(AcceptLoopTest, ASilentConnectionMakesRoom) {
  Start({}, /*max_connections=*/2);
  const Client oldest(address_, "PRI");
  const Client younger(address_, "");
  const Client honest(address_, kPreface);
  EXPECT_TRUE(oldest.WaitUntilClosed());
  EXPECT_TRUE(WaitUntil([&] { return served() == 1; }));
  EXPECT_FALSE(younger.closed());
  EXPECT_EQ(refused("silent"), 1);
}

// Takes every file that this process may open.
class NoFiles {
 public:
  NoFiles() {
    getrlimit(RLIMIT_NOFILE, &before_);
    rlimit few = before_;
    few.rlim_cur = 256;
    setrlimit(RLIMIT_NOFILE, &few);
    while (true) {
      FileDescriptor file(open("/dev/null", O_RDONLY | O_CLOEXEC));
      if (!file.valid()) break;
      files_.push_back(std::move(file));
    }
  }
  ~NoFiles() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_ = {};
  std::deque<FileDescriptor> files_;
};

TEST_F(AcceptLoopTest, SurvivesRunningOutOfFiles) {
  Start({});
  // UBSan opens a pipe when it sees an object of a class for the first time.
  const Client first(address_, kPreface);
  EXPECT_TRUE(WaitUntil([&] { return served() == 1; }));
  std::deque<Client> clients;
  for (int i = 0; i < 50; ++i) clients.emplace_back(address_);
  {
    const NoFiles none;
    for (Client& client : clients) client.Connect();
    for (const Client& client : clients) EXPECT_TRUE(client.WaitUntilClosed());
  }
  EXPECT_TRUE(WaitUntil([&] { return refused("no_files") == 50; }));
  const Client honest(address_, kPreface);
  EXPECT_TRUE(WaitUntil([&] { return served() == 2; }));
}

// Reads what comes, and answers each `piece` bytes with one; 0: never.
void ReadAll(int socket, size_t piece) {
  std::string buffer(64 << 10, '\0');
  size_t unanswered = 0;
  while (true) {
    pollfd readable = {socket, POLLIN, 0};
    poll(&readable, 1, 60'000);
    const ssize_t bytes = recv(socket, buffer.data(), buffer.size(), 0);
    if (bytes <= 0) return;
    unanswered += static_cast<size_t>(bytes);
    for (; piece > 0 && unanswered >= piece; unanswered -= piece) {
      send(socket, "x", 1, MSG_NOSIGNAL);
    }
  }
}

// The loop looks at all connections before it looks at one again. So once it has cut off the second
// flood, it has seen how many bytes the first client had sent before that flood began.
TEST_F(AcceptLoopTest, CutsOffAFloodThatIsNotAnswered) {
  AcceptLoop::Options options;
  options.max_unanswered_bytes = 1 << 20;
  Start(options);
  const std::string piece(256 << 10, 'x');
  Client answered(address_, kPreface);
  ASSERT_TRUE(WaitUntil([&] { return served() == 1; }));
  std::thread reader(ReadAll, SocketOf(0), piece.size());
  for (size_t flood = 1; flood <= 2; ++flood) {
    for (int i = 0; i < 20; ++i) {
      ASSERT_TRUE(answered.Send(piece));
      ASSERT_TRUE(answered.Receive(1));
    }
    Client client(address_, kPreface);
    ASSERT_TRUE(WaitUntil([&] { return served() == 1 + flood; }));
    std::thread flooded(ReadAll, SocketOf(flood), 0);
    EXPECT_TRUE(WaitUntil([&] {
      clock_.Advance(std::chrono::milliseconds(50));
      return client.closed() || !client.Send(piece);
    }));
    flooded.join();
    EXPECT_TRUE(WaitUntil([&] { return refused("flood") == static_cast<double>(flood); }));
  }
  EXPECT_FALSE(answered.closed());
  EndFirst();
  reader.join();
}

TEST_F(AcceptLoopTest, ConnectionsOfTheLocalSocketCountToo) {
  Start({}, /*max_connections=*/2);
  const Client first(address_, kPreface);
  ASSERT_TRUE(WaitUntil([&] { return served() == 1; }));
  count_->SetLocal(1);
  const Client second(address_, kPreface);
  EXPECT_TRUE(second.WaitUntilClosed());
  EXPECT_EQ(refused("max_connections"), 1);
  count_->SetLocal(0);
  const Client third(address_, kPreface);
  EXPECT_TRUE(WaitUntil([&] { return served() == 2; }));
}

TEST_F(AcceptLoopTest, TellsWhenAListenerIsDead) {
  std::promise<std::string> dead;
  AcceptLoop::Options options;
  options.on_dead = [&](const std::string& address) { dead.set_value(address); };
  Start(options);
  const Client client(address_, kPreface);
  ASSERT_TRUE(WaitUntil([&] { return served() == 1; }));
  std::future<std::string> found = dead.get_future();
  EXPECT_EQ(found.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  shutdown(listening_, SHUT_RDWR);
  ASSERT_EQ(found.wait_for(testing::kLong), std::future_status::ready);
  EXPECT_EQ(found.get(), "test");
}

TEST(ConnectionHostTest, CountsByNetworkOrUser) {
  SocketAddress v4;
  auto* in = reinterpret_cast<sockaddr_in*>(&v4.storage);
  in->sin_family = AF_INET;
  in->sin_addr.s_addr = htonl(0x01020304);
  EXPECT_EQ(ConnectionHost(-1, v4), "1.2.3.4");

  SocketAddress v6;
  auto* in6 = reinterpret_cast<sockaddr_in6*>(&v6.storage);
  in6->sin6_family = AF_INET6;
  const unsigned char mapped[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 1, 2, 3, 4};
  memcpy(&in6->sin6_addr, mapped, 16);
  EXPECT_EQ(ConnectionHost(-1, v6), "1.2.3.4");
  const unsigned char global[16] = {0x20, 1, 0xd, 0xb8, 0, 0, 0, 7, 1, 2, 3, 4, 5, 6, 7, 8};
  memcpy(&in6->sin6_addr, global, 16);
  EXPECT_EQ(ConnectionHost(-1, v6), "2001:db8:0:7::/64");

  SocketAddress unix_socket;
  unix_socket.storage.ss_family = AF_UNIX;
  EXPECT_EQ(ConnectionHost(-1, unix_socket), "uid:unknown");  // and not uid:0
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  EXPECT_EQ(ConnectionHost(ends[0], unix_socket), absl::StrCat("uid:", geteuid()));
  for (const int end : ends) close(end);
}

}  // namespace
}  // namespace flashcore::server
