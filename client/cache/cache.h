// The KV cache of a model, its layers swapped between the device and a store: what a generation loop calls.
//
// A sequence lives on immutable chunks: each time T tokens of a row are complete, one block a layer is packed and put,
// once; what is left over, the tail, stays on the device. See README.md.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace at {
class Tensor;
}

namespace kvferry {

class Transport;

// Called when the first block has to leave the device, and not before: until then no store is needed.
using TransportProvider = std::function<absl::StatusOr<std::shared_ptr<Transport>>()>;

// What to do when the store has no room: keep the blocks on the device, past the bound, and try again at later blocks;
// or fail before anything is allocated or changed.
enum class OnFull { kRaise, kDevice };

struct CacheOptions {
  int block_tokens = 64;           // T: a power of two, 1 to 4096
  std::optional<int> layers;       // layers with full attention; unknown: learnt from the first forward pass
  std::vector<int> layer_numbers;  // what errors call the layers; empty: 0, 1, 2, ...
  std::optional<int>
      resident_layers;  // R; given: every full block is put at once. Not given: nothing leaves until it must
  std::optional<int> prefetch_depth;      // layers fetched ahead; default 0 where fetching copies nothing, else 2
  std::optional<uint64_t> device_memory;  // bytes, a hard bound; not given: none on a CPU, else what is free at first
  OnFull on_full = OnFull::kRaise;
  absl::Duration full_timeout = absl::Seconds(10);   // how long to wait for room in the store
  absl::Duration fetch_timeout = absl::Seconds(30);  // how long a layer may take to arrive
  std::string model;                                 // identity of the weights; empty: live chunks only
};

// INVALID_ARGUMENT naming the option, its value and what was expected.
absl::Status Validate(const CacheOptions& options);

struct CacheStats {
  uint64_t device_bytes = 0;  // buffers and tails held, received blocks not yet used, and what was set aside
  uint64_t device_bytes_peak = 0;
  uint64_t stored_bytes = 0;  // blocks of this cache in the store
  uint64_t blocks_put = 0, bytes_put = 0;
  uint64_t blocks_got = 0, bytes_got = 0;
  uint64_t refused = 0;       // chunks the store had no room for
  uint64_t plain_layers = 0;  // kept on the device: gradients flow through them, or they were assigned
  uint64_t relearned = 0;     // namespaces opened with other shapes than the first layer's
  int layers_on_device = 0;   // layers with full blocks on the device: resident, in the ring, in flight
  int resident_layers = 0;    // R now
  int prefetch_depth = 0;
  double seconds_waited = 0;   // for blocks that were not there and for acknowledgements
  double seconds_copying = 0;  // packing and gathering
};

// A cache's contents on their way to another process.
struct SharedCache {
  struct Row {
    int64_t start = 0;
    std::vector<int64_t> chunks;  // of its table: places in the ticket
  };
  std::string url;  // of the store
  uint64_t ticket = 0;
  int64_t length = 0;  // columns held by every layer
  std::vector<Row> rows;
  std::vector<std::pair<at::Tensor, at::Tensor>> tails;  // by layer: the last columns, [B, H, <= 2T, D], of all rows
};

// Not thread-safe: one thread at a time. Tensors are [batch, heads, tokens, dim], any strides, K and V of any widths;
// dtype, device, batch, heads and dims of a layer are fixed by its first update (until Reset) and checked:
// INVALID_ARGUMENT names the argument, its value and what was expected, and changes nothing.
class Cache {
 public:
  static absl::StatusOr<std::unique_ptr<Cache>> Create(const CacheOptions& options, TransportProvider provider);
  virtual ~Cache() = default;

  // Appends [B, H, q, D] to `layer` and returns all of its keys and values, [B, H, S + q, D] each, for use by this
  // layer's attention alone: the next layer may reuse the memory once nobody holds the tensors.
  //   RESOURCE_EXHAUSTED  the device bound or the store is full; nothing was changed or allocated.
  //   UNAVAILABLE, DEADLINE_EXCEEDED, DATA_LOSS, NOT_FOUND  blocks could not be had; the message names the store and
  //   the
  //                       number of tokens to recompute. The cache stays as it was before this layer's update.
  virtual absl::StatusOr<std::pair<at::Tensor, at::Tensor>> Update(const at::Tensor& k, const at::Tensor& v,
                                                                   int layer) = 0;

  // The layer holds `k` and `v` from now on, [B, H, S, D] of any S, dtype and device: the tensors themselves, which
  // stay on the device for good (until Reset). The batch must be the one held. Layers that are out of step then are
  // found at the next pass. RESOURCE_EXHAUSTED: device_memory has no room for them; nothing was changed.
  virtual absl::Status Assign(const at::Tensor& k, const at::Tensor& v, int layer) = 0;

  // Before a forward pass that brings the sequence to `columns` tokens while `aside` bytes of device_memory are needed
  // for what lies beside this cache (windows, states): makes room for both. Update does the first part by itself.
  // Replaces what was set aside before; less is always possible. RESOURCE_EXHAUSTED: no room; nothing was changed.
  virtual absl::Status MakeRoom(int64_t columns, uint64_t aside) = 0;

  // Row i starts at column starts[i]: what comes before are left pads, which attention masks; they are stored nowhere,
  // so that equal rows have equal blocks whatever their padding. FAILED_PRECONDITION unless the cache is empty; the
  // batch is fixed by it. Without this call pads are columns like any other.
  virtual absl::Status SetRowStarts(const std::vector<int64_t>& starts) = 0;

  // Tokens held by the layer; 0 for one never updated. Local, never a call to the store.
  virtual int64_t SeqLength(int layer) const = 0;
  virtual int layers() const = 0;
  virtual int64_t batch() const = 0;  // 0 before the first update

  // Removes the last `n` >= 0 tokens of every layer; more than are held empties the cache.
  virtual absl::Status Crop(int64_t n) = 0;
  // Row i becomes what row rows[i] was: reorder, select and repeat in one. `rows` may be shorter or longer than the
  // batch.
  virtual absl::Status SelectRows(const std::vector<int64_t>& rows) = 0;
  // A cache of its own with the same contents: chunks are shared, device buffers are shared until one of the two
  // writes.
  virtual absl::StatusOr<std::unique_ptr<Cache>> Fork() = 0;
  // What another process needs to go on with this cache's contents: full blocks by a ticket of the store, which keeps
  // them for `ttl`, the rest by value. From now on full blocks are put as they complete. FAILED_PRECONDITION where
  // that cannot be: no block is full, the store is embedded, or layers stay on the device (plain, or never updated).
  virtual absl::StatusOr<SharedCache> Share(absl::Duration ttl) = 0;
  // The contents of a shared cache, in this one. FAILED_PRECONDITION unless it is empty, INVALID_ARGUMENT if its
  // options do not fit; NOT_FOUND: the ticket's time is over.
  virtual absl::Status Adopt(const SharedCache& shared) = 0;

  // Empty as after Create. Never fails.
  virtual void Reset() = 0;

  // Fresh tensors with everything the layer holds; undefined tensors for a layer never updated.
  virtual absl::StatusOr<std::pair<at::Tensor, at::Tensor>> Read(int layer) = 0;

  // Waits until every full block is acknowledged by the store.
  virtual absl::Status Flush(absl::Time deadline) = 0;
  virtual CacheStats Stats() const = 0;
};

}  // namespace kvferry
