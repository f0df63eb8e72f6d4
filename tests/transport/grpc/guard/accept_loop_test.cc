// The accept loop without gRPC: the test serves the connections.
#include "server/transport/grpc/guard/accept_loop.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <future>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "tests/base/fake_clock.h"
#include "tests/engine/fakes.h"
#include "tests/transport/grpc/guard/frames.h"
#include "tests/transport/rpc_setup.h"

namespace flashcore::server {
namespace {

using testing::Frame;
using testing::kAckFlag;
using testing::kEndHeaders;
using testing::kHeaders;
using testing::kReset;
using testing::kSettings;
using testing::WaitUntil;

// The first bytes of an HTTP/2 client, with an empty SETTINGS frame.
const std::string kPreface =
    std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") + std::string("\0\0\0\4\0\0\0\0\0", 9);

const std::string kAck = Frame(kSettings, kAckFlag, 0, "");

class Client {
 public:
  explicit Client(const SocketAddress& server)
      : socket_(::socket(server.family(), SOCK_STREAM | SOCK_CLOEXEC, 0)), server_(server) {}
  // `from`: an IPv4 address to come from; 0: any.
  Client(const SocketAddress& server, absl::string_view first_bytes, uint32_t from = 0)
      : Client(server) {
    if (from != 0) {
      sockaddr_in own = {};
      own.sin_family = AF_INET;
      own.sin_addr.s_addr = htonl(from);
      EXPECT_EQ(bind(socket_.get(), reinterpret_cast<const sockaddr*>(&own), sizeof(own)), 0);
    }
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
  int port() const { return PortOf(LocalAddress(socket_.get())); }
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
  void Start(const AcceptLoop::Options& options, bool tls = false) {
    loop_.reset();
    auto sockets = ListenTcp("127.0.0.1", 0);
    ASSERT_TRUE(sockets.ok()) << sockets.status();
    FileDescriptor listening = std::move(sockets->front());
    address_ = LocalAddress(listening.get());
    listening_ = listening.get();
    auto unix_socket = ListenUnix(absl::StrCat(::testing::TempDir(), "/accept.", getpid()));
    ASSERT_TRUE(unix_socket.ok()) << unix_socket.status();
    unix_address_ = LocalAddress(unix_socket->get());
    const auto serve = [this](FileDescriptor connection) {
      MutexLock lock(&mutex_);
      servers_.insert(std::this_thread::get_id());
      served_.push_back(std::move(connection));
    };
    std::vector<AcceptLoop::Listener> listeners;
    listeners.push_back({"test", tls, std::move(listening), serve});
    listeners.push_back({"unix", /*tls=*/false, *std::move(unix_socket), serve});
    loop_ = std::make_unique<AcceptLoop>(options, std::move(listeners), &by_client_, &passed_files_,
                                         &metrics_, &clock_);
  }
  static AcceptLoop::Options Limits(size_t all, size_t one) {
    AcceptLoop::Options options;
    options.connections = {all, one};
    return options;
  }
  // A connection that is served, as number `number`.
  Client Served(size_t number) {
    Client client(address_, kPreface);
    EXPECT_TRUE(WaitUntil([&] { return served() == number + 1; }));
    return client;
  }
  std::shared_ptr<ClientConnection> Calls(size_t connection) {
    return by_client_.Find(DescriptorName(SocketOf(connection)));
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
    return testing::CounterOf(metrics_, "flashcore_connections_refused_total", reason);
  }

  testing::FakeClock clock_;
  PassedFiles passed_files_;
  ClientConnections by_client_{100};
  Metrics metrics_{testing::FakeMetricsOptions({})};
  SocketAddress address_, unix_address_;
  int listening_ = -1;
  Mutex mutex_;
  std::deque<FileDescriptor> served_;
  std::set<std::thread::id> servers_;  // the threads that called serve
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

TEST_F(AcceptLoopTest, AConnectionTakesNoThread) {
  Start({});
  std::vector<Client> clients;
  for (size_t i = 0; i < 20; ++i) clients.push_back(Served(i));
  MutexLock lock(&mutex_);
  EXPECT_EQ(servers_.size(), 1);
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
  const std::shared_ptr<ClientConnection> found = by_client_.Find(name);
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->peer().user.value_or(geteuid()), geteuid());  // a sandbox may forbid to ask
  EXPECT_TRUE(absl::StartsWith(found->peer().address, "ipv4:127.0.0.1:")) << found->peer().address;
  EndFirst();
  EXPECT_TRUE(WaitUntil([&] { return by_client_.Find(name) == nullptr; }));
}

TEST_F(AcceptLoopTest, EndsABrokenConnection) {
  Start({});
  const Client broken(address_, kPreface), other(address_, kPreface);
  ASSERT_TRUE(WaitUntil([&] { return served() == 2; }));
  by_client_.Find(DescriptorName(SocketOf(0)))->Break();
  clock_.Advance(std::chrono::seconds(1));
  EXPECT_TRUE(WaitUntil([&] { return broken.closed() != other.closed(); }));
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
    Start(per_host ? Limits(1024, 2) : Limits(2, 1024));
    const Client one(address_, kPreface);
    const Client two(address_, kPreface);
    ASSERT_TRUE(WaitUntil([&] { return served() == 2; }));
    const Client three(address_, kPreface);  // the others may be about to call
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
  Start(Limits(1024, 2));
  const Client oldest(address_, "PRI");
  ASSERT_TRUE(WaitUntil([&] { return metrics_.connections.Value() == 1; }));
  clock_.Advance(Nanoseconds(1));
  const Client younger(address_, "");
  const Client honest(address_, kPreface);
  EXPECT_TRUE(oldest.WaitUntilClosed());
  EXPECT_TRUE(WaitUntil([&] { return served() == 1; }));
  EXPECT_FALSE(younger.closed());
  EXPECT_EQ(refused("silent"), 1);
}

TEST_F(AcceptLoopTest, AConnectionThatHasBegunIsNotSilentBecauseTheLoopWasBusy) {
  Start(Limits(1024, 2));
  std::optional<Client> clients[3];
  {
    MutexLock lock(&mutex_);  // the loop waits for it when it hands one over
    for (auto& client : clients) client.emplace(address_, kPreface);
  }
  EXPECT_TRUE(clients[2]->WaitUntilClosed());
  EXPECT_TRUE(WaitUntil([&] { return served() == 2; }));
  EXPECT_FALSE(clients[0]->closed());
  EXPECT_FALSE(clients[1]->closed());
  EXPECT_EQ(refused("silent"), 0);
}

TEST_F(AcceptLoopTest, TheLongestIdleConnectionMakesRoom) {
  Start(Limits(1024, 3));
  const Client calling = Served(0), called = Served(1), idle = Served(2);
  const std::string name = DescriptorName(SocketOf(2));
  Calls(0)->CallBegan();  // and never ends
  clock_.Advance(Door::kIdleAfter);
  Calls(1)->CallBegan();
  Calls(1)->CallEnded(clock_.Now());
  const Client first = Served(3);
  EXPECT_TRUE(idle.WaitUntilClosed());
  EXPECT_EQ(by_client_.Find(name), nullptr);
  EXPECT_EQ(refused("made_room"), 1);

  const Client refused_one(address_, kPreface);  // nobody is idle for long enough
  EXPECT_TRUE(refused_one.WaitUntilClosed());
  EXPECT_EQ(refused("max_connections_per_host"), 1);

  clock_.Advance(Door::kIdleAfter);
  Calls(3)->CallBegan();
  const Client second = Served(4);
  EXPECT_TRUE(called.WaitUntilClosed());
  EXPECT_FALSE(calling.closed());
  EXPECT_FALSE(first.closed());
  EXPECT_EQ(metrics_.connections.Value(), 3);
}

TEST_F(AcceptLoopTest, AllLoopbackAddressesOfOneUserAreOneClient) {
  Start(Limits(1024, 2));
  const Client one(address_, kPreface, 0x7f000003);
  const Client two(address_, kPreface, 0x7f000004);
  ASSERT_TRUE(WaitUntil([&] { return served() == 2; }));
  const Client three(address_, kPreface, 0x7f000005);
  EXPECT_TRUE(three.WaitUntilClosed());
  EXPECT_EQ(refused("max_connections_per_host"), 1);
}

// The name of a connection with TLS may be that of another one soon, so its calls are nobody's.
TEST_F(AcceptLoopTest, WithTlsTheUserIsTheClientButDoesNotCall) {
  Start(Limits(1024, 2), /*tls=*/true);
  const Client one(address_, kPreface, 0x7f000003), two(address_, kPreface, 0x7f000004);
  ASSERT_TRUE(WaitUntil([&] { return served() == 2; }));
  const Client three(address_, kPreface);
  EXPECT_TRUE(three.WaitUntilClosed());
  EXPECT_EQ(refused("max_connections_per_host"), 1);
  const std::string name = absl::StrCat("ipv4:127.0.0.3:", one.port());
  EXPECT_EQ(by_client_.Find(name), by_client_.Find(name));  // it is open
  EXPECT_EQ(by_client_.Find(name)->peer().user, std::nullopt);
  EXPECT_EQ(by_client_.Find(DescriptorName(SocketOf(0))), nullptr);
}

TEST_F(AcceptLoopTest, TcpAndUnixSocketsHaveConnectionsOfTheirOwn) {
  Start(Limits(2, 1024));
  const Client one = Served(0), two = Served(1);
  const Client three(address_, kPreface);
  EXPECT_TRUE(three.WaitUntilClosed());
  const Client other(unix_address_, kPreface), last(unix_address_, kPreface);
  EXPECT_TRUE(WaitUntil([&] { return served() == 4; }));
  const Client refused_one(unix_address_, kPreface);
  EXPECT_TRUE(refused_one.WaitUntilClosed());
  for (const Client* client : {&one, &two, &other, &last}) EXPECT_FALSE(client->closed());
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

// As gRPC reads, without end: what has come, 0 at the end, or -1.
ssize_t ReadAll(int socket) {
  ssize_t all = 0;
  while (true) {
    pollfd readable = {socket, POLLIN, 0};
    poll(&readable, 1, 60'000);
    char buffer[4096];
    iovec piece = {buffer, sizeof(buffer)};
    msghdr message = {};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    const ssize_t bytes = recvmsg(socket, &message, 0);
    if (bytes <= 0) return bytes < 0 ? bytes : all;
    all += bytes;
  }
}

// Streams that the client begins and resets.
std::string Resets(uint32_t first, uint32_t count) {
  std::string frames;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t stream = 2 * (first + i) + 1;
    frames += Frame(kHeaders, kEndHeaders, stream, "");
    frames += Frame(kReset, 0, stream, std::string(4, '\0'));
  }
  return frames;
}

class AcceptLoopFloodTest : public AcceptLoopTest {
 protected:
  void SetUp() override {
    options_.inflow.streams = 1000;  // else some would count as ended
    options_.inflow.calls = 1000;
    options_.resets = 20;
    Start(options_);
  }
  // A new connection, number `number`, that the loop cuts off for its resets.
  void Flood(size_t number) {
    Client client(address_, kPreface + kAck);
    ASSERT_TRUE(WaitUntil([&] { return served() == number + 1; }));
    EndByFlood(&client, number);
  }
  void EndByFlood(Client* client, size_t number) {
    const double before = refused("flood");
    EXPECT_TRUE(client->Send(Resets(0, 21)));
    ReadAll(SocketOf(number));
    EXPECT_TRUE(WaitUntil([&] { return refused("flood") == before + 1; }));
  }
  // Reads from a served connection, and returns how many calls it has begun.
  uint64_t CallsOnceRead(size_t connection, uint64_t expected) {
    Inflow* const inflow = Inflow::Of(SocketOf(connection));
    if (readers_.size() <= connection) readers_.emplace_back(ReadAll, SocketOf(connection));
    EXPECT_TRUE(WaitUntil([&] { return inflow->calls() == expected || inflow->cut_off(); }));
    return inflow->calls();
  }
  void TearDown() override {
    for (size_t i = 0; i < readers_.size(); ++i) shutdown(SocketOf(i), SHUT_RDWR);
    for (std::thread& reader : readers_) reader.join();
  }

  AcceptLoop::Options options_;
  std::deque<std::thread> readers_;
};

TEST_F(AcceptLoopFloodTest, CutsOffAClientThatResetsTooManyCalls) {
  Client honest(address_, kPreface + kAck);
  ASSERT_TRUE(WaitUntil([&] { return served() == 1; }));
  Client flooding(address_, kPreface + kAck);
  ASSERT_TRUE(WaitUntil([&] { return served() == 2; }));
  EXPECT_TRUE(honest.Send(Resets(0, 20)));
  EXPECT_EQ(CallsOnceRead(0, 20), 20U);
  EXPECT_TRUE(flooding.Send(Resets(0, 21)));
  EXPECT_EQ(CallsOnceRead(1, 0), 0U);  // gRPC did not get them
  EXPECT_TRUE(flooding.WaitUntilClosed());
  EXPECT_TRUE(WaitUntil([&] { return refused("flood") == 1; }));
  EXPECT_FALSE(honest.closed());
}

TEST_F(AcceptLoopFloodTest, CutsOffAClientThatResetsTooManyCallsOnSeveralConnections) {
  {
    Client first(address_, kPreface + kAck);
    ASSERT_TRUE(WaitUntil([&] { return served() == 1; }));
    EXPECT_TRUE(first.Send(Resets(0, 15)));
    EXPECT_EQ(CallsOnceRead(0, 15), 15U);
  }
  Client other_door(unix_address_, kPreface + kAck);
  ASSERT_TRUE(WaitUntil([&] { return served() == 2; }));
  EXPECT_TRUE(other_door.Send(Resets(0, 15)));
  EXPECT_EQ(CallsOnceRead(1, 15), 15U);
  Client second(address_, kPreface + kAck);
  ASSERT_TRUE(WaitUntil([&] { return served() == 3; }));
  EXPECT_TRUE(second.Send(Resets(0, 6)));
  EXPECT_EQ(CallsOnceRead(2, 0), 0U);
  EXPECT_TRUE(WaitUntil([&] { return refused("flood") == 1; }));
}

TEST_F(AcceptLoopFloodTest, EachConnectionOfAProxyMayResetCalls) {
  options_.is_proxy = [](const Peer&) { return true; };
  Start(options_);
  std::deque<Client> clients;
  for (size_t i = 0; i < 3; ++i) {
    clients.emplace_back(address_, kPreface + kAck);
    ASSERT_TRUE(WaitUntil([&] { return served() == i + 1; }));
    EXPECT_TRUE(clients.back().Send(Resets(0, 15)));
    EXPECT_EQ(CallsOnceRead(i, 15), 15U);
  }
  EXPECT_EQ(refused("flood"), 0);
}

TEST_F(AcceptLoopFloodTest, BansWhoHasFloodedADoorForAWhile) {
  const Client honest = Served(0);
  Flood(1);
  const Client again(address_, kPreface);
  EXPECT_TRUE(again.WaitUntilClosed());
  EXPECT_TRUE(WaitUntil([&] { return refused("banned") == 1; }));
  const Client other_door(unix_address_, kPreface);
  EXPECT_TRUE(WaitUntil([&] { return served() == 3; }));

  clock_.Advance(Door::kFirstBan);
  Flood(3);
  clock_.Advance(Door::kFirstBan);
  const Client early(address_, kPreface);
  EXPECT_TRUE(early.WaitUntilClosed());
  EXPECT_TRUE(WaitUntil([&] { return refused("banned") == 2; }));
  clock_.Advance(Door::kFirstBan);
  const Client after = Served(4);
  for (const Client* client : {&honest, &other_door, &after}) EXPECT_FALSE(client->closed());
}

TEST_F(AcceptLoopFloodTest, BansWhoFloodedOnAConnectionThatHasEnded) {
  const Client client = Served(0);
  Inflow* const inflow = Inflow::Of(SocketOf(0));
  EndFirst();
  EXPECT_TRUE(WaitUntil([&] { return metrics_.connections.Value() == 0; }));
  const std::string bytes = kPreface + kAck + Resets(0, 21);
  const absl::string_view piece = bytes;
  EXPECT_FALSE(inflow->Receive({&piece, 1}));  // gRPC has read them late
  clock_.Advance(std::chrono::milliseconds(50));
  const Client again(address_, kPreface);
  EXPECT_TRUE(again.WaitUntilClosed());
  EXPECT_TRUE(WaitUntil([&] { return refused("banned") == 1; }));
  EXPECT_EQ(refused("flood"), 1);
}

TEST_F(AcceptLoopFloodTest, DoesNotBanAProxy) {
  options_.is_proxy = [](const Peer& peer) {
    return absl::StartsWith(peer.address, "ipv4:127.0.0.1:");
  };
  Start(options_);
  Flood(0);
  Flood(1);
  Client stranger(address_, kPreface + kAck, 0x7f000003);
  ASSERT_TRUE(WaitUntil([&] { return served() == 3; }));
  EndByFlood(&stranger, 2);
  const Client again(address_, kPreface, 0x7f000003);
  EXPECT_TRUE(again.WaitUntilClosed());  // the others from this host are let in all the same
  const Client proxy = Served(3);
  EXPECT_EQ(refused("flood"), 3);
  EXPECT_EQ(refused("banned"), 1);
}

TEST_F(AcceptLoopFloodTest, AClientMayResetCallsAgainAfterAWhile) {
  Client client(address_, kPreface + kAck);
  ASSERT_TRUE(WaitUntil([&] { return served() == 1; }));
  for (uint32_t turn = 0; turn < 20; ++turn) {
    EXPECT_TRUE(client.Send(Resets(10 * turn, 10)));
    CallsOnceRead(0, 10 * (turn + 1));
    // A tenth of the resets is forgiven in 50 ms. The loop has looked when it accepts another one.
    clock_.Advance(std::chrono::milliseconds(250));
    const Client other(address_, kPreface);
    ASSERT_TRUE(WaitUntil([&] { return served() == 2 + turn; }));
  }
  EXPECT_FALSE(client.closed());
  EXPECT_EQ(refused("flood"), 0);
}

TEST_F(AcceptLoopFloodTest, GrpcDoesNotGetTheRestOfAClientThatIsGone) {
  {
    Client client(address_, kPreface + std::string(100'000, '\0'));
    ASSERT_TRUE(WaitUntil([&] { return served() == 1; }));
  }
  Inflow* const inflow = Inflow::Of(SocketOf(0));
  EXPECT_TRUE(WaitUntil([&] { return inflow->hung_up(); }));
  EXPECT_EQ(ReadAll(SocketOf(0)), 0);
}

// gRPC may have closed a descriptor before the loop has learnt that the connection has ended.
TEST_F(AcceptLoopFloodTest, AConnectionIsNotTakenForTheNextOneWithItsNumber) {
  Client first = Served(0);
  const int number = SocketOf(0);
  {
    MutexLock lock(&mutex_);
    served_.pop_front();
  }
  Client second(address_, kPreface + kAck);
  ASSERT_TRUE(WaitUntil([&] { return served() == 1; }));
  ASSERT_EQ(SocketOf(0), number);
  EXPECT_TRUE(first.WaitUntilClosed());
  EndByFlood(&second, 0);
  EXPECT_EQ(refused("flood"), 1);
}

TEST_F(AcceptLoopFloodTest, NoOtherFileHasTheNumberOfOneOfGrpc) {
  const Client client(address_, kPreface);
  ASSERT_TRUE(WaitUntil([&] { return served() == 1; }));
  const FileDescriptor other(open("/dev/null", O_RDONLY | O_CLOEXEC));
  rlimit limit;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlim_t first = std::min<rlim_t>(1280, limit.rlim_cur / 2 + 128);
  EXPECT_GE(static_cast<rlim_t>(SocketOf(0)), first);
  EXPECT_LT(static_cast<rlim_t>(other.get()), first);
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

}  // namespace
}  // namespace flashcore::server
