// One memory mapping of the memory tier.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvferry {

// A memfd mapped read-write, unmapped and closed by the destructor. It belongs to one tenant from birth to death: its
// pages come zeroed from the kernel and go back to it, so no tenant ever sees another's bytes. Left out of core dumps,
// and not inherited by a forked child, which could otherwise write into its parent's cache.
// Threads: constant after construction; the bytes are their owners' business.
class Segment {
 public:
  // RESOURCE_EXHAUSTED with the system's error if the memory cannot be had. Touches no page.
  static absl::StatusOr<std::unique_ptr<Segment>> Create(absl::string_view tenant, uint64_t id, uint64_t bytes);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const std::string& tenant() const { return tenant_; }
  uint64_t id() const { return id_; }  // ascending in order of creation
  uint64_t bytes() const { return bytes_; }
  uint8_t* data() const { return data_; }
  int fd() const { return fd_; }

 private:
  Segment(absl::string_view tenant, uint64_t id, uint64_t bytes, int fd, uint8_t* data)
      : tenant_(tenant), id_(id), bytes_(bytes), fd_(fd), data_(data) {}

  const std::string tenant_;
  const uint64_t id_;
  const uint64_t bytes_;
  const int fd_;
  uint8_t* const data_;
};

// A run of bytes of a segment, and the bytes of bookkeeping charged with it.
struct Extent {
  Segment* segment = nullptr;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t overhead = 0;

  uint8_t* data() const { return segment->data() + offset; }
};

}  // namespace kvferry
