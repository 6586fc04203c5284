// The namespaces that a transport has opened, to be opened again at a store that has restarted.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "storage/base/chunk_image.h"
#include "storage/base/mutex.h"
#include "storage/base/namespace_spec.h"

namespace kvferry {

struct KnownNamespace {
  NamespaceSpec spec;
  std::vector<ChunkLayout> layouts;  // by group
};

// Thread-safe.
class NamespaceBook {
 public:
  // REQUIRES: Validate(spec) is OK.
  void Add(const NamespaceId& id, const NamespaceSpec& spec) {
    auto known = std::make_shared<KnownNamespace>();
    known->spec = spec;
    for (size_t group = 0; group < spec.groups.size(); ++group) {
      known->layouts.push_back(ChunkLayout::For(spec, static_cast<int>(group)));
    }
    MutexLock lock(&mu_);
    by_id_[id] = std::move(known);
  }

  std::shared_ptr<const KnownNamespace> Find(const NamespaceId& id) const {
    MutexLock lock(&mu_);
    const auto it = by_id_.find(id);
    return it == by_id_.end() ? nullptr : it->second;
  }

  std::vector<std::pair<NamespaceId, std::shared_ptr<const KnownNamespace>>> All() const {
    MutexLock lock(&mu_);
    return {by_id_.begin(), by_id_.end()};
  }

 private:
  mutable Mutex mu_;
  absl::flat_hash_map<NamespaceId, std::shared_ptr<const KnownNamespace>> by_id_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvferry
