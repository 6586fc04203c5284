// Waits that whoever waits may break off: Ctrl-C in the thread of a model.
#pragma once

#include <algorithm>
#include <functional>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "storage/base/mutex.h"

namespace kvferry {

// While this lives, waits of its thread (those below) ask `asked` several times a second, whether what they wait for
// comes or not and without any lock of ours but those that the caller holds, whether to go on. Once it has said true
// they are over, and so is every later one: each ends as if its deadline had passed. Of several the innermost counts.
class ScopedInterrupt {
 public:
  // The place that holds the calling thread's innermost.
  using Slot = ScopedInterrupt**();

  explicit ScopedInterrupt(std::function<bool()> asked)
      : asked_(std::move(asked)), outer_(std::exchange(*slot_(), this)) {}
  ~ScopedInterrupt() { *slot_() = outer_; }
  ScopedInterrupt(const ScopedInterrupt&) = delete;
  ScopedInterrupt& operator=(const ScopedInterrupt&) = delete;

  // Whether the calling thread was told to stop.
  static bool Raised() { return Possible() && (*slot_())->raised_; }
  static bool Possible() { return *slot_() != nullptr; }
  // Whether it is time to ask.
  static bool Due(absl::Time now) { return Possible() && now >= (*slot_())->next_; }
  // Asks if it is time, and says whether to stop.
  static bool Ask() {
    if (const absl::Time now = absl::Now(); Due(now) && !Raised()) {
      ScopedInterrupt* const innermost = *slot_();
      innermost->next_ = now + kSlice;
      innermost->raised_ = innermost->asked_();
    }
    return Raised();
  }
  static constexpr absl::Duration kSlice = absl::Milliseconds(100);

  // Shared objects that each have a copy of this class, and wait in each other's code, agree on one place. Before any
  // use.
  static Slot* slot() { return slot_; }
  static void Share(Slot* slot) { slot_ = slot; }

 private:
  static ScopedInterrupt** OwnSlot() {
    static thread_local ScopedInterrupt* current = nullptr;
    return &current;
  }

  static inline Slot* slot_ = &OwnSlot;
  const std::function<bool()> asked_;
  ScopedInterrupt* const outer_;
  absl::Time next_ = absl::Now() + kSlice;  // when to ask
  bool raised_ = false;
};

// As cv.WaitUntil(mu, deadline), and true too if the thread was told to stop. Releases `mu` to ask.
inline bool WaitUntil(CondVar& cv, Mutex* mu, absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
  if (!ScopedInterrupt::Possible()) return cv.WaitUntil(mu, deadline);
  if (ScopedInterrupt::Raised()) return true;
  const bool timed_out = cv.WaitUntil(mu, std::min(absl::Now() + ScopedInterrupt::kSlice, deadline));
  const absl::Time now = absl::Now();
  if (timed_out && now >= deadline) return true;
  if (!ScopedInterrupt::Due(now)) return false;
  mu->Unlock();
  const bool stop = ScopedInterrupt::Ask();
  mu->Lock();
  return stop;
}

// As absl::SleepFor, or less if the thread was told to stop.
inline void Sleep(absl::Duration duration) {
  for (const absl::Time end = absl::Now() + duration; !ScopedInterrupt::Ask();) {
    const absl::Duration left = end - absl::Now();
    if (left <= absl::ZeroDuration()) return;
    absl::SleepFor(std::min(left, ScopedInterrupt::kSlice));
  }
}

}  // namespace kvferry
