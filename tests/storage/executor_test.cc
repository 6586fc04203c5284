#include "storage/executor.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "storage/base/mutex.h"

namespace kvferry {
namespace {

// Waits for a count without a clock.
class Latch {
 public:
  explicit Latch(int count) : count_(count) {}
  void CountDown() {
    MutexLock lock(&mu_);
    if (--count_ == 0) done_.NotifyAll();
  }
  void Wait() {
    MutexLock lock(&mu_);
    while (count_ > 0) done_.Wait(&mu_);
  }

 private:
  Mutex mu_;
  CondVar done_;
  int count_ ABSL_GUARDED_BY(mu_);
};

TEST(ThreadExecutor, RunsInOrderOfTimeThenOfScheduling) {
  std::vector<int> order;
  Latch latch(4);
  const auto executor = NewThreadExecutor();
  const absl::Time soon = executor->Now() + absl::Milliseconds(50);
  const auto task = [&](int n) {
    return [&order, &latch, n] {
      order.push_back(n);  // one at a time: no lock
      latch.CountDown();
    };
  };
  executor->Schedule(soon + absl::Milliseconds(1), task(4));
  executor->Schedule(soon, task(2));
  executor->Schedule(soon, task(3));
  executor->Schedule(absl::InfinitePast(), task(1));
  latch.Wait();
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3, 4}));
  EXPECT_GE(executor->Now(), soon);
}

TEST(ThreadExecutor, ATaskMaySchedule) {
  Latch latch(1);
  const auto executor = NewThreadExecutor();
  executor->Schedule(absl::InfinitePast(), [&] { executor->Schedule(executor->Now(), [&] { latch.CountDown(); }); });
  latch.Wait();
}

TEST(ThreadExecutor, WhatStillWaitsDiesUnrun) {
  auto pin = std::make_shared<int>(0);
  const std::weak_ptr<int> watch = pin;
  auto executor = NewThreadExecutor();
  executor->Schedule(absl::InfiniteFuture(), [pin = std::move(pin)] { ADD_FAILURE() << "ran"; });
  EXPECT_FALSE(watch.expired());
  executor.reset();
  EXPECT_TRUE(watch.expired());
}

}  // namespace
}  // namespace kvferry
