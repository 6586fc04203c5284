// The namespaces that a transport has opened.
#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "storage/base/chunk_image.h"
#include "storage/base/key.h"
#include "storage/base/mutex.h"
#include "storage/base/namespace_spec.h"

namespace kvferry {

struct KnownNamespace {
  NamespaceSpec spec;
  std::vector<ChunkLayout> layouts;  // by group
  // The session that it was last opened in: a later one has to open it again before it reserves or looks up.
  std::atomic<SessionId> session{0};
};

// Thread-safe.
class NamespaceBook {
 public:
  // The entry of `id`, new if it was not known. REQUIRES: Validate(spec) is OK.
  std::shared_ptr<KnownNamespace> Add(const NamespaceId& id, const NamespaceSpec& spec) {
    MutexLock lock(&mu_);
    std::shared_ptr<KnownNamespace>& known = by_id_[id];
    if (known != nullptr) return known;
    known = std::make_shared<KnownNamespace>();
    known->spec = spec;
    for (size_t group = 0; group < spec.groups.size(); ++group) {
      known->layouts.push_back(ChunkLayout::For(spec, static_cast<int>(group)));
    }
    return known;
  }

  // nullptr if it was never added.
  std::shared_ptr<KnownNamespace> Find(const NamespaceId& id) const {
    MutexLock lock(&mu_);
    const auto it = by_id_.find(id);
    return it == by_id_.end() ? nullptr : it->second;
  }

 private:
  mutable Mutex mu_;
  absl::flat_hash_map<NamespaceId, std::shared_ptr<KnownNamespace>> by_id_ ABSL_GUARDED_BY(mu_);
};

}  // namespace kvferry
