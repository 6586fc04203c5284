#include "client/cache/cache.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cache/cache_impl.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

constexpr int kMaxLayers = 4096;

std::string ShapeString(const at::Tensor& t) { return absl::StrCat("[", absl::StrJoin(t.sizes(), ", "), "]"); }

std::string Name(c10::ScalarType type) { return c10::toString(type); }

absl::Status CheckTensor(const at::Tensor& t, const char* name) {
  if (!t.defined()) return absl::InvalidArgumentError(absl::StrCat(name, " is undefined, expected a tensor"));
  if (t.dim() != 4) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " has shape ", ShapeString(t), ", expected 4 dimensions: [batch, heads, tokens, dim]"));
  }
  for (int64_t d = 0; d < 4; ++d) {
    if (t.size(d) < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, " has shape ", ShapeString(t), ", expected every dimension to be at least 1"));
    }
  }
  if (t.layout() != c10::kStrided) {
    return absl::InvalidArgumentError(absl::StrCat(name, " is not a dense (strided) tensor"));
  }
  return absl::OkStatus();
}

// `t` against what the layer's first update brought.
absl::Status CheckSame(const at::Tensor& t, const at::Tensor& first, const char* name, int layer) {
  const auto error = [&](absl::string_view what, const auto& value, const auto& expected) {
    return absl::InvalidArgumentError(absl::StrCat(name, " of layer ", layer, " has ", what, " ", value, ", expected ",
                                                   expected, " as in the layer's first update"));
  };
  if (t.scalar_type() != first.scalar_type()) return error("dtype", Name(t.scalar_type()), Name(first.scalar_type()));
  if (t.device() != first.device()) return error("device", t.device().str(), first.device().str());
  if (t.size(1) != first.size(1)) return error("heads", t.size(1), first.size(1));
  if (t.size(3) != first.size(3)) return error("dim", t.size(3), first.size(3));
  return absl::OkStatus();
}

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
  KVFERRY_RETURN_IF_ERROR(CheckTensor(k, "key_states"));
  KVFERRY_RETURN_IF_ERROR(CheckTensor(v, "value_states"));
  for (const int64_t d : {0, 2}) {
    if (k.size(d) != v.size(d)) {
      return absl::InvalidArgumentError(absl::StrCat("value_states has shape ", ShapeString(v), ", expected the same ",
                                                     d == 0 ? "batch" : "tokens", " as key_states, ", ShapeString(k)));
    }
  }
  if (k.device() != v.device()) {
    return absl::InvalidArgumentError(absl::StrCat("value_states is on ", v.device().str(),
                                                   ", expected the device of key_states, ", k.device().str()));
  }
  if (!rows_.empty() && k.size(0) != batch()) {
    return absl::InvalidArgumentError(
        absl::StrCat("key_states has batch ", k.size(0), ", expected ", batch(), " as held by the cache"));
  }
  if (layer < layers() && layers_[static_cast<size_t>(layer)].shape.defined()) {
    return CheckAgainstLayer(k, v, layer);
  }
  return absl::OkStatus();
}

absl::Status CacheImpl::CheckAgainstLayer(const at::Tensor& k, const at::Tensor& v, int layer) const {
  const KeysValues& first = layers_[static_cast<size_t>(layer)].shape;
  KVFERRY_RETURN_IF_ERROR(CheckSame(k, first.k, "key_states", layer));
  return CheckSame(v, first.v, "value_states", layer);
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
    if (!state.plain) continue;
    ++stats.grad_layers;
    stats.device_bytes += static_cast<uint64_t>(state.grad.k.nbytes() + state.grad.v.nbytes());
  }
  stats.device_bytes_peak = std::max(ledger_.peak(), stats.device_bytes);
  return stats;
}

}  // namespace kvferry
