#include "tests/simulation/model.h"

#include <algorithm>
#include <cstring>

namespace kvferry::simulation {
namespace {

uint64_t WordAt(uint64_t content, int layer, uint64_t at) {
  if (at == 0) return content;
  return (content * 0x9e3779b97f4a7c15 ^ static_cast<uint64_t>(layer) << 40) + at * 0xd1342543de82ef95;
}

}  // namespace

void Fill(MutableByteView slot, uint64_t content, int layer) {
  for (uint64_t at = 0; at < slot.size() / 8; ++at) {
    const uint64_t word = WordAt(content, layer, at);
    std::memcpy(slot.data() + at * 8, &word, 8);
  }
}

std::optional<uint64_t> ContentOf(const BlockView& view, int layer) {
  if (view.pieces().size() != 1) return std::nullopt;
  const ByteView bytes = view.pieces()[0];
  uint64_t content = 0;
  for (uint64_t at = 0; at < bytes.size() / 8; ++at) {
    uint64_t word;
    std::memcpy(&word, bytes.data() + at * 8, 8);
    if (at == 0) content = word;
    if (word != WordAt(content, layer, at)) return std::nullopt;
  }
  return content;
}

void Names::Unname(Name* name) {
  if (name->current != nullptr) name->current->name.reset();
  name->current = nullptr;
  name->durable = 0;
}

ChunkPtr Names::Find(const ChunkKey& key) const {
  const auto it = names_.find(key);
  return it == names_.end() ? nullptr : it->second.current;
}

void Names::Publish(const ChunkKey& key, const ChunkPtr& chunk, absl::Time expires) {
  Name& name = names_[key];
  Unname(&name);  // what was there has been evicted
  name.current = chunk;
  chunk->name = key;
  chunk->expires = expires;
  chunk->publication = ++publications_;
  name.history.push_back({publications_, chunk->content, expires});
}

uint64_t Names::Erase(const ChunkKey& key) {
  Unname(&names_[key]);
  return publications_;
}

void Names::Forgotten(const ChunkKey& key, uint64_t last) {
  std::erase_if(names_[key].history, [last](const Published& p) { return p.number <= last; });
}

void Names::Expire(absl::Time now) {
  for (auto& [key, name] : names_) {
    if (name.current != nullptr && name.current->expires <= now) Unname(&name);
    std::erase_if(name.history, [now](const Published& p) { return p.expires <= now; });
  }
}

Names::Covered Names::BeginFlush(bool all) const {
  Covered covered;
  for (const auto& [key, name] : names_) {
    const ChunkPtr& chunk = name.current;
    if (chunk != nullptr && chunk->content != 0 && !chunk->lies && !chunk->lost && (all || chunk->holders > 0)) {
      covered.emplace_back(key, chunk->publication);
    }
  }
  return covered;
}

void Names::Flushed(const Covered& covered) {
  for (const auto& [key, publication] : covered) {
    Name& name = names_[key];
    if (name.current != nullptr && name.current->publication == publication) name.durable = publication;
  }
}

void Names::NothingIsDurable() {
  for (auto& [key, name] : names_) name.durable = 0;
}

void Names::Restart(absl::Time now) {
  Expire(now);
  for (auto& [key, name] : names_) {
    if (name.history.empty()) {
      Unname(&name);
      continue;
    }
    auto chunk = std::make_shared<Chunk>();
    chunk->sealed = true;
    chunk->name = key;
    chunk->proven = false;
    chunk->expires = absl::InfinitePast();
    for (const Published& p : name.history) {
      if (name.durable != 0 && p.number != name.durable) continue;
      const bool expires = p.expires != absl::InfiniteFuture();  // on disk it is known to the second
      chunk->candidates.push_back(
          {p.content, expires ? absl::FromUnixSeconds(absl::ToUnixSeconds(p.expires)) : p.expires});
      chunk->expires = std::max(chunk->expires, chunk->candidates.back().expires);
    }
    if (name.durable != 0) {
      chunk->proven = true;
      chunk->content = chunk->candidates.at(0).content;
      chunk->publication = name.durable;
    }
    name.current = chunk;
  }
}

bool Names::MustBeFound(const ChunkKey& key, absl::Time now) const {
  const auto it = names_.find(key);
  return it != names_.end() && it->second.durable != 0 && it->second.current->expires > now;
}

void Session::Hold(int sign) {
  for (auto& [key, entry] : live) entry.chunk->holders += sign;
  for (auto& [key, lease] : leases) lease.chunk->holders += sign * static_cast<int>(lease.count);
}

}  // namespace kvferry::simulation
