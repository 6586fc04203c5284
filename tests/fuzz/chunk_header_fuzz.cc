// Any bytes as the header of a chunk image: refused, or a header that is written as the same bytes again.
#include <algorithm>
#include <cstdlib>
#include <vector>

#include "storage/base/chunk_image.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto header = kvferry::DecodeHeader({data, size});
  if (!header.ok()) return 0;
  std::vector<uint8_t> again(kvferry::EncodedHeaderSize(header->checksums.size()));
  if (again.size() > size) std::abort();
  kvferry::EncodeHeader(*header, absl::MakeSpan(again));
  if (!std::equal(again.begin(), again.end(), data)) std::abort();
  return 0;
}
