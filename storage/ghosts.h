// Names of what is there no more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

#include "absl/container/flat_hash_map.h"

namespace kvferry {

// The names added last, by fingerprints: one in some four thousand millions is taken for another. Threads: none of its
// own.
class Ghosts {
 public:
  static uint32_t Fingerprint(uint64_t name) { return static_cast<uint32_t>(name ^ name >> 32); }

  // Keeps `most` at most, the youngest.
  void Add(uint32_t fingerprint, size_t most) {
    if (!known_.try_emplace(fingerprint, oldest_ + static_cast<uint32_t>(order_.size())).second) return;
    order_.push_back(fingerprint);
    for (; order_.size() > most; ++oldest_) {
      const auto it = known_.find(order_.front());
      if (it != known_.end() && it->second == oldest_) known_.erase(it);
      order_.pop_front();
    }
  }
  // Forgets it; false if it was not known. Its place in the order stays, and goes with the others of its time.
  bool Take(uint32_t fingerprint) { return known_.erase(fingerprint) != 0; }

 private:
  absl::flat_hash_map<uint32_t, uint32_t> known_;  // to the number of its turn
  std::deque<uint32_t> order_;
  uint32_t oldest_ = 0;  // the turn of the first in order_
};

}  // namespace kvferry
