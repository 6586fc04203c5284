// Headers, trailers and footers of segments: from any bytes an error or a footer whose images lie within the file.
#include <cstdlib>

#include "storage/base/checksum.h"
#include "storage/disk/segment_format.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvferry;
  const ByteView bytes(data, size);
  (void)DecodeSegmentHeader(bytes);
  (void)DecodeTrailer(bytes, size);
  // The checksum is not what is to be found: any entries are tried.
  FooterPlace place;
  place.block = 1 << 20;
  place.count = static_cast<uint32_t>(size / 80);
  place.checksum = HeaderChecksum(bytes.subspan(0, size / 80 * 80));
  const auto images = DecodeFooter(place, bytes);
  if (!images.ok()) return 0;
  uint64_t end = 1;
  for (const ImageEntry& image : *images) {
    if (image.block < end || image.blocks == 0 || image.lifetime.priority > 100) std::abort();
    end = uint64_t{image.block} + image.blocks;
  }
  if (end > place.block) std::abort();
  return 0;
}
