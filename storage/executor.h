// Time and timers: the one seam through which the store waits for anything. Tests drive it by hand.
#pragma once

#include <memory>

#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"

namespace kvferry {

// Thread-safe. Functions run one at a time, on the executor's thread, never inside Schedule.
class Executor {
 public:
  using Task = absl::AnyInvocable<void()>;

  virtual ~Executor() = default;
  virtual absl::Time Now() const = 0;
  // Runs `task` once, not before `when`. Tasks still waiting when the executor is destroyed are destroyed unrun.
  virtual void Schedule(absl::Time when, Task task) = 0;
};

// One thread of its own and the system's clock. The destructor joins the thread.
std::unique_ptr<Executor> NewThreadExecutor();

}  // namespace kvferry
