// Files of a folder under a directory of the test's own, driven so that the caller waits.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include "storage/disk/aligned_buffer.h"
#include "storage/disk/file.h"

namespace kvferry {

// A directory that goes with the object.
class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "kvferry-test-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline AlignedBuffer RandomBytes(uint64_t bytes, uint64_t seed) {
  AlignedBuffer buffer(bytes);
  std::mt19937_64 random(seed);
  for (uint64_t at = 0; at < buffer.size(); at += 8) {
    const uint64_t word = random();
    std::memcpy(buffer.view().data() + at, &word, 8);
  }
  return buffer;
}
inline bool operator==(const AlignedBuffer& a, const AlignedBuffer& b) { return a.view() == b.view(); }

// Starts an operation by `start(IoDone)` and waits for its status.
template <typename Start>
absl::Status Await(Start start) {
  std::promise<absl::Status> result;
  start([&result](absl::Status status) { result.set_value(std::move(status)); });
  return result.get_future().get();
}

inline absl::Status Write(File& file, uint64_t offset, ByteView bytes) {
  return Await([&](IoDone done) { file.Write(offset, {bytes}, std::move(done)); });
}
inline absl::Status Read(File& file, uint64_t offset, MutableByteView bytes) {
  return Await([&](IoDone done) { file.Read(offset, bytes, std::move(done)); });
}
inline absl::Status Sync(File& file) {
  return Await([&](IoDone done) { file.Sync(std::move(done)); });
}

}  // namespace kvferry
