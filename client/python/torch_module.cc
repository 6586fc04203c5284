// The extension module kvferry._torch: the C++ cache on torch tensors. Private: kvferry/cache.py is what people use.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/cache/cache.h"
#include "client/cache/check.h"
#include "client/interrupt.h"
#include "client/python/bindings.h"
#include "client/transport.h"
#include "storage/base/mutex.h"

namespace py = pybind11;

namespace kvferry {
namespace {

// Runs on the thread that called into the cache, which has let go of the GIL. What the callable raises stays pending
// on this thread until Throw.
absl::StatusOr<std::shared_ptr<Transport>> CallProvider(const py::object& provider) {
  py::gil_scoped_acquire gil;
  PyErr_Clear();
  try {
    auto capsule = provider().cast<py::capsule>();
    if (absl::string_view(capsule.name()) != kTransportCapsule) {
      return absl::InvalidArgumentError("store: expected a kvferry store that is open");
    }
    return *capsule.get_pointer<std::shared_ptr<Transport>>();
  } catch (py::error_already_set& error) {
    const std::string what = error.what();
    error.restore();
    return absl::UnavailableError(what);
  } catch (const py::cast_error& error) {
    return absl::InvalidArgumentError(std::string("store: expected a kvferry store: ") + error.what());
  }
}

// The callable may die on any thread, so it takes the GIL to do so.
TransportProvider MakeProvider(py::object provider) {
  auto shared = std::shared_ptr<py::object>(new py::object(std::move(provider)), [](py::object* object) {
    py::gil_scoped_acquire gil;
    delete object;
  });
  return [shared] { return CallProvider(*shared); };
}

at::Tensor Unwrap(const py::handle& object, const char* name) {
  if (!THPVariable_Check(object.ptr())) {
    throw py::type_error(std::string(name) + " is a " + Py_TYPE(object.ptr())->tp_name + ", expected a torch.Tensor");
  }
  return THPVariable_Unpack(object.ptr());
}

// None for an undefined tensor.
py::object Wrap(at::Tensor tensor) {
  if (!tensor.defined()) return py::none();
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
}

// A Cache for Python. Thread-safe: calls of several threads follow one another; none holds the GIL while it waits or
// copies. After a fork the child cannot use it: the threads of its transport have stayed behind.
class PyCache {
  // Runs `call` without the GIL and, so that the two locks cannot wait for each other, takes ours after letting it go.
  template <typename Call>
  auto Locked(Call call) {
    CheckUsable();
    return WithoutGil([&] {
      MutexLock lock(&mu_);
      const Holder holder(&holder_);
      return call(*cache_);
    });
  }

  // What the provider raised (see CallProvider) is not left pending. The cache can do without a store, so that errors
  // of ours are no matter; anything else is, such as what a signal handler raised meanwhile.
  static void Check(const absl::Status& status) {
    if (!status.ok()) Throw(status);
    if (PyErr_Occurred() == nullptr) return;
    py::error_already_set raised;
    if (!raised.matches(py::module_::import("kvferry.errors").attr("Error"))) throw raised;
  }

  // Remembers the thread that holds the lock.
  class Holder {
   public:
    explicit Holder(std::atomic<std::thread::id>* id) : id_(id) { *id_ = std::this_thread::get_id(); }
    ~Holder() { *id_ = std::thread::id(); }
    Holder(const Holder&) = delete;
    Holder& operator=(const Holder&) = delete;

   private:
    std::atomic<std::thread::id>* const id_;
  };

 public:
  explicit PyCache(std::unique_ptr<Cache> cache) : cache_(std::move(cache)) {}

  // Throws if this thread may not use the cache now. Takes no lock.
  void CheckUsable() const {
    if (getpid() != owner_) {
      Throw(absl::FailedPreconditionError("this cache belongs to process " + std::to_string(owner_) +
                                          ", of which this one is a fork; make a new one here"));
    }
    if (holder_ == std::this_thread::get_id()) {
      Throw(absl::FailedPreconditionError("this cache is used by a signal handler that interrupts its own use"));
    }
  }

  PyCache(const PyCache&) = delete;
  PyCache& operator=(const PyCache&) = delete;
  ~PyCache() {
    // The chunks belong to the parent of a forked child: they are not released twice.
    if (getpid() != owner_) {
      static_cast<void>(cache_.release());
      return;
    }
    py::gil_scoped_release free;
    cache_.reset();
  }

  static std::unique_ptr<PyCache> Create(py::object provider, int block_tokens, std::optional<int> layers,
                                         std::vector<int> layer_numbers, std::optional<int> resident_layers,
                                         std::optional<int> prefetch_depth, std::optional<uint64_t> device_memory,
                                         const std::string& on_full, double full_timeout, double fetch_timeout,
                                         std::string model) {
    CacheOptions options;
    options.block_tokens = block_tokens;
    options.layers = layers;
    options.layer_numbers = std::move(layer_numbers);
    options.resident_layers = resident_layers;
    options.prefetch_depth = prefetch_depth;
    options.device_memory = device_memory;
    if (on_full == "device") {
      options.on_full = OnFull::kDevice;
    } else if (on_full != "raise") {
      throw py::value_error("on_full is '" + on_full + "', expected 'raise' or 'device'");
    }
    options.full_timeout = Argument(full_timeout, "full_timeout");
    options.fetch_timeout = Argument(fetch_timeout, "fetch_timeout");
    options.model = std::move(model);
    absl::StatusOr<std::unique_ptr<Cache>> cache = Cache::Create(options, MakeProvider(std::move(provider)));
    if (!cache.ok()) Throw(cache.status());
    return std::make_unique<PyCache>(*std::move(cache));
  }

  py::tuple Update(const py::object& keys, const py::object& values, int layer) {
    const at::Tensor k = Unwrap(keys, "key_states"), v = Unwrap(values, "value_states");
    auto both = Locked([&](Cache& cache) { return cache.Update(k, v, layer); });
    Check(both.status());
    return py::make_tuple(Wrap(std::move(both->first)), Wrap(std::move(both->second)));
  }

  void Assign(const py::object& keys, const py::object& values, int layer) {
    const at::Tensor k = Unwrap(keys, "keys"), v = Unwrap(values, "values");
    Check(Locked([&](Cache& cache) { return cache.Assign(k, v, layer); }));
  }

  void MakeRoom(int64_t columns, uint64_t aside) {
    Check(Locked([&](Cache& cache) { return cache.MakeRoom(columns, aside); }));
  }

  py::tuple Read(int layer) {
    auto both = Locked([&](Cache& cache) { return cache.Read(layer); });
    Check(both.status());
    return py::make_tuple(Wrap(std::move(both->first)), Wrap(std::move(both->second)));
  }

  std::unique_ptr<PyCache> Fork() {
    auto fork = Locked([](Cache& cache) { return cache.Fork(); });
    Check(fork.status());
    return std::make_unique<PyCache>(*std::move(fork));
  }

  // {"url", "ticket", "length", "rows": [(start, [place, ...])], "tails": [(keys, values)]}: see SharedCache.
  py::dict Share(double ttl) {
    const absl::Duration life = Argument(ttl, "ttl");
    auto shared = Locked([&](Cache& cache) { return cache.Share(life); });
    Check(shared.status());
    py::list rows, tails;
    for (SharedCache::Row& row : shared->rows) rows.append(py::make_tuple(row.start, row.chunks));
    for (auto& [k, v] : shared->tails) tails.append(py::make_tuple(Wrap(std::move(k)), Wrap(std::move(v))));
    py::dict out;
    out["url"] = shared->url;
    out["ticket"] = shared->ticket;
    out["length"] = shared->length;
    out["rows"] = rows;
    out["tails"] = tails;
    return out;
  }

  void Adopt(const py::dict& handle) {
    SharedCache shared;
    shared.url = handle["url"].cast<std::string>();
    shared.ticket = handle["ticket"].cast<uint64_t>();
    shared.length = handle["length"].cast<int64_t>();
    for (const py::handle row : handle["rows"]) {
      const auto [start, chunks] = row.cast<std::pair<int64_t, std::vector<int64_t>>>();
      shared.rows.push_back({start, chunks});
    }
    for (const py::handle tail : handle["tails"]) {
      const auto pair = tail.cast<py::tuple>();
      shared.tails.emplace_back(Unwrap(pair[0], "keys of a tail"), Unwrap(pair[1], "values of a tail"));
    }
    Check(Locked([&](Cache& cache) { return cache.Adopt(shared); }));
  }

  void Crop(int64_t tokens) {
    Check(Locked([&](Cache& cache) { return cache.Crop(tokens); }));
  }
  void SelectRows(const std::vector<int64_t>& rows) {
    Check(Locked([&](Cache& cache) { return cache.SelectRows(rows); }));
  }
  void Reset() {
    Locked([](Cache& cache) { cache.Reset(); });
  }
  void Flush(double timeout) {
    const absl::Time deadline = absl::Now() + Argument(timeout, "timeout");
    Check(Locked([&](Cache& cache) { return cache.Flush(deadline); }));
  }
  int64_t SeqLength(int layer) {
    return Locked([&](Cache& cache) { return cache.SeqLength(layer); });
  }
  int layers() {
    return Locked([](Cache& cache) { return cache.layers(); });
  }
  int64_t batch() {
    return Locked([](Cache& cache) { return cache.batch(); });
  }

  py::dict Stats() {
    const CacheStats stats = Locked([](Cache& cache) { return cache.Stats(); });
    py::dict out;
    out["device_bytes"] = stats.device_bytes;
    out["device_bytes_peak"] = stats.device_bytes_peak;
    out["stored_bytes"] = stats.stored_bytes;
    out["blocks_put"] = stats.blocks_put;
    out["bytes_put"] = stats.bytes_put;
    out["blocks_got"] = stats.blocks_got;
    out["bytes_got"] = stats.bytes_got;
    out["refused"] = stats.refused;
    out["plain_layers"] = stats.plain_layers;
    out["relearned"] = stats.relearned;
    out["layers_on_device"] = stats.layers_on_device;
    out["resident_layers"] = stats.resident_layers;
    out["prefetch_depth"] = stats.prefetch_depth;
    out["seconds_waited"] = stats.seconds_waited;
    out["seconds_copying"] = stats.seconds_copying;
    return out;
  }

 private:
  const pid_t owner_ = getpid();
  Mutex mu_;
  std::atomic<std::thread::id> holder_{};  // of mu_
  std::unique_ptr<Cache> cache_ ABSL_PT_GUARDED_BY(mu_);
};

// Whether a layer that is not in a Cache may append these; `first_keys`, `first_values`: of its first update, or None.
void CheckUpdate(const py::object& keys, const py::object& values, const py::object& first_keys,
                 const py::object& first_values, int layer) {
  const at::Tensor k = Unwrap(keys, "key_states"), v = Unwrap(values, "value_states");
  absl::Status status = CheckStates(k, v);
  if (status.ok() && !first_keys.is_none()) {
    const KeysValues first{Unwrap(first_keys, "first_keys"), Unwrap(first_values, "first_values")};
    status = CheckBatch(k, first.k.size(0));
    if (status.ok()) status = CheckLike(k, v, first, layer);
  }
  if (!status.ok()) Throw(status);
}

}  // namespace

PYBIND11_MODULE(_torch, m) {
  m.doc() = "The C++ KV cache on torch tensors; use kvferry.OffloadedCache.";
  const py::object interrupts = py::module_::import("kvferry._core").attr("_interrupts");
  void* const slot = PyCapsule_GetPointer(interrupts.ptr(), kInterruptCapsule);
  if (slot == nullptr) throw py::error_already_set();
  ScopedInterrupt::Share(reinterpret_cast<ScopedInterrupt::Slot*>(slot));
  m.def("check_update", &CheckUpdate);
  py::class_<PyCache>(m, "Cache")
      .def(py::init(&PyCache::Create), py::arg("provider"), py::kw_only(), py::arg("block_tokens"), py::arg("layers"),
           py::arg("layer_numbers"), py::arg("resident_layers"), py::arg("prefetch_depth"), py::arg("device_memory"),
           py::arg("on_full"), py::arg("full_timeout"), py::arg("fetch_timeout"), py::arg("model"))
      .def("check", &PyCache::CheckUsable)
      .def("update", &PyCache::Update)
      .def("assign", &PyCache::Assign)
      .def("make_room", &PyCache::MakeRoom)
      .def("read", &PyCache::Read)
      .def("fork", &PyCache::Fork)
      .def("share", &PyCache::Share)
      .def("adopt", &PyCache::Adopt)
      .def("crop", &PyCache::Crop)
      .def("select_rows", &PyCache::SelectRows)
      .def("reset", &PyCache::Reset)
      .def("flush", &PyCache::Flush, py::arg("timeout"))
      .def("seq_length", &PyCache::SeqLength)
      .def("stats", &PyCache::Stats)
      .def_property_readonly("layers", &PyCache::layers)
      .def_property_readonly("batch", &PyCache::batch);
}

}  // namespace kvferry
