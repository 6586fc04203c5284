#include "storage/executor.h"

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "storage/base/mutex.h"

namespace kvferry {
namespace {

// Keeps waiting tasks in a heap by time; one thread sleeps until the earliest is due and runs it unlocked.
// Threads: any may schedule; the one owned thread runs.
class ThreadExecutor : public Executor {
 public:
  ThreadExecutor() : thread_([this] { Run(); }) {}

  ~ThreadExecutor() override {
    {
      MutexLock lock(&mu_);
      stopping_ = true;
    }
    wake_.NotifyOne();
    thread_.join();
  }

  absl::Time Now() const override { return absl::Now(); }

  void Schedule(absl::Time when, Task task) override {
    {
      MutexLock lock(&mu_);
      heap_.push_back(Timer{when, next_++, std::move(task)});
      std::push_heap(heap_.begin(), heap_.end(), &Timer::Later);
    }
    wake_.NotifyOne();
  }

 private:
  struct Timer {
    absl::Time when;
    uint64_t order;  // of equal times the first scheduled runs first
    Task task;
    static bool Later(const Timer& a, const Timer& b) { return a.when != b.when ? a.when > b.when : a.order > b.order; }
  };

  void Run() ABSL_LOCKS_EXCLUDED(mu_) {
    while (Task task = Next()) std::move(task)();
  }

  // Waits for the next due task; an empty one means stop.
  Task Next() ABSL_LOCKS_EXCLUDED(mu_) {
    MutexLock lock(&mu_);
    while (!stopping_) {
      const absl::Time when = heap_.empty() ? absl::InfiniteFuture() : heap_.front().when;
      if (!heap_.empty() && when <= absl::Now()) {
        std::pop_heap(heap_.begin(), heap_.end(), &Timer::Later);
        Task task = std::move(heap_.back().task);
        heap_.pop_back();
        return task;
      }
      wake_.WaitUntil(&mu_, when);
    }
    return Task();
  }

  Mutex mu_;
  CondVar wake_;
  std::vector<Timer> heap_ ABSL_GUARDED_BY(mu_);
  uint64_t next_ ABSL_GUARDED_BY(mu_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;  // last: it uses what is above
};

}  // namespace

std::unique_ptr<Executor> NewThreadExecutor() { return std::make_unique<ThreadExecutor>(); }

}  // namespace kvferry
