// How many layers may keep all of their keys and values on the device: plain arithmetic.
#pragma once

#include <cstdint>
#include <vector>

namespace kvferry {

// Columns a growing buffer has room for once it holds `columns`: the growth is amortised and never a whole doubling.
int64_t GrownCapacity(int64_t columns);

// Columns a tail has room for: at most `tail_columns`, less while a row holds few.
int64_t TailCapacity(int64_t tail_columns, int64_t columns);

struct BudgetInput {
  std::vector<uint64_t> column_bytes;  // by layer: K and V of one token of one row
  std::vector<bool> plain;  // by layer: kept whole whatever R is, in tensors just as long as needed; empty: none is
  uint64_t aside = 0;       // taken in any case
  int64_t batch = 0;
  int64_t columns = 0;       // tokens a row will hold
  int64_t tail_columns = 0;  // room of one tail
  int in_flight = 0;         // layers whose blocks may be on their way, in either direction, and take memory here
};

// Bytes on the device with the first `resident` layers kept whole: their buffers, one ring slot, one buffer being
// replaced by a larger one, the tails of the other layers, what is in flight, plain layers (one of which is being
// replaced), and what is set aside.
uint64_t DeviceBytesNeeded(const BudgetInput& input, int resident);

// The most layers, at most `limit`, for which that is within `bytes`; -1 if not even none is.
int LayersWithin(const BudgetInput& input, int limit, uint64_t bytes);

}  // namespace kvferry
