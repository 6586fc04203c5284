#include "storage/base/block_view.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "storage/base/checksum.h"

namespace kvferry {

BlockView::BlockView(Pieces pieces, uint64_t checksum, std::shared_ptr<const void> pin)
    : pieces_(std::move(pieces)), checksum_(checksum), pin_(std::move(pin)) {
  for (const ByteView& piece : pieces_) size_ += piece.size();
}

void BlockView::CopyTo(uint64_t offset, uint64_t n, uint8_t* to) const {
  for (const ByteView& piece : pieces_) {
    if (n == 0) return;
    if (offset >= piece.size()) {
      offset -= piece.size();
      continue;
    }
    const uint64_t part = std::min<uint64_t>(n, piece.size() - offset);
    std::memcpy(to, piece.data() + offset, part);
    to += part;
    n -= part;
    offset = 0;
  }
}

absl::Status BlockView::Verify() const {
  const uint64_t found = BlockChecksum(absl::MakeConstSpan(pieces_));
  if (found == checksum_) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("block of ", size_, " bytes has checksum ",
                                          absl::Hex(found, absl::kZeroPad16), ", its writer's is ",
                                          absl::Hex(checksum_, absl::kZeroPad16)));
}

}  // namespace kvferry
