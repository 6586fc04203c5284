#include "service/session_chunks.h"

#include <utility>

namespace kvferry {

void SessionChunks::MarkUsed() {
  MutexLock lock(&mu_);
  used_ = true;
}

bool SessionChunks::TakeRelease(uint64_t seq) {
  MutexLock lock(&mu_);
  if (seq <= released_) return false;
  released_ = seq;
  return true;
}

uint64_t SessionChunks::released() const {
  MutexLock lock(&mu_);
  return released_;
}

bool SessionChunks::used() const {
  MutexLock lock(&mu_);
  return used_;
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
