#include "server/base/thread_reserve.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <future>
#include <iterator>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "server/base/cores.h"

namespace flashcore::server {
namespace {

// Threads of this process.
int Threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<int>(std::distance(begin(tasks), end(tasks)));
}

// One test, since the reserve is the process's.
TEST(ThreadReserveTest, ThreadsComeFromTheReserve) {
  ASSERT_TRUE(ReserveThreads(3).ok());
  ASSERT_EQ(ReservedThreads(), 3);
  const int before = Threads();

  // One that is joined ends; it runs where its maker may, and blocks the same signals.
  const std::vector<int> all = AllowedCores();
  ASSERT_TRUE(StayOnCores({all.data(), 1}).ok());
  sigset_t user;
  sigemptyset(&user);
  sigaddset(&user, SIGUSR1);
  ASSERT_EQ(pthread_sigmask(SIG_BLOCK, &user, nullptr), 0);
  std::vector<int> cores;
  sigset_t blocked;
  std::thread([&] {
    cores = AllowedCores();
    pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
  }).join();
  EXPECT_EQ(cores, std::vector<int>{all.front()});
  EXPECT_EQ(sigismember(&blocked, SIGUSR1), 1);
  EXPECT_EQ(ReservedThreads(), 2);

  // A detached one comes back.
  pthread_attr_t detached;
  pthread_attr_init(&detached);
  pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  for (int i = 0; i < 10; ++i) {
    std::promise<void> ran;
    const auto body = [](void* done) -> void* {
      static_cast<std::promise<void>*>(done)->set_value();
      return nullptr;
    };
    pthread_t thread;
    ASSERT_EQ(pthread_create(&thread, &detached, body, &ran), 0);
    ran.get_future().wait();
    while (ReservedThreads() < 2) std::this_thread::yield();
  }
  pthread_attr_destroy(&detached);
  EXPECT_LE(Threads(), before);

  // Without any in the reserve, threads are made.
  std::promise<void> end;
  const std::shared_future<void> ended = end.get_future().share();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([ended] { ended.wait(); });
  EXPECT_EQ(ReservedThreads(), 0);
  end.set_value();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace flashcore::server
