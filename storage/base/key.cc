#include "storage/base/key.h"

#include "absl/strings/str_cat.h"

namespace kvferry {

std::string ToString(const Id128& id) {
  return absl::StrCat(absl::Hex(id[0], absl::kZeroPad16), absl::Hex(id[1], absl::kZeroPad16));
}

std::string ToString(const ChunkKey& key) {
  return absl::StrCat(ToString(key.ns), "/", ToString(key.id), "/", key.group, ".", key.shard);
}

std::string ToString(const BlockKey& key) { return absl::StrCat(ToString(key.chunk), "/layer ", key.layer); }

}  // namespace kvferry
