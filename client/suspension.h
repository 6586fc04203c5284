// Tells time in which this process was stopped (SIGSTOP, a frozen container, a sleeping laptop) from time that a store
// took: only the latter counts against a deadline.
#pragma once

#include <algorithm>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "storage/base/mutex.h"

namespace kvferry {

// One thread ticks at least once each `interval`; a gap of more than three is a suspension. Thread-safe.
class SuspensionMeter {
 public:
  SuspensionMeter(absl::Duration interval, absl::Time now) : interval_(interval), last_(now) {}

  void Tick(absl::Time now) {
    MutexLock lock(&mu_);
    total_ += Gap(now);
    last_ = std::max(last_, now);
  }

  // Time suspended so far, up to and including a gap that has not been ticked yet.
  absl::Duration Total(absl::Time now) const {
    MutexLock lock(&mu_);
    return total_ + Gap(now);
  }

 private:
  absl::Duration Gap(absl::Time now) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const absl::Duration gap = now - last_;
    return gap > 3 * interval_ ? gap - interval_ : absl::ZeroDuration();
  }

  const absl::Duration interval_;
  mutable Mutex mu_;
  absl::Time last_ ABSL_GUARDED_BY(mu_);
  absl::Duration total_ ABSL_GUARDED_BY(mu_) = absl::ZeroDuration();
};

}  // namespace kvferry
