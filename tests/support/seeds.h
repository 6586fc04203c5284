// Seeds of property tests: random ones, or the one that KVFERRY_TEST_SEED names, to repeat a failure.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

namespace kvferry {

struct Seeds {
  // `runs` seeds from a random one, or the one that is named alone. Prints the first.
  explicit Seeds(uint64_t runs) {
    const char* given = std::getenv("KVFERRY_TEST_SEED");
    first = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    end = first + (given != nullptr ? 1 : runs);
    std::printf("seeds from %llu (KVFERRY_TEST_SEED repeats one)\n", static_cast<unsigned long long>(first));
  }

  uint64_t first = 0;
  uint64_t end = 0;
};

}  // namespace kvferry
