#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "client/cache/cache_impl.h"
#include "client/interrupt.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

constexpr int kSocketDepth = 2;  // layers asked for ahead where they come over a socket

}  // namespace

int CacheImpl::Depth() const {
  if (transport_ == nullptr || !transport_->fetch_copies()) return options_.prefetch_depth.value_or(0);
  return options_.prefetch_depth.value_or(kSocketDepth);
}

// The distinct chunks that this layer reads and the store holds, oldest first.
std::vector<std::shared_ptr<CachedChunk>> CacheImpl::StoredChunks(int layer) const {
  const CacheLayerState& state = layers_[static_cast<size_t>(layer)];
  std::vector<std::shared_ptr<CachedChunk>> chunks;
  absl::flat_hash_set<const CachedChunk*> seen;
  const auto add = [&](const std::shared_ptr<CachedChunk>& chunk) {
    if (chunk->Stored(layer) && seen.insert(chunk.get()).second) chunks.push_back(chunk);
  };
  for (size_t r = 0; r < rows_.size(); ++r) {
    for (int64_t i = 0; i < state.cut[r]; ++i) add(rows_[r].chunks[static_cast<size_t>(i)]);
    if (state.refill[r] != nullptr) add(state.refill[r]);
  }
  return chunks;
}

CacheImpl::Ahead CacheImpl::StartFetch(int layer, std::vector<std::shared_ptr<CachedChunk>> chunks,
                                       absl::Time deadline) {
  std::vector<BlockKey> keys;
  keys.reserve(chunks.size());
  for (const auto& chunk : chunks) keys.push_back(chunk->Key(layer));
  uint64_t bytes = 0;
  if (transport_->fetch_copies()) {
    for (const auto& chunk : chunks) bytes += chunk->Bytes(layer);
  }
  return {layer, version_, std::move(chunks), transport_->Fetch(keys, deadline), HeldBytes(&ledger_, bytes)};
}

// Moves the blocks, and the memory counted for them, into `views`.
absl::Status CacheImpl::Receive(Ahead& ahead, Views& views) {
  views.bytes.push_back(std::move(ahead.bytes));
  for (const auto& chunk : ahead.chunks) {
    if (ScopedInterrupt::Ask()) return Lost(absl::DeadlineExceededError("the wait was interrupted"));
    absl::StatusOr<BlockView> view = [&] {
      const ScopedTimer timer(&waited_);
      return ahead.stream->Next();
    }();
    if (!view.ok()) return Lost(view.status());
    if (view->size() != chunk->Bytes(ahead.layer)) {
      return Lost(absl::DataLossError(absl::StrCat("block ", ToString(chunk->Key(ahead.layer)), " has ", view->size(),
                                                   " bytes, expected ", chunk->Bytes(ahead.layer))));
    }
    ++blocks_got_;
    bytes_got_ += view->size();
    views.by_chunk[chunk.get()] = *std::move(view);
  }
  return absl::OkStatus();
}

absl::Status CacheImpl::FetchViews(int layer, Views& views) {
  const absl::Time deadline = absl::Now() + options_.fetch_timeout;
  const auto same = [layer](const Ahead& ahead) { return ahead.layer == layer; };
  if (const auto it = std::find_if(ahead_.begin(), ahead_.end(), same); it != ahead_.end()) {
    Ahead ahead = std::move(*it);
    ahead_.erase(it);
    // What did not come (it was asked for long ago, perhaps) is asked for once more below.
    if (ahead.version == version_) Receive(ahead, views).IgnoreError();
  }
  std::vector<std::shared_ptr<CachedChunk>> missing = StoredChunks(layer);
  std::erase_if(missing, [&](const auto& chunk) { return views.by_chunk.contains(chunk.get()); });
  if (!missing.empty()) {
    Ahead now = StartFetch(layer, std::move(missing), deadline);
    KVFERRY_RETURN_IF_ERROR(Receive(now, views));
  }
  const CacheLayerState& state = layers_[static_cast<size_t>(layer)];
  const auto add_local = [&](CachedChunk& chunk) {
    if (!views.by_chunk.contains(&chunk)) views.by_chunk[&chunk] = chunk.Local(layer);
  };
  for (size_t r = 0; r < rows_.size(); ++r) {
    for (int64_t i = 0; i < state.cut[r]; ++i) add_local(*rows_[r].chunks[static_cast<size_t>(i)]);
    if (state.refill[r] != nullptr) add_local(*state.refill[r]);
  }
  return absl::OkStatus();
}

// Layers are visited in a cycle, so the ones to ask for are the next ones that are not resident.
void CacheImpl::FetchAhead(int layer) {
  if (transport_ == nullptr || !transport_->fetch_copies() || !ferrying_) return;
  const int depth = Depth();
  DiscardAcknowledged();
  int considered = 0;
  for (int step = 1; step < layers() && considered < depth; ++step) {
    const int next = (layer + step) % layers();
    const CacheLayerState& state = layers_[static_cast<size_t>(next)];
    if (state.resident || state.plain) continue;
    ++considered;
    const auto same = [next](const Ahead& ahead) { return ahead.layer == next; };
    if (state.length == 0 || std::any_of(ahead_.begin(), ahead_.end(), same)) continue;
    if (static_cast<int>(ahead_.size()) + tracker_->HeldLayers(layer) >= depth) return;
    std::vector<std::shared_ptr<CachedChunk>> chunks = StoredChunks(next);
    if (chunks.empty()) continue;
    ahead_.push_back(StartFetch(next, std::move(chunks), absl::Now() + options_.fetch_timeout));
  }
}

absl::Status CacheImpl::Lost(const absl::Status& status) const {
  const bool gone = transport_->epoch() != epoch_;
  const std::string what =
      gone ? absl::StrCat("the store ", transport_->url(), " was restarted or has ended our session (",
                          std::string(status.message()), ")")
           : std::string(status.message());
  absl::StatusCode code = status.code();
  if (gone) {
    code = absl::StatusCode::kUnavailable;
  } else if (code == absl::StatusCode::kNotFound) {
    code = absl::StatusCode::kDataLoss;
  }
  return absl::Status(code, absl::StrCat(what, "; store ", transport_->url(), ": the keys and values of ", MaxLength(),
                                         " tokens must be recomputed: call reset() and run the model on them again"));
}

}  // namespace kvferry
