#include "client/cache/cache.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cache/cache_impl.h"
#include "client/cache/check.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

constexpr int kMaxLayers = 4096;

}  // namespace

absl::Status Validate(const CacheOptions& options) {
  const auto error = [](absl::string_view name, const auto& value, absl::string_view expected) {
    return absl::InvalidArgumentError(absl::StrCat(name, " is ", value, ", expected ", expected));
  };
  const int t = options.block_tokens;
  if (t < 1 || t > 4096 || !std::has_single_bit(static_cast<unsigned>(t))) {
    return error("block_tokens", t, "a power of two from 1 to 4096");
  }
  if (options.layers && (*options.layers < 1 || *options.layers > kMaxLayers)) {
    return error("layers", *options.layers, "1 to 4096");
  }
  if (!options.layer_numbers.empty() && static_cast<int>(options.layer_numbers.size()) != options.layers.value_or(-1)) {
    return error("size of layer_numbers", options.layer_numbers.size(), "one for each of the layers");
  }
  if (options.resident_layers && *options.resident_layers < 0) {
    return error("resident_layers", *options.resident_layers, "0 or more");
  }
  if (options.prefetch_depth && (*options.prefetch_depth < 0 || *options.prefetch_depth > 64)) {
    return error("prefetch_depth", *options.prefetch_depth, "0 to 64");
  }
  if (!(options.full_timeout >= absl::ZeroDuration())) {
    return error("full_timeout", absl::FormatDuration(options.full_timeout), "0 or more");
  }
  if (!(options.fetch_timeout > absl::ZeroDuration())) {
    return error("fetch_timeout", absl::FormatDuration(options.fetch_timeout), "more than 0");
  }
  if (options.device_memory && *options.device_memory == 0) return error("device_memory", 0, "1 byte or more");
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Cache>> Cache::Create(const CacheOptions& options, TransportProvider provider) {
  KVFERRY_RETURN_IF_ERROR(Validate(options));
  return std::make_unique<CacheImpl>(options, std::move(provider));
}

CacheImpl::CacheImpl(const CacheOptions& options, TransportProvider provider)
    : options_(options), provider_(std::move(provider)) {
  CacheImpl::Reset();
}

CacheImpl::~CacheImpl() = default;

void CacheImpl::AddLayers(int layer) {
  while (layers() <= layer) {
    CacheLayerState& state = layers_.emplace_back(&ledger_);
    state.cut.resize(rows_.size());
    state.refill.resize(rows_.size());
  }
}

absl::Status CacheImpl::CheckUpdate(const at::Tensor& k, const at::Tensor& v, int layer) const {
  const int limit = options_.layers.value_or(kMaxLayers);
  if (layer < 0 || layer >= limit) {
    return absl::InvalidArgumentError(absl::StrCat("layer_idx is ", layer, ", expected 0 to ", limit - 1));
  }
  KVFERRY_RETURN_IF_ERROR(CheckStates(k, v));
  if (!rows_.empty()) KVFERRY_RETURN_IF_ERROR(CheckBatch(k, batch()));
  if (layer >= layers() || !layers_[static_cast<size_t>(layer)].shape.defined()) return absl::OkStatus();
  return CheckLike(k, v, layers_[static_cast<size_t>(layer)].shape, Number(layer));
}

int CacheImpl::Number(int layer) const {
  const auto index = static_cast<size_t>(layer);
  return index < options_.layer_numbers.size() ? options_.layer_numbers[index] : layer;
}

int64_t CacheImpl::SeqLength(int layer) const {
  return layer < 0 || layer >= layers() ? 0 : layers_[static_cast<size_t>(layer)].length;
}

int64_t CacheImpl::MaxLength() const {
  int64_t length = 0;
  for (const CacheLayerState& state : layers_) length = std::max(length, state.length);
  return length;
}

bool CacheImpl::FullBlocksOnDevice(int layer) const {
  const CacheLayerState& state = layers_[static_cast<size_t>(layer)];
  if (state.resident || state.plain) return state.length >= options_.block_tokens;
  return ring_layer_ == layer || tracker_->Holds(layer) ||
         std::any_of(ahead_.begin(), ahead_.end(), [layer](const Ahead& ahead) { return ahead.layer == layer; });
}

CacheStats CacheImpl::Stats() const {
  CacheStats stats;
  const uint64_t in_flight = transport_ != nullptr && transport_->fetch_copies() ? tracker_->bytes_held() : 0;
  stats.device_bytes = ledger_.now() + in_flight;
  stats.blocks_put = tracker_->blocks_put();
  stats.bytes_put = tracker_->bytes_put();
  stats.blocks_got = blocks_got_;
  stats.bytes_got = bytes_got_;
  stats.refused = refused_;
  stats.relearned = relearned_;
  stats.resident_layers = std::min(resident_, layers());
  stats.prefetch_depth = Depth();
  stats.seconds_waited = absl::ToDoubleSeconds(waited_);
  stats.seconds_copying = absl::ToDoubleSeconds(copying_);
  absl::flat_hash_map<const CachedChunk*, bool> seen;
  for (const CacheRow& row : rows_) {
    for (const auto& chunk : row.chunks) {
      if (seen.emplace(chunk.get(), true).second) stats.stored_bytes += chunk->StoredBytes();
    }
  }
  for (int l = 0; l < layers(); ++l) {
    stats.layers_on_device += FullBlocksOnDevice(l) ? 1 : 0;
    const CacheLayerState& state = layers_[static_cast<size_t>(l)];
    stats.plain_layers += state.plain ? 1 : 0;
  }
  stats.device_bytes_peak = std::max(ledger_.peak(), stats.device_bytes);
  return stats;
}

}  // namespace kvferry
