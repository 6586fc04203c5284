#include "service/session_chunks.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace kvferry {

absl::Status SessionChunks::AddNamespace(const NamespaceId& ns, const NamespaceSpec& spec) {
  std::vector<std::shared_ptr<const ChunkLayout>> layouts;
  layouts.reserve(spec.groups.size());
  for (size_t group = 0; group < spec.groups.size(); ++group) {
    layouts.push_back(std::make_shared<const ChunkLayout>(ChunkLayout::For(spec, static_cast<int>(group))));
  }
  MutexLock lock(&mu_);
  if (layouts_.contains(ns)) return absl::OkStatus();
  if (layouts_.size() >= kMaxNamespaces) {
    return absl::ResourceExhaustedError(
        absl::StrCat("this session has opened ", layouts_.size(), " namespaces, expected at most ", kMaxNamespaces));
  }
  layouts_.emplace(ns, std::move(layouts));
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const ChunkLayout>> SessionChunks::Layout(const NamespaceId& ns, int group) const {
  MutexLock lock(&mu_);
  const auto it = layouts_.find(ns);
  if (it == layouts_.end()) {
    return absl::NotFoundError(absl::StrCat("namespace ", ToString(ns), " has not been opened by this session"));
  }
  if (group < 0 || static_cast<size_t>(group) >= it->second.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("group is ", group, ", expected 0 to ", it->second.size() - 1, " in namespace ", ToString(ns)));
  }
  return it->second[group];
}

bool SessionChunks::empty() const {
  MutexLock lock(&mu_);
  return layouts_.empty();
}

bool SessionChunks::Add(std::vector<std::unique_ptr<ChunkWriter>> writers, std::shared_ptr<const ChunkLayout> layout) {
  std::vector<std::shared_ptr<ReservedChunk>> chunks;
  chunks.reserve(writers.size());
  for (auto& writer : writers) chunks.push_back(std::make_shared<ReservedChunk>(std::move(writer), layout));
  MutexLock lock(&mu_);
  if (closed_) return false;
  for (auto& chunk : chunks) chunks_.emplace(chunk->key(), chunk);
  return true;
}

std::shared_ptr<ReservedChunk> SessionChunks::Find(const ChunkKey& key) const {
  MutexLock lock(&mu_);
  const auto it = chunks_.find(key);
  return it == chunks_.end() ? nullptr : it->second;
}

void SessionChunks::Drop(absl::Span<const ChunkKey> keys) {
  std::vector<std::shared_ptr<ReservedChunk>> dropped;  // destroyed after the lock is released
  MutexLock lock(&mu_);
  for (const ChunkKey& key : keys) {
    if (auto node = chunks_.extract(key); !node.empty()) dropped.push_back(std::move(node.mapped()));
  }
}

void SessionChunks::DropUntouched(absl::Span<const ChunkKey> keys) {
  std::vector<ChunkKey> untouched;
  for (const ChunkKey& key : keys) {
    const auto chunk = Find(key);
    if (chunk != nullptr && chunk->untouched()) untouched.push_back(key);
  }
  Drop(untouched);
}

void SessionChunks::DropAll() {
  ChunkMap dropped;
  MutexLock lock(&mu_);
  dropped.swap(chunks_);
}

void SessionChunks::Close() {
  {
    MutexLock lock(&mu_);
    closed_ = true;
  }
  DropAll();
}

}  // namespace kvferry
