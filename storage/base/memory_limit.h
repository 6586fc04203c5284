// How much memory this process may use.
#pragma once

#include <cstdint>
#include <string>

namespace kvferry {

struct MemoryLimit {
  uint64_t bytes = 0;
  std::string source;  // the file that says so
};

// The least of the machine's memory and the limits of the control groups (v2 and v1) this process is in. `root` is put
// before every path; tests give another one than "".
MemoryLimit DetectMemoryLimit(const std::string& root = "");

}  // namespace kvferry
