// The namespaces that somebody uses.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "storage/base/chunk_image.h"
#include "storage/base/key.h"
#include "storage/base/namespace_spec.h"

namespace kvferry {

// A tenant's spec and the layouts that follow from it. Constant but for its epoch; shared by its chunks.
struct Namespace {
  Namespace(std::string owner, NamespaceSpec s);

  const std::string tenant;
  const NamespaceSpec spec;
  const NamespaceId id;
  const std::vector<ChunkLayout> layouts;  // by group
  const uint64_t bytes;                    // of bookkeeping, for the budget
  mutable uint32_t epoch = 0;              // names given before it are dropped; the store's mutex guards it
};

// A namespace lives while sessions have it open or there are chunks of it. Threads: none of its own; the store's
// mutex guards it.
class NamespaceTable {
 public:
  // nullptr if there is none, or (the first) it is another tenant's.
  std::shared_ptr<const Namespace> Find(absl::string_view tenant, const NamespaceId& id) const;
  std::shared_ptr<const Namespace> Find(const NamespaceId& id) const;

  // Adds one use; `ns` becomes the one of its id if there is none yet.
  void Use(std::shared_ptr<const Namespace> ns);
  // Returns one use. If that was the last the namespace is gone, and its bookkeeping bytes are returned; else 0.
  uint64_t Unuse(const NamespaceId& id);

  size_t size() const { return table_.size(); }

 private:
  struct Entry {
    std::shared_ptr<const Namespace> ns;
    uint64_t uses = 0;
  };
  absl::flat_hash_map<NamespaceId, Entry> table_;
};

}  // namespace kvferry
