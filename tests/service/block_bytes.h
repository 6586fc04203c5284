// What test blocks hold.
#pragma once

#include <cstdint>
#include <vector>

namespace kvferry {

// Bytes that tell block and position: wrong ones never pass for right ones. As float32 all are finite.
inline std::vector<uint8_t> BlockBytes(uint64_t size, uint64_t salt) {
  std::vector<uint8_t> bytes(size);
  uint64_t x = salt * 0x9E3779B97F4A7C15u + 1;
  for (uint64_t i = 0; i < size; ++i) {
    x = x * 6364136223846793005u + 1442695040888963407u;
    bytes[i] = static_cast<uint8_t>(x >> 56) & (i % 4 == 3 ? 0xbf : 0xff);
  }
  return bytes;
}

}  // namespace kvferry
