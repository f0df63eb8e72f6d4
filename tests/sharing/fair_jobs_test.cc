#include "server/sharing/fair_jobs.h"

#include <future>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/sharing/turns.h"

namespace flashcore::server {
namespace {

TEST(TurnsTest, ClientsAlternate) {
  Turns<int> turns;
  for (const int item : {1, 2, 3}) turns.Add("a", item);
  turns.Add("b", 10);
  EXPECT_EQ(turns.clients(), 2u);
  EXPECT_EQ(turns.Take(), 1);
  turns.Add("c", 20);
  turns.Add("c", 21);
  std::vector<int> rest;
  while (!turns.empty()) rest.push_back(turns.Take());
  EXPECT_EQ(rest, (std::vector<int>{10, 2, 20, 3, 21}));
  turns.Add("a", 4);
  EXPECT_EQ(turns.clients(), 1u);
  EXPECT_EQ(turns.Take(), 4);
}

TEST(TurnsTest, WhatIsRemovedHasNoTurn) {
  Turns<int> turns;
  const auto first = turns.Add("a", 1);
  turns.Add("a", 2);
  const auto only = turns.Add("b", 10);
  const auto last = turns.Add("a", 3);
  turns.Add("c", 20);
  turns.Remove(first);
  turns.Remove(last);
  turns.Remove(only);
  EXPECT_EQ(turns.clients(), 2u);
  EXPECT_EQ(turns.Take(), 2);
  EXPECT_EQ(turns.Take(), 20);
  EXPECT_TRUE(turns.empty());
}

class FairJobsTest : public ::testing::Test {
 protected:
  // Runs until Release.
  void AddBlocker(FairJobs* jobs, const char* client) {
    jobs->Add(client, [this] {
      began_.set_value();
      released_.get_future().wait();
    });
    began_.get_future().wait();
  }
  void Release() { released_.set_value(); }
  FairJobs::Job Noting(const char* name) {
    return [this, name] { ran_.push_back(name); };
  }

  std::promise<void> began_, released_;
  std::vector<std::string> ran_;  // of the jobs' thread
};

TEST_F(FairJobsTest, ClientsTakeTurnsAndKeepTheirOrder) {
  {
    FairJobs jobs;
    AddBlocker(&jobs, "a");
    for (const char* name : {"a1", "a2", "a3", "a4"}) jobs.Add("a", Noting(name));
    for (const char* name : {"b1", "b2"}) jobs.Add("b", Noting(name));
    jobs.Add("c", Noting("c1"));
    Release();
  }  // runs what it has
  EXPECT_EQ(ran_, (std::vector<std::string>{"a1", "b1", "c1", "a2", "b2", "a3", "a4"}));
}

}  // namespace
}  // namespace flashcore::server
