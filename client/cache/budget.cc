#include "client/cache/budget.h"

#include <algorithm>

namespace kvferry {

int64_t GrownCapacity(int64_t columns) { return columns + std::max<int64_t>(256, columns / 8); }

int64_t TailCapacity(int64_t tail_columns, int64_t columns) { return std::min(tail_columns, GrownCapacity(columns)); }

uint64_t DeviceBytesNeeded(const BudgetInput& input, int resident) {
  const auto layers = static_cast<int>(input.column_bytes.size());
  const auto rows = static_cast<uint64_t>(input.batch);
  const auto capacity = static_cast<uint64_t>(GrownCapacity(input.columns)) * rows;
  const auto tail = static_cast<uint64_t>(TailCapacity(input.tail_columns, input.columns)) * rows;
  const auto exact = static_cast<uint64_t>(input.columns) * rows;
  uint64_t widest = 0, widest_plain = 0, bytes = input.aside;
  bool some_stay = false, some_leave = false;
  for (int l = 0; l < layers; ++l) {
    const uint64_t column = input.column_bytes[static_cast<size_t>(l)];
    if (!input.plain.empty() && input.plain[static_cast<size_t>(l)]) {
      widest_plain = std::max(widest_plain, column);
      bytes += column * exact;
      continue;
    }
    widest = std::max(widest, column);
    bytes += column * (l < resident ? capacity : tail);
    (l < resident ? some_stay : some_leave) = true;
  }
  bytes += widest_plain * exact;
  if (some_stay) bytes += widest * capacity;            // a buffer that is replaced
  if (some_leave) bytes += widest * (capacity + tail);  // the ring slot; a tail that is replaced
  return bytes + static_cast<uint64_t>(input.in_flight) * widest * exact;
}

int LayersWithin(const BudgetInput& input, int limit, uint64_t bytes) {
  for (int resident = std::min(limit, static_cast<int>(input.column_bytes.size())); resident >= 0; --resident) {
    if (DeviceBytesNeeded(input, resident) <= bytes) return resident;
  }
  return -1;
}

}  // namespace kvferry
