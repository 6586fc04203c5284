#include "storage/disk/image_check.h"

#include "absl/strings/str_cat.h"
#include "storage/base/checksum.h"
#include "storage/base/status.h"

namespace kvferry {

absl::StatusOr<ChunkHeader> CheckImage(ByteView image, LayoutOf layout_of) {
  KVFERRY_ASSIGN_OR_RETURN(ChunkHeader header, DecodeHeader(image));
  const ChunkLayout* layout = layout_of(header.key);
  if (layout == nullptr) return absl::DataLossError("image: nothing is known of its namespace");
  if (image.size() != layout->image_bytes || header.image_bytes != layout->image_bytes ||
      header.checksums.size() != layout->slots.size()) {
    return absl::DataLossError(absl::StrCat("image: it has ", header.image_bytes, " bytes and ",
                                            header.checksums.size(), " slots, expected ", layout->image_bytes, " and ",
                                            layout->slots.size()));
  }
  for (size_t l = 0; l < layout->slots.size(); ++l) {
    const ChunkLayout::Slot& slot = layout->slots[l];
    if (const uint64_t found = BlockChecksum(image.subspan(slot.offset, slot.size)); found != header.checksums[l]) {
      return absl::DataLossError(
          absl::StrCat("image: slot ", l, " has checksum ", found, ", expected ", header.checksums[l]));
    }
  }
  return header;
}

}  // namespace kvferry
