// Frames of a manifest: from any entries an error, or a frame that is written as it was read.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "storage/base/checksum.h"
#include "storage/disk/manifest_format.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvferry;
  (void)DecodeFrame({data, size});
  if (size < 40) return 0;
  // The same with the header and the checksum that go with the bytes, which chance would not find.
  std::vector<uint8_t> bytes(data, data + size);
  const uint32_t magic = 0x4d46564b, payload = static_cast<uint32_t>(size - 40);
  const uint16_t version = kManifestVersion, zero = 0;
  std::memcpy(bytes.data(), &magic, 4);
  std::memcpy(bytes.data() + 4, &version, 2);
  std::memcpy(bytes.data() + 6, &zero, 2);
  std::memcpy(bytes.data() + 36, &payload, 4);
  const uint64_t checksum = HeaderChecksum(bytes);
  bytes.insert(bytes.end(), reinterpret_cast<const uint8_t*>(&checksum),
               reinterpret_cast<const uint8_t*>(&checksum + 1));
  const auto frame = DecodeFrame(bytes);
  if (!frame.ok()) return 0;
  const AlignedBuffer again = EncodeFrame(frame->frame);
  if (again.size() != frame->bytes) std::abort();
  const auto twice = DecodeFrame(again.view());
  if (!twice.ok() || twice->frame.entries.size() != frame->frame.entries.size()) std::abort();
  return 0;
}
