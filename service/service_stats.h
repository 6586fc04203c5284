// What the service itself counts; the store counts the rest. Names are those of the metrics.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvferry {

using Counter = std::atomic<uint64_t>;

// Thread-safe: each value on its own.
struct ServiceStats {
  // Puts: each payload byte is copied once, from the received slices into the chunk.
  Counter put_blocks{0}, put_bytes{0}, put_bytes_copied{0};
  Counter put_blocks_failed{0}, put_checksum_errors{0};
  Counter get_blocks{0}, get_bytes{0};
  Counter malformed_messages{0};

  Counter sessions_opened{0}, sessions_resumed{0}, sessions_superseded{0}, sessions_silent{0};

  // Gauges.
  Counter session_streams{0}, put_streams{0}, get_streams{0};
  Counter get_bytes_held{0};  // read ahead or being written, by all get streams
};

}  // namespace kvferry
