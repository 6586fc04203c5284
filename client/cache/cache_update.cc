#include <algorithm>
#include <utility>

#include "ATen/ops/cat.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "client/cache/cache_impl.h"
#include "client/cache/check.h"
#include "storage/base/status.h"

namespace kvferry {

absl::StatusOr<std::pair<at::Tensor, at::Tensor>> CacheImpl::Update(const at::Tensor& k, const at::Tensor& v,
                                                                    int layer) {
  KVFERRY_RETURN_IF_ERROR(CheckWhole());
  KVFERRY_RETURN_IF_ERROR(CheckUpdate(k, v, layer));
  // A layer that is as long as any begins another pass, which would be wrong if one of the others lags behind.
  if (SeqLength(layer) > 0 && SeqLength(layer) == MaxLength()) KVFERRY_RETURN_IF_ERROR(CheckInStep());
  // A layer that was left out while others took several passes cannot come in with the last one's tokens alone.
  if (SeqLength(layer) == 0 && MaxLength() > k.size(2)) torn_layer_ = layer;
  KVFERRY_RETURN_IF_ERROR(CheckWhole());
  std::vector<int64_t> starts;
  for (const CacheRow& row : rows_) starts.push_back(row.start);
  absl::StatusOr<KeysValues> full = Guarded(layer, [&] {
    // What a view with a negative or conjugate bit stands for, since copies go by address.
    return UpdateLayer({k.resolve_conj().resolve_neg(), v.resolve_conj().resolve_neg()}, layer);
  });
  if (full.ok()) return std::make_pair(full->k, full->v);
  if (MaxLength() == 0) {
    Reset();  // as it was before the first update, whose batch and shapes bind nobody
    KVFERRY_RETURN_IF_ERROR(SetRowStarts(starts));
  } else if (MaxLength() > SeqLength(layer)) {
    torn_layer_ = layer;
  }
  return full.status();
}

absl::Status CacheImpl::CheckWhole() const {
  if (torn_layer_ < 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("a forward pass was interrupted or broke off at layer ", Number(torn_layer_),
                   " after others had changed: call reset() and run the model on all ", MaxLength(), " tokens again"));
}

// Layers that are in use and lag behind show that the forward pass before was broken off between two of them (an
// exception in the model, an interrupt).
absl::Status CacheImpl::InStep() const {
  for (int l = 0; l < layers(); ++l) {
    const int64_t length = layers_[static_cast<size_t>(l)].length;
    if (length == 0 || length == MaxLength()) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("layer ", Number(l), " holds ", length, " tokens, expected ", MaxLength(), " as the longest"));
  }
  return absl::OkStatus();
}

absl::Status CacheImpl::CheckInStep() {
  for (int l = 0; l < layers() && torn_layer_ < 0; ++l) {
    const int64_t length = layers_[static_cast<size_t>(l)].length;
    if (length > 0 && length < MaxLength()) torn_layer_ = l;
  }
  return CheckWhole();
}

absl::StatusOr<KeysValues> CacheImpl::UpdateLayer(const KeysValues& added, int layer) {
  const int64_t tokens = added.k.size(2);
  if (layer >= layers()) {
    if (learnt_) KVFERRY_RETURN_IF_ERROR(Relearn(layer));  // one more than the first forward pass had
    AddLayers(layer);
  }
  CacheLayerState& state = layers_[static_cast<size_t>(layer)];
  if (rows_.empty()) {
    rows_.resize(static_cast<size_t>(added.k.size(0)));
    for (CacheLayerState& other : layers_) {
      other.cut.assign(rows_.size(), 0);
      other.refill.assign(rows_.size(), nullptr);
    }
  }
  if (!state.shape.defined()) {
    const KeysValues assumed = ShapeOf(layer);
    const auto empty = [](const at::Tensor& t) { return EmptyLike(t, {t.size(0), t.size(1), 0, t.size(3)}); };
    state.shape = {empty(added.k), empty(added.v)};
    if (learnt_ && assumed.defined() && !CheckLike(assumed.k, assumed.v, state.shape, layer).ok()) {
      if (absl::Status status = Relearn(layer); !status.ok()) {
        state.shape = {};
        return status;
      }
    }
  }
  if (state.length > 0) learnt_ = true;
  const int64_t columns = state.length + tokens;
  const bool wants_grad = c10::GradMode::is_enabled() && (added.k.requires_grad() || added.v.requires_grad());
  state.turns_plain = wants_grad && !state.plain;
  if (columns > planned_ || state.turns_plain) {
    const absl::Status planned = Plan(std::max(columns, planned_), batch());
    const bool turns_plain = std::exchange(state.turns_plain, false);
    KVFERRY_RETURN_IF_ERROR(planned);
    if (turns_plain) return UpdatePlain(added, layer);
  }
  if (state.plain) return UpdatePlain(added, layer);

  const bool all_stay = resident_ >= layers();
  if (!all_stay) KVFERRY_RETURN_IF_ERROR(AwaitRoom(layer, AnswerBy()));
  // Tokens that lie one behind the other, as those of DynamicCache do: matrix products of others may differ in the last
  // bit.
  const bool as_they_came = state.length == 0 && added.k.is_contiguous() && added.v.is_contiguous();
  KeysValues full = added;
  if (state.resident) {
    const ScopedTimer timer(&copying_);
    state.buffer.Append(added, 0, tokens, GrownCapacity(columns));
    if (!as_they_came) full = state.buffer.View();
  } else if (!as_they_came) {
    KVFERRY_ASSIGN_OR_RETURN(full, Assemble(layer, tokens, &ring_));
    const ScopedTimer timer(&copying_);
    CopyColumns(added.k, 0, full.k, state.length, tokens);
    CopyColumns(added.v, 0, full.v, state.length, tokens);
  }
  state.length = columns;
  if (ferrying_ && (!all_stay || HasRoom(layer))) PutEntries(state, full, 0, layer);
  if (!state.resident) KeepTail(state, full);
  FetchAhead(layer);
  return full;
}

absl::StatusOr<KeysValues> CacheImpl::UpdatePlain(const KeysValues& added, int layer) {
  CacheLayerState& state = layers_[static_cast<size_t>(layer)];
  if (!state.plain) {
    KeysValues held;
    if (state.length > 0) {
      KVFERRY_ASSIGN_OR_RETURN(held, Assemble(layer, 0, nullptr));
    }
    SetWhole(state, held);
  }
  // A copy even of the first tokens, as DynamicCache makes: the caller may change his tensors in place.
  SetWhole(state,
           state.whole.defined()
               ? KeysValues{at::cat({state.whole.k, added.k}, 2), at::cat({state.whole.v, added.v}, 2)}
               : KeysValues{added.k.clone(at::MemoryFormat::Contiguous), added.v.clone(at::MemoryFormat::Contiguous)});
  state.length += added.k.size(2);
  return state.whole;
}

void CacheImpl::SetWhole(CacheLayerState& state, KeysValues whole) {
  if (!state.plain) {
    state.plain = true;
    state.buffer.Clear();
    state.refill.assign(rows_.size(), nullptr);
  }
  state.whole_bytes = HeldBytes(&ledger_, StorageBytes(whole));
  state.whole = std::move(whole);
}

absl::Status CacheImpl::Assign(const at::Tensor& k, const at::Tensor& v, int layer) {
  KVFERRY_RETURN_IF_ERROR(CheckWhole());
  KVFERRY_RETURN_IF_ERROR(CheckStates(k, v));
  if (SeqLength(layer) == 0) {
    if (MaxLength() == 0 || MaxLength() == k.size(2)) return Update(k, v, layer).status();
    return absl::InvalidArgumentError(absl::StrCat("keys of layer ", Number(layer), " have ", k.size(2),
                                                   " tokens, expected ", MaxLength(), " as the other layers"));
  }
  KVFERRY_RETURN_IF_ERROR(CheckBatch(k, batch()));
  CacheLayerState& state = layers_[static_cast<size_t>(layer)];
  const auto empty = [](const at::Tensor& t) { return EmptyLike(t, {t.size(0), t.size(1), 0, t.size(3)}); };
  return Guarded(layer, [&] {
    const KeysValues before = std::exchange(state.shape, KeysValues{empty(k), empty(v)});
    state.turns_plain = !state.plain;
    const absl::Status planned = Plan(std::max(k.size(2), planned_), batch());
    state.turns_plain = false;
    if (!planned.ok()) {
      state.shape = before;
      return planned;
    }
    std::erase_if(ahead_, [layer](const Ahead& ahead) { return ahead.layer == layer; });
    SetWhole(state, {k, v});
    state.length = k.size(2);
    return absl::OkStatus();
  });
}

absl::StatusOr<KeysValues> CacheImpl::Assemble(int layer, int64_t extra, RingSlot* slot) {
  const CacheLayerState& state = layers_[static_cast<size_t>(layer)];
  Views views;
  if (!state.resident) KVFERRY_RETURN_IF_ERROR(FetchViews(layer, views));
  const ScopedTimer timer(&copying_);
  const int64_t columns = state.length + extra;
  KeysValues to;
  if (slot != nullptr) {
    to = slot->Take(state.shape, columns);
    ring_layer_ = layer;
  } else {
    const auto fresh = [&](const at::Tensor& t) { return EmptyLike(t, {t.size(0), t.size(1), columns, t.size(3)}); };
    to = {fresh(state.shape.k), fresh(state.shape.v)};
  }
  std::vector<UnpackJob> jobs;
  std::vector<int64_t> held_from(rows_.size());  // first column that the buffer gives to the row
  const int64_t t = options_.block_tokens;
  for (size_t r = 0; r < rows_.size(); ++r) {
    const CacheRow& row = rows_[r];
    const auto index = static_cast<int64_t>(r);
    const int64_t cut = state.resident ? 0 : state.cut[r];
    for (int64_t i = 0; i < cut; ++i) {
      const CachedChunk* chunk = row.chunks[static_cast<size_t>(i)].get();
      jobs.push_back({index, row.start + i * t, t, &views.by_chunk.at(chunk)});
    }
    const int64_t stored_to = row.start + cut * t;
    held_from[r] = state.resident ? 0 : std::max(state.base, stored_to);
    if (!state.resident && state.base > stored_to) {
      if (state.refill[r] == nullptr) {
        return absl::InternalError(absl::StrCat("columns ", stored_to, " to ", state.base - 1, " of row ", r,
                                                ", layer ", Number(layer),
                                                " are held by nobody; this is a bug in kvferry"));
      }
      jobs.push_back({index, stored_to, state.base - stored_to, &views.by_chunk.at(state.refill[r].get())});
    }
  }
  UnpackBlocks(jobs, t, to);
  const KeysValues held = state.buffer.View();
  const bool equal = std::adjacent_find(held_from.begin(), held_from.end(), std::not_equal_to<>()) == held_from.end();
  if (held.defined() && equal) {
    CopyColumns(held.k, held_from[0] - state.base, to.k, held_from[0], state.length - held_from[0]);
    CopyColumns(held.v, held_from[0] - state.base, to.v, held_from[0], state.length - held_from[0]);
  }
  for (size_t r = 0; r < rows_.size(); ++r) {
    const auto index = static_cast<int64_t>(r);
    if (held.defined() && !equal) {
      CopyRowColumns(held, held_from[r] - state.base, to, held_from[r], index, state.length - held_from[r]);
    }
    ZeroColumns(to, index, 0, std::min(rows_[r].start, state.length));
  }
  return to;
}

void CacheImpl::KeepTail(CacheLayerState& state, const KeysValues& full) {
  int64_t base = state.length;
  for (size_t r = 0; r < rows_.size(); ++r) {
    base = std::min(base, rows_[r].start + state.cut[r] * options_.block_tokens);
  }
  base = std::max<int64_t>(base, 0);
  const bool goes_on = state.buffer.length() > 0 && base == state.base;
  if (!goes_on) {
    state.buffer.Cut(0);
    state.base = base;
    state.refill.assign(rows_.size(), nullptr);
  }
  const int64_t from = base + state.buffer.length();
  const int64_t n = state.length - from;
  if (n > 0) state.buffer.Append(full, from, n, TailCapacity(TailColumns(), state.length));
}

absl::StatusOr<std::pair<at::Tensor, at::Tensor>> CacheImpl::Read(int layer) {
  if (layer < 0 || layer >= layers() || layers_[static_cast<size_t>(layer)].length == 0) {
    return std::make_pair(at::Tensor(), at::Tensor());
  }
  const CacheLayerState& state = layers_[static_cast<size_t>(layer)];
  KVFERRY_RETURN_IF_ERROR(CheckWhole());
  if (state.plain) return std::make_pair(state.whole.k.clone(), state.whole.v.clone());
  KVFERRY_ASSIGN_OR_RETURN(KeysValues all, Assemble(layer, 0, nullptr));
  return std::make_pair(all.k, all.v);
}

}  // namespace kvferry
