// The implementation behind cache.h, in one file a concern:
//   cache.cc         options, checks of arguments, statistics
//   cache_update.cc  Update and Read: one layer's keys and values are put together
//   cache_fetch.cc   blocks come back: what is asked for ahead, what is waited for
//   cache_ferry.cc   blocks leave: how many layers stay, reserving, packing, putting
//   cache_rows.cc    Crop, SelectRows, Fork, Reset: no byte of KV is sent
//   cache_share.cc   Share and Adopt: to another process
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "client/cache/budget.h"
#include "client/cache/buffers.h"
#include "client/cache/cache.h"
#include "client/cache/cached_chunk.h"
#include "client/cache/columns.h"
#include "client/transport.h"

namespace kvferry {

// A row of the batch: entry i of its table covers columns [start + i*T, start + (i+1)*T). Columns before `start` are
// left pads that are stored nowhere and read as zeros.
struct CacheRow {
  int64_t start = 0;
  std::vector<std::shared_ptr<CachedChunk>> chunks;
};

// One layer's share of the sequence. Of row r, the first cut[r] entries of its table have been packed and put by this
// layer; what comes after them is in `buffer`, whose first column is `base` (0 if the layer is resident: then it holds
// everything), but for what a crop left in the middle of a block, which is read back from refill[r].
struct CacheLayerState {
  explicit CacheLayerState(DeviceLedger* ledger) : buffer(ledger) {}

  int64_t length = 0;  // columns held
  bool resident = true;
  // Gradients flow through it, or it was assigned: `whole` holds everything, and nothing of it is put any more.
  bool plain = false;
  bool turns_plain = false;  // about to be, for the plan
  KeysValues whole;
  HeldBytes whole_bytes;
  GrowBuffer buffer;
  int64_t base = 0;
  std::vector<int64_t> cut;                          // by row
  std::vector<std::shared_ptr<CachedChunk>> refill;  // by row; null: nothing to read back
  KeysValues shape;                                  // empty tensors [B, H, 0, D] of the layer's dtypes and device
};

class CacheImpl final : public Cache {
 public:
  CacheImpl(const CacheOptions& options, TransportProvider provider);
  ~CacheImpl() override;

  absl::StatusOr<std::pair<at::Tensor, at::Tensor>> Update(const at::Tensor& k, const at::Tensor& v,
                                                           int layer) override;
  absl::Status Assign(const at::Tensor& k, const at::Tensor& v, int layer) override;
  absl::Status MakeRoom(int64_t columns, uint64_t aside) override;
  absl::Status SetRowStarts(const std::vector<int64_t>& starts) override;
  int64_t SeqLength(int layer) const override;
  int layers() const override { return static_cast<int>(layers_.size()); }
  int64_t batch() const override { return static_cast<int64_t>(rows_.size()); }
  absl::Status Crop(int64_t n) override;
  absl::Status SelectRows(const std::vector<int64_t>& rows) override;
  absl::StatusOr<std::unique_ptr<Cache>> Fork() override;
  absl::StatusOr<SharedCache> Share(absl::Duration ttl) override;
  absl::Status Adopt(const SharedCache& shared) override;
  void Reset() override;
  absl::StatusOr<std::pair<at::Tensor, at::Tensor>> Read(int layer) override;
  absl::Status Flush(absl::Time deadline) override;
  CacheStats Stats() const override;

 private:
  static constexpr int kMaxResident = 1 << 20;  // more than any model has: all of them

  // A layer asked for ahead of its use.
  struct Ahead {
    int layer = 0;
    uint64_t version = 0;  // of the tables when it was asked for; another one now: dropped
    std::vector<std::shared_ptr<CachedChunk>> chunks;
    std::unique_ptr<FetchStream> stream;
    HeldBytes bytes;
  };
  struct Views {
    absl::flat_hash_map<const CachedChunk*, BlockView> by_chunk;
    std::vector<HeldBytes> bytes;  // of this process's memory that they hold
  };

  // cache.cc
  absl::Status CheckUpdate(const at::Tensor& k, const at::Tensor& v, int layer) const;
  int Number(int layer) const;  // of the layer in the model
  void AddLayers(int layer);
  bool FullBlocksOnDevice(int layer) const;
  int64_t MaxLength() const;

  // cache_update.cc
  absl::StatusOr<KeysValues> UpdateLayer(const KeysValues& added, int layer);
  absl::StatusOr<KeysValues> UpdatePlain(const KeysValues& added, int layer);
  void SetWhole(CacheLayerState& state, KeysValues whole);
  // All columns the layer holds, then room for `extra` more, in `to` or (null) a fresh pair.
  absl::StatusOr<KeysValues> Assemble(int layer, int64_t extra, RingSlot* slot);
  void KeepTail(CacheLayerState& state, const KeysValues& full);

  // Runs what may throw (the tensor library does, out of memory above all): then the cache is torn.
  template <typename Operation>
  auto Guarded(int layer, Operation operation) {
    try {
      return operation();
    } catch (...) {
      torn_layer_ = layer;
      throw;
    }
  }
  absl::Status CheckWhole() const;
  // FAILED_PRECONDITION if a layer in use is shorter than another; of CheckInStep the cache is torn then.
  absl::Status InStep() const;
  absl::Status CheckInStep();

  // cache_fetch.cc
  absl::Status FetchViews(int layer, Views& views);
  absl::Status Receive(Ahead& ahead, Views& views);
  Ahead StartFetch(int layer, std::vector<std::shared_ptr<CachedChunk>> chunks, absl::Time deadline);
  std::vector<std::shared_ptr<CachedChunk>> StoredChunks(int layer) const;
  void FetchAhead(int layer);
  int Depth() const;
  absl::Status Lost(const absl::Status& status) const;

  // cache_ferry.cc
  absl::Status Plan(int64_t columns, int64_t batch);
  absl::StatusOr<int> ResidentLayersFor(int64_t columns, int64_t batch);
  // When a call that may wait for room has to be answered.
  absl::Time AnswerBy() const;
  absl::Status CheckEpoch();
  absl::Status Connect(int64_t columns, bool must);
  absl::Status OpenNamespace();
  absl::Status ReserveEntries(int64_t columns, bool must_leave);
  absl::Status ReserveSome(const std::vector<int64_t>& rows, bool wait);
  absl::Status Demote(int layer);
  absl::Status AwaitRoom(int layer, absl::Time deadline);
  bool HasRoom(int layer);
  void DiscardAcknowledged();
  // Entries of the layer that are complete, reserved and not put, out of `from`, whose first column is `base`.
  void PutEntries(CacheLayerState& state, const KeysValues& from, int64_t base, int layer);
  bool HasEntriesToPut(const CacheLayerState& state) const;
  absl::Status Relearn(int layer);
  void ForgetTable();
  int64_t TailColumns() const;
  int64_t CompleteEntries(const CacheLayerState& state, size_t row) const;
  const KeysValues& ShapeOf(int layer) const;

  // cache_share.cc
  absl::StatusOr<KeysValues> Tail(int layer, int64_t from);

  // cache_rows.cc
  void PutAll(bool wait, absl::Time deadline);
  void PermuteRows(const std::vector<int64_t>& rows);

  const CacheOptions options_;
  const TransportProvider provider_;
  const std::shared_ptr<PutTracker> tracker_ = std::make_shared<PutTracker>();
  DeviceLedger ledger_;

  std::vector<CacheRow> rows_;
  std::vector<CacheLayerState> layers_;
  int64_t planned_ = 0;          // columns that Plan has made room for
  uint64_t aside_ = 0;           // bytes of the bound for what lies beside this cache
  uint64_t version_ = 0;         // of the tables: every operation on rows changes it
  int resident_ = kMaxResident;  // R: the most layers that may be resident; only ever lowered until Reset
  bool learnt_ = false;          // the number and shapes of the layers are known
  bool ferrying_ = false;        // full blocks are put as they complete
  int torn_layer_ = -1;          // a forward pass failed at this layer after others had advanced

  std::shared_ptr<Transport> transport_;  // null until the first block has to leave
  uint64_t epoch_ = 0;                    // of the transport when the first entry was reserved
  int64_t connect_again_at_ = 0;          // columns; where a store is wanted but not needed
  std::optional<uint64_t> bound_;         // bytes, where none was given; 0: none. Found out at the first plan
  std::optional<NamespaceId> namespace_;
  size_t refused_entries_ = 0;  // how many were missing when the store last had no room
  RingSlot ring_{&ledger_};
  int ring_layer_ = -1;
  std::deque<Ahead> ahead_;

  uint64_t refused_ = 0, relearned_ = 0, blocks_got_ = 0, bytes_got_ = 0;
  absl::Duration waited_, copying_;
};

// Adds the time until it goes out of scope.
class ScopedTimer {
 public:
  explicit ScopedTimer(absl::Duration* sum) : sum_(sum), start_(absl::Now()) {}
  ~ScopedTimer() { *sum_ += absl::Now() - start_; }
  ScopedTimer(const ScopedTimer&) = delete;
  ScopedTimer& operator=(const ScopedTimer&) = delete;

 private:
  absl::Duration* const sum_;
  const absl::Time start_;
};

}  // namespace kvferry
