// An executor of which a seed decides which of the tasks that are due runs next.
#pragma once

#include <iterator>
#include <map>
#include <random>
#include <utility>

#include "storage/executor.h"

namespace kvferry {

// Of one thread. Tasks run inside RunOne alone.
class SimExecutor : public Executor {
 public:
  explicit SimExecutor(std::mt19937_64* random) : random_(*random) {}

  absl::Time Now() const override { return now_; }
  void Schedule(absl::Time when, Task task) override { tasks_.emplace(when, std::move(task)); }

  // False if nothing is due.
  bool RunOne() {
    const auto end = tasks_.upper_bound(now_);
    const auto due = std::distance(tasks_.begin(), end);
    if (due == 0) return false;
    const auto it = std::next(tasks_.begin(), static_cast<int64_t>(random_() % static_cast<uint64_t>(due)));
    Task task = std::move(it->second);
    tasks_.erase(it);
    std::move(task)();
    return true;
  }
  void Advance(absl::Duration by) { now_ += by; }

 private:
  std::mt19937_64& random_;
  absl::Time now_ = absl::UnixEpoch() + absl::Hours(24 * 365 * 50);
  std::multimap<absl::Time, Task> tasks_;
};

}  // namespace kvferry
