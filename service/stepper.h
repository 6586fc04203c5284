// Serialises the events of one stream without a lock.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvferry {

// Events come from several threads at once. Each is noted in an atomic flag, then Kick(step) runs `step` on this
// thread, or makes the thread that is in it now run it once more. So what `step` touches needs no lock, and `step` may
// start calls that come back at once. Thread-safe.
class Stepper {
 public:
  template <typename Step>
  void Kick(Step&& step) {
    if (kicks_.fetch_add(1, std::memory_order_acq_rel) != 0) return;
    uint64_t seen = 1;
    do {
      step();
    } while (!kicks_.compare_exchange_strong(seen, 0, std::memory_order_acq_rel));
  }

 private:
  std::atomic<uint64_t> kicks_{0};
};

}  // namespace kvferry
