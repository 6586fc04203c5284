#include "storage/disk/layouts.h"

#include <memory>

#include "absl/strings/str_cat.h"
#include "storage/base/log.h"
#include "storage/base/namespace_spec.h"

namespace kvferry {

const ChunkLayout* Layouts::Of(const ChunkKey& key) {
  const auto [it, is_new] = known_.try_emplace(key.ns);
  if (is_new) Make(key.ns, &it->second);
  const Known& known = it->second;
  return key.group < known.layouts.size() && key.shard < known.shards ? &known.layouts[key.group] : nullptr;
}

void Layouts::Make(const NamespaceId& ns, Known* known) const {
  const std::shared_ptr<const NamespaceEntry> entry = manifest_->Find(ns);
  if (entry == nullptr) return;
  const absl::StatusOr<NamespaceSpec> spec = ParseCanonical(entry->spec);
  if (!spec.ok() || HashNamespace(entry->tenant, *spec) != ns) {
    KVFERRY_LOG(kError,
                absl::StrCat("disk: namespace ", ToString(ns), " is not what its id says: ", spec.status().message()));
    return;
  }
  known->shards = spec->shards;
  for (int group = 0; group < static_cast<int>(spec->groups.size()); ++group) {
    known->layouts.push_back(ChunkLayout::For(*spec, group));
  }
}

}  // namespace kvferry
