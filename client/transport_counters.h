// The counters behind Transport::Stats, shared by a transport and whatever outlives it.
#pragma once

#include <atomic>
#include <cstdint>

#include "client/transport.h"

namespace kvferry {

// Thread-safe; each counter on its own is exact.
struct TransportCounters {
  std::atomic<uint64_t> blocks_put{0}, bytes_put{0}, blocks_got{0}, bytes_got{0};
  std::atomic<uint64_t> get_misses{0}, puts_failed{0}, reconnects{0}, checksum_errors{0};
  std::atomic<uint64_t> bytes_in_flight{0};

  void CountPut(bool stored, uint64_t bytes) {
    if (stored) {
      ++blocks_put;
      bytes_put += bytes;
    } else {
      ++puts_failed;
    }
  }

  void CountGot(uint64_t bytes) {
    ++blocks_got;
    bytes_got += bytes;
  }

  TransportStats Snapshot() const {
    TransportStats stats;
    stats.blocks_put = blocks_put;
    stats.bytes_put = bytes_put;
    stats.blocks_got = blocks_got;
    stats.bytes_got = bytes_got;
    stats.get_misses = get_misses;
    stats.puts_failed = puts_failed;
    stats.reconnects = reconnects;
    stats.checksum_errors = checksum_errors;
    stats.bytes_in_flight = bytes_in_flight;
    return stats;
  }
};

}  // namespace kvferry
