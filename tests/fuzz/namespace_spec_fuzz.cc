// Any bytes as a namespace spec of the wire: translated, judged, and where it is found valid, its sizes and layouts are
// computed without overflow and it survives the way back.
#include <cstdlib>
#include <string>

#include "proto/codec.h"
#include "storage/base/chunk_image.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // As they lie in a manifest.
  const auto parsed = kvferry::ParseCanonical({reinterpret_cast<const char*>(data), size});
  if (parsed.ok() && kvferry::Canonical(*parsed).size() != size) std::abort();

  kvferry::v1::NamespaceSpec message;
  if (!message.ParseFromArray(data, static_cast<int>(size))) return 0;
  const auto spec = kvferry::FromProto(message);
  if (!spec.ok() || !kvferry::Validate(*spec).ok()) return 0;

  for (int group = 0; group < static_cast<int>(spec->groups.size()); ++group) {
    const auto layout = kvferry::ChunkLayout::For(*spec, group);
    uint64_t end = layout.header_bytes;
    for (const auto& slot : layout.slots) {
      if (slot.offset < end) std::abort();
      end = slot.offset + slot.size;
    }
    if (end > layout.image_bytes) std::abort();
  }
  kvferry::v1::NamespaceSpec again;
  kvferry::ToProto(*spec, &again);
  const auto back = kvferry::FromProto(again);
  const std::string canonical = kvferry::Canonical(*spec);
  if (!back.ok() || kvferry::Canonical(*back) != canonical) std::abort();
  if (!kvferry::ParseCanonical(canonical).ok()) std::abort();
  return 0;
}
