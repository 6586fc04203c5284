#include "storage/base/key.h"

#include "absl/strings/str_cat.h"
#include "storage/base/sha256.h"

namespace kvferry {

uint32_t SessionTag(SessionId session) { return static_cast<uint32_t>(Sha256Id(absl::StrCat("session ", session))[0]); }

std::string ToString(const Id128& id) {
  return absl::StrCat(absl::Hex(id[0], absl::kZeroPad16), absl::Hex(id[1], absl::kZeroPad16));
}

std::string ToString(const ChunkKey& key) {
  return absl::StrCat(ToString(key.ns), "/", ToString(key.id), "/", key.group, ".", key.shard);
}

std::string ToString(const BlockKey& key) { return absl::StrCat(ToString(key.chunk), "/layer ", key.layer); }

}  // namespace kvferry
