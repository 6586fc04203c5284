// How long to wait before trying again.
#pragma once

#include <cstdint>
#include <random>

#include "absl/time/time.h"

namespace kvferry {

// Exponential back-off with full jitter above half: the n-th delay is random in [d/2, d], d = min(first * 2^n,
// longest), so that clients of a store that restarts do not come back all at once. Not thread-safe.
class Backoff {
 public:
  struct Options {
    absl::Duration first = absl::Milliseconds(50);
    absl::Duration longest = absl::Seconds(5);
  };

  Backoff(const Options& options, uint64_t seed) : options_(options), random_(seed) {}

  absl::Duration Next();
  void Reset() { step_ = 0; }

 private:
  const Options options_;
  std::mt19937_64 random_;
  int step_ = 0;
};

}  // namespace kvferry
