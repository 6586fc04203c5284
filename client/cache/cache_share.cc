#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cache/cache_impl.h"
#include "storage/base/status.h"

namespace kvferry {

absl::StatusOr<SharedCache> CacheImpl::Share(absl::Duration ttl) {
  KVFERRY_RETURN_IF_ERROR(CheckWhole());
  KVFERRY_RETURN_IF_ERROR(InStep());
  const int64_t length = MaxLength();
  for (int l = 0; l < layers(); ++l) {
    const CacheLayerState& state = layers_[static_cast<size_t>(l)];
    if (!state.plain && state.length == length && length > 0) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "layer ", Number(l), state.plain ? " stays on the device" : " holds nothing", ", so that no chunk is whole"));
  }
  KVFERRY_RETURN_IF_ERROR(Connect(length, /*must=*/true));
  if (absl::StartsWith(transport_->url(), "embedded:")) {
    return absl::FailedPreconditionError("no other process can reach an embedded store");
  }
  KVFERRY_RETURN_IF_ERROR(CheckEpoch());
  KVFERRY_RETURN_IF_ERROR(OpenNamespace());
  learnt_ = ferrying_ = true;
  KVFERRY_RETURN_IF_ERROR(Flush(AnswerBy()));

  SharedCache shared;
  shared.url = transport_->url();
  shared.length = length;
  std::vector<ChunkKey> keys;
  absl::flat_hash_map<const CachedChunk*, int64_t> places;
  int64_t from = length;  // the first column that is not in every row's chunks
  for (const CacheRow& row : rows_) {
    SharedCache::Row& table = shared.rows.emplace_back();
    table.start = row.start;
    for (const std::shared_ptr<CachedChunk>& chunk : row.chunks) {
      if (!chunk->Whole()) return absl::FailedPreconditionError("a chunk is not whole");
      const auto [place, fresh] = places.emplace(chunk.get(), static_cast<int64_t>(keys.size()));
      if (fresh) keys.push_back(chunk->key());
      table.chunks.push_back(place->second);
    }
    from = std::min(from, row.start + static_cast<int64_t>(row.chunks.size()) * options_.block_tokens);
  }
  if (keys.empty()) return absl::FailedPreconditionError("no block is full");
  for (int l = 0; l < layers(); ++l) {
    KVFERRY_ASSIGN_OR_RETURN(KeysValues tail, Tail(l, from));
    shared.tails.emplace_back(std::move(tail.k), std::move(tail.v));
  }
  KVFERRY_ASSIGN_OR_RETURN(shared.ticket, transport_->Share(keys, ttl, AnswerBy()));
  return shared;
}

// Columns from `from` on, in memory of their own.
absl::StatusOr<KeysValues> CacheImpl::Tail(int layer, int64_t from) {
  const CacheLayerState& state = layers_[static_cast<size_t>(layer)];
  const bool here = state.resident || (state.base <= from && state.buffer.View().defined());
  KeysValues held = state.buffer.View();
  int64_t base = state.resident ? 0 : state.base;
  if (!here) {
    KVFERRY_ASSIGN_OR_RETURN(held, Assemble(layer, 0, nullptr));
    base = 0;
  }
  const int64_t n = state.length - from;
  KeysValues tail{EmptyLike(held.k, {held.k.size(0), held.k.size(1), n, held.k.size(3)}),
                  EmptyLike(held.v, {held.v.size(0), held.v.size(1), n, held.v.size(3)})};
  CopyColumns(held.k, from - base, tail.k, 0, n);
  CopyColumns(held.v, from - base, tail.v, 0, n);
  return tail;
}

absl::Status CacheImpl::Adopt(const SharedCache& shared) {
  if (MaxLength() > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("the cache holds ", MaxLength(), " tokens, expected none when it is to adopt others"));
  }
  if (options_.layers && *options_.layers != static_cast<int>(shared.tails.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("the shared cache has ", shared.tails.size(), " layers, expected ", *options_.layers));
  }
  const auto held = static_cast<int64_t>(shared.rows.size());
  for (const auto& [k, v] : shared.tails) {
    if (k.dim() == 4 && v.dim() == 4 && k.size(0) == held && v.size(0) == held && k.size(2) == v.size(2)) continue;
    return absl::InvalidArgumentError(absl::StrCat("a tail of the shared cache does not have its ", held, " rows"));
  }
  Reset();
  AddLayers(static_cast<int>(shared.tails.size()) - 1);
  std::vector<uint64_t> bytes;
  for (size_t l = 0; l < shared.tails.size(); ++l) {
    const KeysValues tail{shared.tails[l].first, shared.tails[l].second};
    const auto empty = [](const at::Tensor& t) { return EmptyLike(t, {t.size(0), t.size(1), 0, t.size(3)}); };
    layers_[l].shape = {empty(tail.k), empty(tail.v)};
    const auto column = [](const at::Tensor& t) {
      return static_cast<uint64_t>(t.size(1) * t.size(3) * t.element_size());
    };
    bytes.push_back((column(tail.k) + column(tail.v)) * static_cast<uint64_t>(options_.block_tokens));
  }
  learnt_ = true;
  const absl::Status adopted = Guarded(0, [&]() -> absl::Status {
    KVFERRY_RETURN_IF_ERROR(Connect(shared.length, /*must=*/true));
    KVFERRY_RETURN_IF_ERROR(OpenNamespace());
    KVFERRY_ASSIGN_OR_RETURN(const RedeemResult redeemed, transport_->Redeem(shared.ticket, AnswerBy()));
    std::vector<std::shared_ptr<CachedChunk>> chunks;
    for (const ChunkKey& key : redeemed.keys) {
      chunks.push_back(std::make_shared<CachedChunk>(transport_, redeemed.epoch, key, bytes));
    }
    for (const std::shared_ptr<CachedChunk>& chunk : chunks) {
      if (chunk->key().ns == *namespace_) continue;
      return absl::InvalidArgumentError(absl::StrCat("the ticket's chunks are of namespace ", ToString(chunk->key().ns),
                                                     ", expected ", ToString(*namespace_), " as this cache's options"));
    }
    epoch_ = redeemed.epoch;
    int64_t from = shared.length;
    for (const SharedCache::Row& table : shared.rows) {
      const auto blocks = static_cast<int64_t>(table.chunks.size());
      if (table.start < 0 || table.start > shared.length ||
          blocks > (shared.length - table.start) / options_.block_tokens) {
        return absl::InvalidArgumentError(absl::StrCat("a row of the shared cache begins at ", table.start, " and has ",
                                                       blocks, " chunks of ", options_.block_tokens,
                                                       " tokens, expected all within its ", shared.length, " columns"));
      }
      CacheRow& row = rows_.emplace_back();
      row.start = table.start;
      for (const int64_t place : table.chunks) {
        if (place < 0 || place >= static_cast<int64_t>(chunks.size())) {
          return absl::InvalidArgumentError(
              absl::StrCat("chunk ", place, " of a row, expected 0 to ", chunks.size() - 1));
        }
        row.chunks.push_back(chunks[static_cast<size_t>(place)]);
      }
      from = std::min(from, row.start + static_cast<int64_t>(row.chunks.size()) * options_.block_tokens);
    }
    for (size_t l = 0; l < shared.tails.size(); ++l) {
      CacheLayerState& state = layers_[l];
      const KeysValues tail{shared.tails[l].first, shared.tails[l].second};
      if (tail.k.size(2) != shared.length - from) {
        return absl::InvalidArgumentError(absl::StrCat("tail ", l, " of the shared cache has ", tail.k.size(2),
                                                       " columns, expected ", shared.length - from));
      }
      state.length = shared.length;
      state.resident = false;
      state.base = from;
      for (const CacheRow& row : rows_) state.cut.push_back(static_cast<int64_t>(row.chunks.size()));
      state.refill.assign(rows_.size(), nullptr);
      if (tail.k.size(2) > 0) {
        state.buffer.Append(tail, 0, tail.k.size(2), TailCapacity(TailColumns(), shared.length));
      }
    }
    ferrying_ = true;
    resident_ = 0;
    return Plan(shared.length, batch());
  });
  if (!adopted.ok()) Reset();
  return adopted;
}

}  // namespace kvferry
