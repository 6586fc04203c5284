// Device memory of a cache: buffers that grow in place, and the ring slot that layers take turns with. Every byte is
// counted.
#pragma once

#include <cstdint>
#include <utility>

#include "ATen/core/TensorBody.h"
#include "client/cache/columns.h"

namespace kvferry {

// Bytes of the elements; 0 for undefined tensors.
uint64_t BytesOf(const KeysValues& t);

// Bytes of the memory that the tensors keep alive.
uint64_t StorageBytes(const KeysValues& t);

// Bytes held on the device now, and the most there ever were. One a cache.
class DeviceLedger {
 public:
  void Add(uint64_t bytes) {
    now_ += bytes;
    if (now_ > peak_) peak_ = now_;
  }
  void Remove(uint64_t bytes) { now_ -= bytes; }
  // Counts `bytes` that others hold for us at this moment towards the peak.
  void Observe(uint64_t bytes) {
    if (now_ + bytes > peak_) peak_ = now_ + bytes;
  }
  uint64_t now() const { return now_; }
  uint64_t peak() const { return peak_; }

 private:
  uint64_t now_ = 0, peak_ = 0;
};

// Bytes counted in a ledger while this lives. Move-only.
class HeldBytes {
 public:
  HeldBytes() = default;
  HeldBytes(DeviceLedger* ledger, uint64_t bytes) : ledger_(ledger), bytes_(bytes) { ledger_->Add(bytes_); }
  ~HeldBytes() {
    if (ledger_ != nullptr) ledger_->Remove(bytes_);
  }
  HeldBytes(HeldBytes&& other) noexcept
      : ledger_(std::exchange(other.ledger_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  HeldBytes& operator=(HeldBytes&& other) noexcept {
    std::swap(ledger_, other.ledger_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

 private:
  DeviceLedger* ledger_ = nullptr;
  uint64_t bytes_ = 0;
};

// Columns [0, length()) of [B, H, capacity, D] buffers. Copies share the memory (and count it each) until one of them
// writes.
class GrowBuffer {
 public:
  explicit GrowBuffer(DeviceLedger* ledger) : ledger_(ledger) {}
  ~GrowBuffer() { Clear(); }
  GrowBuffer(GrowBuffer&& other) noexcept;
  GrowBuffer& operator=(GrowBuffer&& other) noexcept;
  // The same contents, counted in another ledger.
  GrowBuffer ShareWith(DeviceLedger* ledger) const;

  int64_t length() const { return length_; }
  uint64_t bytes() const { return BytesOf(buffers_); }
  // Views of the columns held. They stay as they are while anybody holds them. Undefined where nothing was ever
  // appended.
  KeysValues View() const;

  // Appends `n` columns of `from`, from `column` on. In place if there is room and nobody else holds the memory; else
  // into a new buffer of `capacity` columns (at least what is needed).
  void Append(const KeysValues& from, int64_t column, int64_t n, int64_t capacity);
  // Forgets the columns beyond `length`.
  void Cut(int64_t length);
  // Row i becomes what row rows[i] was, in new buffers that are as large as the columns held need.
  void SelectRows(const at::Tensor& rows);
  void Clear();

 private:
  bool Exclusive() const;
  void Replace(KeysValues buffers);

  DeviceLedger* ledger_;
  KeysValues buffers_;
  int64_t length_ = 0;
};

// Memory in which one layer after another finds its whole keys and values, contiguous [B, H, S, D].
class RingSlot {
 public:
  explicit RingSlot(DeviceLedger* ledger) : ledger_(ledger) {}
  ~RingSlot() { Clear(); }
  RingSlot(const RingSlot&) = delete;
  RingSlot& operator=(const RingSlot&) = delete;

  // Contiguous uninitialised tensors with `columns` columns, shaped as `like` otherwise. The memory of the last call is
  // used again if nobody holds its tensors any more and it is large enough.
  KeysValues Take(const KeysValues& like, int64_t columns);
  void Clear();

 private:
  DeviceLedger* ledger_;
  KeysValues flat_;  // one-dimensional, of the model's dtypes
};

}  // namespace kvferry
