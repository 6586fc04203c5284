#include "client/retry.h"

#include <algorithm>

namespace kvferry {

absl::Duration Backoff::Next() {
  constexpr int kMaxShift = 30;  // beyond it every sensible `first` has reached `longest`
  const absl::Duration full = std::min(options_.first * (int64_t{1} << step_), options_.longest);
  step_ = std::min(step_ + 1, kMaxShift);
  std::uniform_real_distribution<double> jitter(0.5, 1.0);
  return full * jitter(random_);
}

}  // namespace kvferry
