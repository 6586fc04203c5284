#include <algorithm>
#include <utility>

#include "ATen/DeviceAccelerator.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cache/cache_impl.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

// How long a store may take to answer, beside what it may wait for room; less where nothing depends on the answer.
constexpr absl::Duration kAnswer = absl::Seconds(5);
constexpr absl::Duration kOptionalAnswer = absl::Seconds(1);

// Bytes that a cache may take of an accelerator's memory if it was given no bound: what is free, less a tenth. 0: no
// bound.
uint64_t FreeMemory(const at::Device& device) {
  if (device.is_cpu()) return 0;
  const size_t free = at::accelerator::getMemoryInfo(device.index()).first;
  return free - free / 10;
}

std::string DtypeName(c10::ScalarType type) {
  switch (type) {
    case c10::kFloat:
      return "float32";
    case c10::kDouble:
      return "float64";
    case c10::kHalf:
      return "float16";
    case c10::kBFloat16:
      return "bfloat16";
    default:
      return c10::toString(type);
  }
}

// Layers of one dtype are described by it. Of several, by a list with the number of layers that follow one another
// alike ("float32*2,float32+float16*30": K of one and V of another); then the element is a byte and dim counts bytes.
void DescribeDtypes(const std::vector<KeysValues>& layers, NamespaceSpec& spec) {
  std::vector<std::pair<std::string, int>> runs;
  bool one = true;
  for (const KeysValues& shape : layers) {
    const auto k = shape.k.scalar_type(), v = shape.v.scalar_type();
    one = one && k == v && k == layers[0].k.scalar_type();
    const std::string name = k == v ? DtypeName(k) : absl::StrCat(DtypeName(k), "+", DtypeName(v));
    if (runs.empty() || runs.back().first != name) runs.emplace_back(name, 0);
    ++runs.back().second;
  }
  spec.dtype = one ? runs[0].first : absl::StrJoin(runs, ",", absl::PairFormatter("*"));
  spec.dtype_bytes = one ? static_cast<uint32_t>(layers[0].k.element_size()) : 1;
}

PartSpec DescribePart(const at::Tensor& t, uint32_t dtype_bytes) {
  return {static_cast<uint32_t>(t.size(1)), static_cast<uint32_t>(t.size(3) * t.element_size() / dtype_bytes)};
}

}  // namespace

absl::Time CacheImpl::AnswerBy() const { return absl::Now() + options_.full_timeout + kAnswer; }

const KeysValues& CacheImpl::ShapeOf(int layer) const {
  const CacheLayerState& state = layers_[static_cast<size_t>(layer)];
  if (state.shape.defined()) return state.shape;
  for (const CacheLayerState& other : layers_) {
    if (other.shape.defined()) return other.shape;  // assumed, and checked at the layer's first update
  }
  return state.shape;
}

int64_t CacheImpl::TailColumns() const {
  const bool equal =
      std::all_of(rows_.begin(), rows_.end(), [&](const CacheRow& r) { return r.start == rows_[0].start; });
  return options_.block_tokens * (equal ? 1 : 2);
}

// Before the first layer of a forward pass grows to `columns`: decides how many layers stay, makes room for what must
// leave, and moves it. Fails with nothing changed but the layers that were already moved.
absl::Status CacheImpl::Plan(int64_t columns, int64_t batch) {
  if (!learnt_) {  // everything stays until the layers are known
    planned_ = std::max(planned_, columns);
    return absl::OkStatus();
  }
  KVFERRY_RETURN_IF_ERROR(CheckEpoch());
  KVFERRY_ASSIGN_OR_RETURN(const int resident, ResidentLayersFor(columns, batch));
  const bool must_leave = resident < layers();
  if (must_leave || ferrying_ || options_.resident_layers) {
    absl::Status status = Connect(columns, must_leave);
    if (status.ok()) status = OpenNamespace();
    if (status.ok()) status = ReserveEntries(columns, must_leave);
    if (status.ok() && transport_->epoch() != epoch_) {  // only now has it found a store that was restarted
      KVFERRY_RETURN_IF_ERROR(CheckEpoch());
      status = ReserveEntries(columns, must_leave);
    }
    if (!status.ok() && must_leave && options_.on_full == OnFull::kRaise) return status;
    ferrying_ = status.ok() || namespace_.has_value();
    for (int l = layers() - 1; ferrying_ && l >= resident; --l) KVFERRY_RETURN_IF_ERROR(Demote(l));
  }
  resident_ = std::min(resident_, resident);
  planned_ = std::max(planned_, columns);
  const bool ring_in_use = std::any_of(layers_.begin(), layers_.end(), [](const CacheLayerState& state) {
    return !state.resident && !state.plain && !state.turns_plain;
  });
  if (!ring_in_use) ring_.Clear();  // the last layer that took turns became plain
  return absl::OkStatus();
}

absl::StatusOr<int> CacheImpl::ResidentLayersFor(int64_t columns, int64_t batch) {
  const int limit = std::min({resident_, layers(), options_.resident_layers.value_or(layers())});
  if (!bound_ && !options_.device_memory) bound_ = FreeMemory(ShapeOf(0).k.device());
  const uint64_t bound = options_.device_memory.value_or(bound_.value_or(0));
  if (bound == 0) return limit;
  BudgetInput input;
  for (int l = 0; l < layers(); ++l) {
    const KeysValues& shape = ShapeOf(l);
    input.column_bytes.push_back(static_cast<uint64_t>(shape.k.size(1) * shape.k.size(3) * shape.k.element_size() +
                                                       shape.v.size(1) * shape.v.size(3) * shape.v.element_size()));
    const CacheLayerState& state = layers_[static_cast<size_t>(l)];
    input.plain.push_back(state.plain || state.turns_plain);
    // Memory beyond what is planned for: of buffers that a crop left long, of views that keep more than they show.
    const uint64_t planned = input.column_bytes.back() * static_cast<uint64_t>(batch) *
                             static_cast<uint64_t>(state.plain ? columns : GrownCapacity(columns));
    const uint64_t held = state.plain ? StorageBytes(state.whole) : state.buffer.bytes();
    if (held > planned) input.aside += held - planned;
  }
  input.aside += aside_;
  input.batch = batch;
  input.columns = columns;
  input.tail_columns = TailColumns();
  const bool all_stay = limit == layers() && DeviceBytesNeeded(input, limit) <= bound;
  if (all_stay && !ferrying_ && !options_.resident_layers) return limit;
  if (absl::Status status = Connect(columns, !all_stay); !status.ok()) {
    if (all_stay) return limit;  // nothing will be put
    return status;
  }
  input.in_flight = transport_->fetch_copies() ? Depth() + 1 : 0;
  // Blocks whose put failed are held by this process for good.
  const uint64_t held = transport_->fetch_copies() ? std::min(tracker_->bytes_failed(), bound) : 0;
  const int resident = LayersWithin(input, limit, bound - held);
  if (resident >= 0) return resident;
  return absl::ResourceExhaustedError(
      absl::StrCat("device_memory is ", bound, " bytes, expected at least ", DeviceBytesNeeded(input, 0), " for ",
                   columns, " tokens of ", batch,
                   " rows with no layer resident; nothing was allocated: raise device_memory or shorten the sequence"));
}

absl::Status CacheImpl::MakeRoom(int64_t columns, uint64_t aside) {
  KVFERRY_RETURN_IF_ERROR(CheckWhole());
  const uint64_t before = std::exchange(aside_, aside);
  absl::Status status;
  if (rows_.empty()) {  // nothing is known of this cache's own needs
    const uint64_t bound = options_.device_memory.value_or(0);
    if (bound != 0 && aside > bound) {
      status = absl::ResourceExhaustedError(
          absl::StrCat("device_memory is ", bound, " bytes, expected at least ", aside,
                       " for windows and states alone; nothing was allocated: raise device_memory or shorten the "
                       "sequence"));
    }
  } else if (columns > planned_ || aside > before) {
    status = Guarded(0, [&] { return Plan(std::max(columns, planned_), batch()); });
  }
  if (!status.ok()) {
    aside_ = before;
    return status;
  }
  if (aside > before) {
    ledger_.Add(aside - before);
  } else {
    ledger_.Remove(before - aside);
  }
  return absl::OkStatus();
}

// Where nothing has to leave, a store that could not be reached is asked for again with the next block only.
absl::Status CacheImpl::Connect(int64_t columns, bool must) {
  if (transport_ != nullptr) return absl::OkStatus();
  if (!must && columns < connect_again_at_) return absl::UnavailableError("no store could be reached");
  connect_again_at_ = columns + options_.block_tokens;
  KVFERRY_ASSIGN_OR_RETURN(transport_, provider_());
  epoch_ = transport_->epoch();
  return absl::OkStatus();
}

// A store that was restarted has none of our chunks. Where the device still holds everything, all is put anew.
absl::Status CacheImpl::CheckEpoch() {
  if (transport_ == nullptr || transport_->epoch() == epoch_) return absl::OkStatus();
  const bool all_here = std::all_of(layers_.begin(), layers_.end(), [](const CacheLayerState& state) {
    return state.resident || state.plain || state.length == 0;
  });
  bool nothing_there = std::all_of(rows_.begin(), rows_.end(), [](const CacheRow& row) { return row.chunks.empty(); });
  for (const CacheLayerState& state : layers_) {
    for (const auto& chunk : state.refill) nothing_there = nothing_there && chunk == nullptr;
  }
  if (!all_here && !nothing_there) return Lost(absl::UnavailableError("its chunks are gone"));
  ForgetTable();
  epoch_ = transport_->epoch();
  return absl::OkStatus();
}

void CacheImpl::ForgetTable() {
  ahead_.clear();
  ++version_;
  refused_entries_ = 0;
  tracker_->StartSequence();
  for (CacheRow& row : rows_) row.chunks.clear();
  for (CacheLayerState& state : layers_) {
    state.cut.assign(rows_.size(), 0);
    state.refill.assign(rows_.size(), nullptr);
  }
}

absl::Status CacheImpl::OpenNamespace() {
  if (namespace_) return absl::OkStatus();
  NamespaceSpec spec;
  spec.model = options_.model;
  spec.block_tokens = static_cast<uint32_t>(options_.block_tokens);
  std::vector<KeysValues> shapes;
  for (int l = 0; l < layers(); ++l) shapes.push_back(ShapeOf(l));
  DescribeDtypes(shapes, spec);
  GroupSpec group;
  for (const KeysValues& shape : shapes) {
    group.layers.push_back({{DescribePart(shape.k, spec.dtype_bytes), DescribePart(shape.v, spec.dtype_bytes)}});
  }
  spec.groups.push_back(std::move(group));
  KVFERRY_ASSIGN_OR_RETURN(namespace_, transport_->OpenNamespace(spec, AnswerBy()));
  return absl::OkStatus();
}

// Takes room for every span of `columns` that has no chunk yet: all of them or, where blocks may stay, as many as there
// is room for, oldest first.
absl::Status CacheImpl::ReserveEntries(int64_t columns, bool must_leave) {
  std::vector<int64_t> missing;  // a row for each entry wanted, oldest entries first
  for (int64_t i = 0, more = 1; more != 0; ++i) {
    more = 0;
    for (size_t r = 0; r < rows_.size(); ++r) {
      if (rows_[r].start + (i + 1) * options_.block_tokens > columns) continue;
      ++more;
      if (i >= static_cast<int64_t>(rows_[r].chunks.size())) missing.push_back(static_cast<int64_t>(r));
    }
  }
  const bool wait = must_leave && options_.on_full == OnFull::kRaise;
  if (missing.empty() || (!wait && missing.size() == refused_entries_)) return absl::OkStatus();
  const size_t asked = missing.size();
  absl::Status status = ReserveSome(missing, wait);
  while (!wait && absl::IsResourceExhausted(status) && missing.size() > 1) {
    missing.resize(missing.size() / 2);
    status = ReserveSome(missing, wait);
  }
  const size_t refused = asked - (status.ok() ? missing.size() : 0);
  if (refused > refused_entries_) refused_ += refused - refused_entries_;
  refused_entries_ = refused;
  return absl::IsResourceExhausted(status) && !wait ? absl::OkStatus() : status;
}

// Reserves an entry for each of `rows`, in their order; where that takes several calls, what the first ones brought
// stays when a later one fails.
absl::Status CacheImpl::ReserveSome(const std::vector<int64_t>& rows, bool wait) {
  const ScopedTimer timer(&waited_);
  const absl::Time deadline = wait ? AnswerBy() : absl::Now() + kOptionalAnswer;
  for (size_t from = 0; from < rows.size();) {
    ReserveRequest request;
    request.ns = *namespace_;
    request.count = static_cast<int>(std::min<size_t>(rows.size() - from, kMaxChunksInCall));
    request.wait = wait ? options_.full_timeout : absl::ZeroDuration();
    const uint64_t epoch = transport_->epoch();
    KVFERRY_ASSIGN_OR_RETURN(auto writers, transport_->Reserve(request, deadline));
    if (transport_->epoch() != epoch) continue;  // the store was restarted meanwhile: whose they are is not known
    if (std::all_of(rows_.begin(), rows_.end(), [](const CacheRow& row) { return row.chunks.empty(); })) epoch_ = epoch;
    for (std::unique_ptr<ChunkWriter>& writer : writers) {
      rows_[static_cast<size_t>(rows[from++])].chunks.push_back(
          std::make_shared<CachedChunk>(transport_, epoch, std::move(writer), layers()));
    }
  }
  return absl::OkStatus();
}

// Keeps the blocks that are on the device for the wire within depth + 1 layers: the model waits for the store here, and
// only if the store is slower.
absl::Status CacheImpl::AwaitRoom(int layer, absl::Time deadline) {
  if (!ferrying_) return absl::OkStatus();
  const ScopedTimer timer(&waited_);
  int ahead = 0;
  for (const Ahead& a : ahead_) ahead += a.layer != layer ? 1 : 0;
  const absl::Status status = tracker_->WaitForLayers(std::max(0, Depth() - ahead), layer, deadline);
  DiscardAcknowledged();
  return status.ok() ? status : Lost(status);
}

// The same without waiting, for layers that stay: nothing depends on when they are put, so the model never waits.
bool CacheImpl::HasRoom(int layer) {
  DiscardAcknowledged();
  return !transport_->fetch_copies() || tracker_->HeldLayers(layer) <= Depth();
}

// Lets the transport free the blocks that the store now holds. On the cache's thread: it may be reading them.
void CacheImpl::DiscardAcknowledged() {
  for (const auto& [weak, layer] : tracker_->TakeAcknowledged()) {
    if (const std::shared_ptr<CachedChunk> chunk = weak.lock(); chunk != nullptr) chunk->Stored(layer);
  }
}

int64_t CacheImpl::CompleteEntries(const CacheLayerState& state, size_t row) const {
  return std::max<int64_t>(0, (state.length - rows_[row].start) / options_.block_tokens);
}

bool CacheImpl::HasEntriesToPut(const CacheLayerState& state) const {
  for (size_t r = 0; r < rows_.size(); ++r) {
    const auto places = static_cast<int64_t>(rows_[r].chunks.size());
    if (state.cut[r] < std::min(places, CompleteEntries(state, r))) return true;
  }
  return false;
}

void CacheImpl::PutEntries(CacheLayerState& state, const KeysValues& from, int64_t base, int layer) {
  const ScopedTimer timer(&copying_);
  const int64_t t = options_.block_tokens;
  std::vector<PackJob> jobs;
  std::vector<CachedChunk*> chunks;
  for (size_t r = 0; r < rows_.size(); ++r) {
    const CacheRow& row = rows_[r];
    const int64_t end = std::min(static_cast<int64_t>(row.chunks.size()), CompleteEntries(state, r));
    for (int64_t& i = state.cut[r]; i < end && row.start + i * t >= base; ++i) {
      CachedChunk* chunk = row.chunks[static_cast<size_t>(i)].get();
      if (!chunk->Claim(layer)) break;  // another row's tokens lie there: this row keeps its own on the device
      chunks.push_back(chunk);
      jobs.push_back({static_cast<int64_t>(r), row.start + i * t - base, chunk->Layer(layer), 0});
    }
  }
  if (jobs.empty()) return;
  PackBlocks(from, t, jobs);
  for (size_t j = 0; j < jobs.size(); ++j) chunks[j]->Commit(layer, jobs[j].sum, tracker_);
  if (transport_->fetch_copies()) ledger_.Observe(tracker_->bytes_held());
}

// The layer's full blocks go to the store, its tail stays. Free where they have been put already. A layer whose blocks
// found no room stays.
absl::Status CacheImpl::Demote(int layer) {
  CacheLayerState& state = layers_[static_cast<size_t>(layer)];
  if (!state.resident || state.plain) return absl::OkStatus();
  if (state.length > 0) {
    KVFERRY_RETURN_IF_ERROR(AwaitRoom(layer, AnswerBy()));
    const KeysValues full = state.buffer.View();
    PutEntries(state, full, 0, layer);
    for (size_t r = 0; r < rows_.size(); ++r) {
      if (state.cut[r] >= CompleteEntries(state, r)) continue;
      if (options_.on_full == OnFull::kDevice) return absl::OkStatus();
      return absl::ResourceExhaustedError(absl::StrCat("layer ", Number(layer), " cannot leave the device: block ",
                                                       state.cut[r], " of row ", r, " has no place in the store"));
    }
    GrowBuffer held = std::exchange(state.buffer, GrowBuffer(&ledger_));
    state.resident = false;
    KeepTail(state, full);
  }
  state.resident = false;
  return absl::OkStatus();
}

// The layers are not what the first one promised: what has been put comes back, everything stays, and after this
// forward pass it is planned, and the namespace opened, with the shapes seen.
absl::Status CacheImpl::Relearn(int layer) {
  for (int l = 0; l < layers(); ++l) {
    CacheLayerState& state = layers_[static_cast<size_t>(l)];
    if (state.resident || state.plain || state.length == 0 || l == layer) continue;
    KVFERRY_ASSIGN_OR_RETURN(const KeysValues all, Assemble(l, 0, nullptr));
    state.buffer.Clear();
    state.buffer.Append(all, 0, state.length, GrownCapacity(state.length));
    state.base = 0;
    state.resident = true;
  }
  for (CacheLayerState& state : layers_) {
    if (state.length == 0) state.resident = true;
  }
  ForgetTable();
  namespace_.reset();
  ferrying_ = false;
  learnt_ = false;
  resident_ = kMaxResident;
  ++relearned_;
  return absl::OkStatus();
}

}  // namespace kvferry
