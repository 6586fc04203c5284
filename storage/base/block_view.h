// The bytes of one committed block, pinned while the view lives.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "storage/base/bytes.h"

namespace kvferry {

// A read-only block as consecutive pieces: one piece where it lies in this process's or a shared segment (nothing was
// copied), received slices where it came over a socket. Copies share the pin. Threads: a view may be read by several
// threads at once.
class BlockView {
 public:
  using Pieces = absl::InlinedVector<ByteView, 1>;

  BlockView() = default;
  // `pin` keeps the bytes of `pieces` in place; `checksum` is the writer's (see checksum.h).
  BlockView(Pieces pieces, uint64_t checksum, std::shared_ptr<const void> pin);

  const Pieces& pieces() const { return pieces_; }
  uint64_t size() const { return size_; }
  uint64_t checksum() const { return checksum_; }
  const std::shared_ptr<const void>& pin() const { return pin_; }

  // Copies bytes [offset, offset + n) to `to`. REQUIRES: offset + n <= size().
  void CopyTo(uint64_t offset, uint64_t n, uint8_t* to) const;

  // DATA_LOSS if the bytes do not have the writer's checksum.
  absl::Status Verify() const;

 private:
  Pieces pieces_;
  uint64_t size_ = 0;
  uint64_t checksum_ = 0;
  std::shared_ptr<const void> pin_;
};

}  // namespace kvferry
