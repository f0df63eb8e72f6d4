// Without what is tested here, these tests take an hour.
#include "server/transport/rpc/passed_files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <utility>

#include "gtest/gtest.h"
#include "tests/base/lingering_socket.h"

namespace flashcore::server {
namespace {

using testing::Ends;
using testing::LingeringSocket;
using testing::Pair;
using testing::PassLingering;

Ends Pipe() {
  int ends[2];
  EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

// Waits for it.
bool HasEnded(const FileDescriptor& reader) {
  char byte = 0;
  return read(reader.get(), &byte, 1) == 0;
}

TEST(PassedFilesTest, ClosesFilesOfEveryKind) {
  PassedFiles files;
  Ends pipe = Pipe(), connection = Pair();
  LingeringSocket socket;
  FileDescriptor memory(memfd_create("memory", MFD_CLOEXEC));
  const int number = memory.get();
  files.Close("client", std::move(pipe.second));
  files.Close("client", std::move(connection.second));
  files.Close("client", socket.Take());
  EXPECT_TRUE(HasEnded(pipe.first));
  EXPECT_TRUE(HasEnded(connection.first));
  EXPECT_TRUE(socket.IsClosed());
  {
    PassedFiles ending;
    ending.Close("client", std::move(memory));
  }  // closes what it has
  EXPECT_EQ(fcntl(number, F_GETFD), -1);
}

TEST(PassedFilesTest, EmptiesAConnectionBeforeItClosesIt) {
  LingeringSocket sockets[3];
  Ends connection = Pair();
  for (LingeringSocket& socket : sockets) {
    EXPECT_EQ(write(connection.first.get(), "xyz", 3), 3);
    PassLingering(&socket, connection.first);
  }
  FileDescriptor same(dup(connection.second.get()));
  {
    PassedFiles files;
    files.CloseConnection("client", std::move(connection.second));
    EXPECT_EQ(send(connection.first.get(), "x", 1, MSG_NOSIGNAL), -1);  // at once
    EXPECT_TRUE(HasEnded(connection.first));
  }
  for (LingeringSocket& socket : sockets) EXPECT_TRUE(socket.IsClosed());
  char byte = 0;
  EXPECT_EQ(recv(same.get(), &byte, 1, MSG_DONTWAIT), 0);
  same.reset();
}

TEST(PassedFilesTest, ManyFilesOfOneClientAreAllClosed) {
  PassedFiles files;
  Ends connection = Pair();
  for (size_t i = 0; i < 2 * PassedFiles::kMaxWaiting; ++i) {
    files.Close("client", FileDescriptor(dup(connection.second.get())));
  }
  files.Close("other", std::move(connection.second));
  EXPECT_TRUE(HasEnded(connection.first));
  EXPECT_TRUE(files.HasRoom("client"));  // for other files
}

}  // namespace
}  // namespace flashcore::server
