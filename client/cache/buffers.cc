#include "client/cache/buffers.h"

#include <algorithm>
#include <utility>

#include "ATen/ops/index_select.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "client/cache/budget.h"

namespace kvferry {
namespace {

// Nobody else has the tensor itself (a fork would) nor a view of its memory (a model would).
bool OneOwner(const at::Tensor& t) { return t.use_count() == 1 && t.storage().use_count() == 1; }

at::Tensor Sized(const at::Tensor& like, int64_t columns) {
  return EmptyLike(like, {like.size(0), like.size(1), columns, like.size(3)});
}

}  // namespace

uint64_t BytesOf(const KeysValues& t) {
  return t.defined() ? static_cast<uint64_t>(t.k.numel() * t.k.element_size() + t.v.numel() * t.v.element_size()) : 0;
}

uint64_t StorageBytes(const KeysValues& t) {
  if (!t.defined()) return 0;
  const uint64_t k = t.k.storage().nbytes();
  return t.k.storage().is_alias_of(t.v.storage()) ? k : k + t.v.storage().nbytes();
}

GrowBuffer::GrowBuffer(GrowBuffer&& other) noexcept
    : ledger_(other.ledger_), buffers_(std::exchange(other.buffers_, {})), length_(std::exchange(other.length_, 0)) {}

GrowBuffer& GrowBuffer::operator=(GrowBuffer&& other) noexcept {
  if (this == &other) return *this;
  Clear();
  ledger_ = other.ledger_;
  buffers_ = std::exchange(other.buffers_, {});
  length_ = std::exchange(other.length_, 0);
  return *this;
}

GrowBuffer GrowBuffer::ShareWith(DeviceLedger* ledger) const {
  GrowBuffer copy(ledger);
  copy.Replace(buffers_);
  copy.length_ = length_;
  return copy;
}

KeysValues GrowBuffer::View() const {
  if (!buffers_.defined()) return {};
  return {buffers_.k.narrow(2, 0, length_), buffers_.v.narrow(2, 0, length_)};
}

bool GrowBuffer::Exclusive() const { return OneOwner(buffers_.k) && OneOwner(buffers_.v); }

void GrowBuffer::Replace(KeysValues buffers) {
  const uint64_t before = BytesOf(buffers_);
  ledger_->Add(BytesOf(buffers));
  buffers_ = std::move(buffers);
  ledger_->Remove(before);
}

void GrowBuffer::Append(const KeysValues& from, int64_t column, int64_t n, int64_t capacity) {
  const int64_t length = length_ + n;
  if (!buffers_.defined() || buffers_.k.size(2) < length || !Exclusive()) {
    const int64_t columns = std::max(capacity, length);
    KeysValues grown{Sized(from.k, columns), Sized(from.v, columns)};
    if (length_ > 0) {
      CopyColumns(buffers_.k, 0, grown.k, 0, length_);
      CopyColumns(buffers_.v, 0, grown.v, 0, length_);
    }
    Replace(std::move(grown));
  }
  CopyColumns(from.k, column, buffers_.k, length_, n);
  CopyColumns(from.v, column, buffers_.v, length_, n);
  length_ = length;
}

void GrowBuffer::Cut(int64_t length) { length_ = std::min(length_, length); }

void GrowBuffer::SelectRows(const at::Tensor& rows) {
  if (!buffers_.defined()) return;
  const c10::InferenceMode no_inference(false);
  const c10::AutoGradMode no_grad(false);
  const at::Tensor index = rows.to(buffers_.k.device());
  const int64_t columns = std::min(buffers_.k.size(2), GrownCapacity(length_));
  const KeysValues held = View();
  KeysValues selected{EmptyLike(held.k, {rows.numel(), held.k.size(1), columns, held.k.size(3)}),
                      EmptyLike(held.v, {rows.numel(), held.v.size(1), columns, held.v.size(3)})};
  if (length_ > 0) {
    at::Tensor k = selected.k.narrow(2, 0, length_), v = selected.v.narrow(2, 0, length_);
    at::index_select_out(k, held.k, 0, index);
    at::index_select_out(v, held.v, 0, index);
  }
  Replace(std::move(selected));
}

void GrowBuffer::Clear() {
  Replace({});
  length_ = 0;
}

KeysValues RingSlot::Take(const KeysValues& like, int64_t columns) {
  const auto count = [columns](const at::Tensor& t) { return t.size(0) * t.size(1) * columns * t.size(3); };
  const auto fits = [&](const at::Tensor& flat, const at::Tensor& t) {
    return flat.defined() && OneOwner(flat) && flat.numel() >= count(t) && flat.scalar_type() == t.scalar_type() &&
           flat.device() == t.device();
  };
  if (!fits(flat_.k, like.k) || !fits(flat_.v, like.v)) {
    Clear();
    const int64_t capacity = GrownCapacity(columns);
    flat_ = {EmptyLike(like.k, {count(like.k) / columns * capacity}),
             EmptyLike(like.v, {count(like.v) / columns * capacity})};
    ledger_->Add(BytesOf(flat_));
  }
  const c10::InferenceMode no_inference(false);
  const auto shaped = [&](const at::Tensor& flat, const at::Tensor& t) {
    return flat.narrow(0, 0, count(t)).view({t.size(0), t.size(1), columns, t.size(3)});
  };
  return {shaped(flat_.k, like.k), shaped(flat_.v, like.v)};
}

void RingSlot::Clear() {
  ledger_->Remove(BytesOf(flat_));
  flat_ = {};
}

}  // namespace kvferry
