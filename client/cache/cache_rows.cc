#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "ATen/ops/from_blob.h"
#include "absl/strings/str_cat.h"
#include "client/cache/cache_impl.h"
#include "client/store_error.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

template <typename T>
std::vector<T> Selected(const std::vector<T>& from, const std::vector<int64_t>& rows) {
  std::vector<T> selected;
  selected.reserve(rows.size());
  for (const int64_t row : rows) selected.push_back(from[static_cast<size_t>(row)]);
  return selected;
}

}  // namespace

absl::Status CacheImpl::SetRowStarts(const std::vector<int64_t>& starts) {
  if (MaxLength() > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("the cache holds ", MaxLength(), " tokens, expected none when its rows' starts are set"));
  }
  for (const int64_t start : starts) {
    if (start < 0) return absl::InvalidArgumentError(absl::StrCat("row start is ", start, ", expected 0 or more"));
  }
  rows_.assign(starts.size(), {});
  for (size_t r = 0; r < starts.size(); ++r) rows_[r].start = starts[r];
  for (CacheLayerState& state : layers_) {
    state.cut.assign(rows_.size(), 0);
    state.refill.assign(rows_.size(), nullptr);
  }
  return absl::OkStatus();
}

absl::Status CacheImpl::Crop(int64_t n) {
  if (n < 0) return absl::InvalidArgumentError(absl::StrCat("crop by ", n, " tokens, expected 0 or more"));
  if (n == 0 || MaxLength() == 0) return absl::OkStatus();
  const int64_t length = MaxLength() - n;
  if (length <= 0) {
    Reset();
    return absl::OkStatus();
  }
  KVFERRY_RETURN_IF_ERROR(CheckWhole());
  KVFERRY_RETURN_IF_ERROR(InStep());
  ring_.Clear();
  ring_layer_ = -1;
  ahead_.clear();
  ++version_;
  planned_ = std::min(planned_, length);
  refused_entries_ = 0;
  const int64_t t = options_.block_tokens;
  for (size_t r = 0; r < rows_.size(); ++r) {
    CacheRow& row = rows_[r];
    const int64_t entries = std::max<int64_t>(0, (length - row.start) / t);
    if (static_cast<int64_t>(row.chunks.size()) <= entries) continue;
    const bool within = length > row.start + entries * t;  // the cut falls into the next entry: its first tokens stay
    const std::shared_ptr<CachedChunk> boundary = within ? row.chunks[static_cast<size_t>(entries)] : nullptr;
    row.chunks.resize(static_cast<size_t>(entries));
    for (CacheLayerState& state : layers_) {
      if (state.cut[r] <= entries) continue;
      state.cut[r] = entries;
      state.refill[r] = state.resident || state.plain ? nullptr : boundary;
    }
  }
  for (CacheLayerState& state : layers_) {
    state.length = std::max<int64_t>(0, state.length - n);
    if (state.plain && state.whole.defined()) {
      state.whole = {state.whole.k.narrow(2, 0, state.length), state.whole.v.narrow(2, 0, state.length)};
    }
    state.base = std::min(state.base, state.length);
    state.buffer.Cut(state.length - state.base);
  }
  return absl::OkStatus();
}

absl::Status CacheImpl::SelectRows(const std::vector<int64_t>& rows) {
  if (rows.empty()) return absl::InvalidArgumentError("rows is empty, expected at least one");
  for (const int64_t row : rows) {
    if (row < 0 || row >= batch()) {
      return absl::InvalidArgumentError(
          absl::StrCat("row index is ", row, ", expected 0 to ", batch() - 1, " (the batch held is ", batch(), ")"));
    }
  }
  KVFERRY_RETURN_IF_ERROR(CheckWhole());
  std::vector<int64_t> same(rows_.size());
  std::iota(same.begin(), same.end(), 0);
  if (rows == same) return absl::OkStatus();
  if (rows.size() > rows_.size()) {
    KVFERRY_RETURN_IF_ERROR(Guarded(0, [&] { return Plan(MaxLength(), static_cast<int64_t>(rows.size())); }));
  }
  return Guarded(0, [&] {
    PermuteRows(rows);
    return absl::OkStatus();
  });
}

// Before rows or forks come to share chunks: every complete block that has a place in the store is put, and places that
// were not used are given back. What is shared then is read only. Without `wait` layers for which there is no room on
// the wire are skipped, which is for caches whose layers all stay: what has been put of the others is then put again.
void CacheImpl::PutAll(bool wait, absl::Time deadline) {
  int64_t skipped = 0;
  for (int l = 0; l < layers() && ferrying_; ++l) {
    CacheLayerState& state = layers_[static_cast<size_t>(l)];
    if (state.plain || state.length == 0 || !HasEntriesToPut(state)) continue;
    if (!wait && !HasRoom(l)) {
      ++skipped;
      continue;
    }
    // A store that does not answer in time costs memory here, and nothing else.
    if (wait && !AwaitRoom(l, deadline).ok()) deadline = absl::InfinitePast();
    PutEntries(state, state.buffer.View(), state.resident ? 0 : state.base, l);
  }
  for (size_t r = 0; r < rows_.size(); ++r) {
    int64_t most = 0, least = std::numeric_limits<int64_t>::max();
    for (const CacheLayerState& state : layers_) {
      if (state.plain || state.length == 0) continue;
      most = std::max(most, state.cut[r]);
      least = std::min(least, state.cut[r]);
    }
    const int64_t used = skipped > 0 ? least : most;
    if (static_cast<int64_t>(rows_[r].chunks.size()) > used) rows_[r].chunks.resize(static_cast<size_t>(used));
    for (CacheLayerState& state : layers_) state.cut[r] = std::min(state.cut[r], used);
  }
  planned_ = std::min(planned_, MaxLength());
}

void CacheImpl::PermuteRows(const std::vector<int64_t>& rows) {
  PutAll(/*wait=*/resident_ < layers(), AnswerBy());
  ahead_.clear();
  ++version_;
  ring_.Clear();
  ring_layer_ = -1;
  rows_ = Selected(rows_, rows);
  const at::Tensor index = at::from_blob(const_cast<int64_t*>(rows.data()), {static_cast<int64_t>(rows.size())},
                                         at::TensorOptions(c10::kLong));
  for (CacheLayerState& state : layers_) {
    state.cut = Selected(state.cut, rows);
    state.refill = Selected(state.refill, rows);
    state.buffer.SelectRows(index);
    if (state.plain) {
      const at::Tensor there = index.to(state.whole.k.device(), /*non_blocking=*/false, /*copy=*/true);
      SetWhole(state, {state.whole.k.index_select(0, there), state.whole.v.index_select(0, there)});
    }
    if (!state.shape.defined()) continue;
    const auto resized = [&](const at::Tensor& like) {
      return EmptyLike(like, {batch(), like.size(1), 0, like.size(3)});
    };
    state.shape = {resized(state.shape.k), resized(state.shape.v)};
  }
}

absl::StatusOr<std::unique_ptr<Cache>> CacheImpl::Fork() {
  KVFERRY_RETURN_IF_ERROR(CheckWhole());
  Guarded(0, [&] { PutAll(/*wait=*/true, AnswerBy()); });
  {
    const ScopedTimer timer(&waited_);
    const absl::Status acked = tracker_->WaitForLayers(0, -1, AnswerBy());
    if (!acked.ok()) return Lost(acked);
    DiscardAcknowledged();
  }
  auto fork = std::make_unique<CacheImpl>(options_, provider_);
  fork->rows_ = rows_;
  fork->layers_.clear();
  for (const CacheLayerState& state : layers_) {
    CacheLayerState& copy = fork->layers_.emplace_back(&fork->ledger_);
    copy.length = state.length;
    copy.resident = state.resident;
    copy.plain = state.plain;
    if (state.whole.defined()) copy.whole = {state.whole.k.clone(), state.whole.v.clone()};
    copy.whole_bytes = HeldBytes(&fork->ledger_, StorageBytes(copy.whole));
    copy.buffer = state.buffer.ShareWith(&fork->ledger_);
    copy.base = state.base;
    copy.cut = state.cut;
    copy.refill = state.refill;
    copy.shape = state.shape;
  }
  fork->planned_ = planned_;
  fork->resident_ = resident_;
  fork->learnt_ = learnt_;
  fork->ferrying_ = ferrying_;
  fork->transport_ = transport_;
  fork->epoch_ = epoch_;
  fork->namespace_ = namespace_;
  return std::unique_ptr<Cache>(std::move(fork));
}

void CacheImpl::Reset() {
  ahead_.clear();
  ++version_;
  rows_.clear();
  layers_.clear();
  ring_.Clear();
  ring_layer_ = -1;
  planned_ = 0;
  refused_entries_ = 0;
  connect_again_at_ = 0;
  resident_ = kMaxResident;
  learnt_ = options_.layers.has_value();
  ferrying_ = false;
  torn_layer_ = -1;
  namespace_.reset();
  tracker_->StartSequence();
  if (options_.layers) AddLayers(*options_.layers - 1);
}

absl::Status CacheImpl::Flush(absl::Time deadline) {
  if (transport_ == nullptr) return absl::OkStatus();
  KVFERRY_RETURN_IF_ERROR(CheckWhole());
  KVFERRY_RETURN_IF_ERROR(CheckEpoch());
  if (ferrying_) {
    refused_entries_ = 0;  // ask again, whatever the store said last
    KVFERRY_RETURN_IF_ERROR(ReserveEntries(MaxLength(), /*must_leave=*/true));
  }
  Guarded(0, [&] { PutAll(/*wait=*/true, deadline); });
  {
    const ScopedTimer timer(&waited_);
    const absl::Status acked = tracker_->WaitForLayers(0, -1, deadline);
    if (!acked.ok()) return StoreError(transport_->url(), "flush", acked);
  }
  DiscardAcknowledged();
  KVFERRY_RETURN_IF_ERROR(tracker_->last_error());
  for (int l = 0; l < layers() && ferrying_; ++l) {
    const CacheLayerState& state = layers_[static_cast<size_t>(l)];
    for (size_t r = 0; r < rows_.size() && !state.plain; ++r) {
      if (state.cut[r] >= CompleteEntries(state, r)) continue;
      return StoreError(transport_->url(), "flush",
                        absl::ResourceExhaustedError(absl::StrCat("block ", state.cut[r], " of row ", r, ", layer ",
                                                                  Number(l), ", has no place in the store")));
    }
  }
  return transport_->Flush(deadline);
}

}  // namespace kvferry
