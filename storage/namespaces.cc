#include "storage/namespaces.h"

#include <utility>

namespace kvferry {
namespace {

std::vector<ChunkLayout> Layouts(const NamespaceSpec& spec) {
  std::vector<ChunkLayout> layouts;
  for (size_t group = 0; group < spec.groups.size(); ++group) {
    layouts.push_back(ChunkLayout::For(spec, static_cast<int>(group)));
  }
  return layouts;
}

uint64_t BookkeepingBytes(const NamespaceSpec& spec) {
  uint64_t bytes = sizeof(Namespace) + 128;  // map slot, counts
  bytes += spec.model.size() + spec.dtype.size() + spec.codec.size() + spec.rope.size();
  for (const GroupSpec& group : spec.groups) {
    bytes += sizeof(GroupSpec) + sizeof(ChunkLayout);
    for (const LayerSpec& layer : group.layers) {
      bytes += sizeof(LayerSpec) + sizeof(ChunkLayout::Slot) + layer.parts.size() * sizeof(PartSpec);
    }
  }
  return bytes;
}

}  // namespace

Namespace::Namespace(std::string owner, NamespaceSpec s)
    : tenant(std::move(owner)),
      spec(std::move(s)),
      id(HashNamespace(tenant, spec)),
      layouts(Layouts(spec)),
      bytes(BookkeepingBytes(spec)) {}

std::shared_ptr<const Namespace> NamespaceTable::Find(absl::string_view tenant, const NamespaceId& id) const {
  std::shared_ptr<const Namespace> ns = Find(id);
  return ns == nullptr || ns->tenant != tenant ? nullptr : ns;
}

std::shared_ptr<const Namespace> NamespaceTable::Find(const NamespaceId& id) const {
  const auto it = table_.find(id);
  return it == table_.end() ? nullptr : it->second.ns;
}

void NamespaceTable::Use(std::shared_ptr<const Namespace> ns) {
  Entry& entry = table_[ns->id];
  ++entry.uses;
  if (entry.ns == nullptr) entry.ns = std::move(ns);
}

uint64_t NamespaceTable::Unuse(const NamespaceId& id) {
  const auto it = table_.find(id);
  if (--it->second.uses != 0) return 0;
  const uint64_t bytes = it->second.ns->bytes;
  table_.erase(it);
  return bytes;
}

}  // namespace kvferry
