// Without what is tested here, these tests take an hour.
#include "server/base/interrupted_waits.h"

#include <sys/socket.h>

#include <cerrno>

#include "gtest/gtest.h"
#include "tests/base/lingering_socket.h"

namespace flashcore::server {
namespace {

using testing::Ends;
using testing::LingeringSocket;
using testing::Pair;
using testing::PassLingering;

TEST(InterruptedWaitsTest, TheCloseOfASocketDoesNotLinger) {
  LingeringSocket socket;
  {
    const InterruptedWaits interrupted;
    socket.Take().reset();
  }
  EXPECT_TRUE(socket.IsClosed());
}

TEST(InterruptedWaitsTest, AReadThatDropsAFileDoesNotLinger) {
  LingeringSocket socket;
  const Ends connection = Pair();
  PassLingering(&socket, connection.first);
  {
    const InterruptedWaits interrupted;
    char byte = 0;
    EXPECT_EQ(recv(connection.second.get(), &byte, 1, 0), 1);
  }
  EXPECT_TRUE(socket.IsClosed());
}

TEST(InterruptedWaitsTest, TheCloseOfAConnectionWithFilesInItDoesNotLinger) {
  LingeringSocket sockets[3];
  Ends connection = Pair();
  for (LingeringSocket& socket : sockets) PassLingering(&socket, connection.first);
  {
    const InterruptedWaits interrupted;
    connection.second.reset();
  }
  for (LingeringSocket& socket : sockets) EXPECT_TRUE(socket.IsClosed());
}

TEST(InterruptedWaitsTest, IsThereAgainOnTheSameThreadAndKeepsTheError) {
  for (int i = 0; i < 2; ++i) {
    LingeringSocket socket;
    {
      const InterruptedWaits interrupted;
      socket.Take().reset();
      errno = EXDEV;
    }
    EXPECT_EQ(errno, EXDEV);
    EXPECT_TRUE(socket.IsClosed());
  }
}

}  // namespace
}  // namespace flashcore::server
