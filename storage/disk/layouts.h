// The layouts of the namespaces that a manifest knows.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "storage/base/chunk_image.h"
#include "storage/disk/manifest.h"

namespace kvferry {

// Each is made when it is first asked for. Not thread-safe.
class Layouts {
 public:
  explicit Layouts(const Manifest* manifest) : manifest_(manifest) {}
  // nullptr: nothing is known of the namespace, or it has no such group or shard.
  const ChunkLayout* Of(const ChunkKey& key);

 private:
  struct Known {
    std::vector<ChunkLayout> layouts;
    uint32_t shards = 0;
  };
  void Make(const NamespaceId& ns, Known* known) const;

  const Manifest* const manifest_;
  absl::flat_hash_map<NamespaceId, Known> known_;
};

}  // namespace kvferry
