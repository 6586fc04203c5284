// An executor whose clock and tasks a test moves by hand: no threads, no sleeps.
#pragma once

#include <map>
#include <utility>

#include "absl/time/time.h"
#include "storage/base/mutex.h"
#include "storage/executor.h"

namespace kvferry {

// Thread-safe, so that stores under test may schedule from any thread; tasks run only inside Run and Advance.
class ManualExecutor : public Executor {
 public:
  absl::Time Now() const override {
    MutexLock lock(&mu_);
    return now_;
  }

  void Schedule(absl::Time when, Task task) override {
    MutexLock lock(&mu_);
    tasks_.emplace(std::make_pair(when, next_++), std::move(task));
  }

  // Runs what is due now, in order, and what becomes due by that.
  void Run() {
    while (Task task = NextDue()) std::move(task)();
  }

  // Moves the clock to each task's time in turn, as far as `by` from now.
  void Advance(absl::Duration by) {
    const absl::Time end = Now() + by;
    while (true) {
      Run();
      MutexLock lock(&mu_);
      if (tasks_.empty() || tasks_.begin()->first.first > end) {
        now_ = end;
        return;
      }
      now_ = tasks_.begin()->first.first;
    }
  }

  // Moves the clock alone.
  void Set(absl::Time now) {
    MutexLock lock(&mu_);
    now_ = now;
  }

  size_t waiting() const {
    MutexLock lock(&mu_);
    return tasks_.size();
  }

 private:
  Task NextDue() {
    MutexLock lock(&mu_);
    if (tasks_.empty() || tasks_.begin()->first.first > now_) return Task();
    Task task = std::move(tasks_.begin()->second);
    tasks_.erase(tasks_.begin());
    return task;
  }

  mutable Mutex mu_;
  absl::Time now_ ABSL_GUARDED_BY(mu_) = absl::UnixEpoch() + absl::Hours(24 * 365 * 50);
  std::map<std::pair<absl::Time, uint64_t>, Task> tasks_ ABSL_GUARDED_BY(mu_);
  uint64_t next_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace kvferry
