// The extension module kvferry._core: stores and their transports, without torch. Private: kvferry/store.py is what
// people use.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/interrupt.h"
#include "client/python/bindings.h"
#include "client/transport.h"

namespace py = pybind11;

namespace kvferry {
namespace {

// A transport may have to join its thread, which never takes the GIL: let others have it meanwhile.
void DeleteCapsule(PyObject* capsule) {
  auto* transport = static_cast<std::shared_ptr<Transport>*>(PyCapsule_GetPointer(capsule, kTransportCapsule));
  Py_BEGIN_ALLOW_THREADS;
  delete transport;
  Py_END_ALLOW_THREADS;
}

// A connection to a store. Thread-safe; no call holds the GIL while it waits.
class PyStore {
 public:
  explicit PyStore(std::shared_ptr<Transport> transport) : transport_(std::move(transport)) {}
  PyStore(const PyStore&) = delete;
  PyStore& operator=(const PyStore&) = delete;
  ~PyStore() {
    py::gil_scoped_release free;
    transport_ = nullptr;
  }

  static std::unique_ptr<PyStore> Connect(const std::string& url, std::optional<uint64_t> memory,
                                          const std::string& disk, std::optional<uint64_t> disk_bytes,
                                          std::optional<double> connect_timeout, std::optional<double> heartbeat) {
    ConnectOptions options;
    options.memory_bytes = memory;
    options.disk_path = disk;
    options.disk_bytes = disk_bytes;
    if (connect_timeout.has_value()) options.connect_timeout = Argument(*connect_timeout, "connect_timeout");
    if (heartbeat.has_value()) options.heartbeat = Argument(*heartbeat, "heartbeat");
    absl::StatusOr<std::shared_ptr<Transport>> transport = WithoutGil([&] { return kvferry::Connect(url, options); });
    if (!transport.ok()) Throw(transport.status());
    return std::make_unique<PyStore>(*std::move(transport));
  }

  const std::string& url() const { return transport_->url(); }
  uint64_t epoch() const { return transport_->epoch(); }

  void Close() {
    WithoutGil([&] { transport_->Close(); });
  }

  void Flush(double timeout) {
    const absl::Time deadline = absl::Now() + Argument(timeout, "timeout");
    const absl::Status status = WithoutGil([&] { return transport_->Flush(deadline); });
    if (!status.ok()) Throw(status);
  }

  py::dict Stats() const {
    const TransportStats stats = transport_->Stats();
    py::dict out;
    out["blocks_put"] = stats.blocks_put;
    out["bytes_put"] = stats.bytes_put;
    out["blocks_got"] = stats.blocks_got;
    out["bytes_got"] = stats.bytes_got;
    out["get_misses"] = stats.get_misses;
    out["puts_failed"] = stats.puts_failed;
    out["reconnects"] = stats.reconnects;
    out["checksum_errors"] = stats.checksum_errors;
    out["bytes_in_flight"] = stats.bytes_in_flight;
    return out;
  }

  py::object Capsule() const {
    auto* share = new std::shared_ptr<Transport>(transport_);
    PyObject* capsule = PyCapsule_New(share, kTransportCapsule, &DeleteCapsule);
    if (capsule == nullptr) {
      delete share;
      throw py::error_already_set();
    }
    return py::reinterpret_steal<py::object>(capsule);
  }

 private:
  std::shared_ptr<Transport> transport_;
};

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "Stores and their transports; use kvferry.connect.";
  py::class_<PyStore>(m, "Store")
      .def_property_readonly("url", &PyStore::url)
      .def_property_readonly("epoch", &PyStore::epoch)
      .def("close", &PyStore::Close)
      .def("flush", &PyStore::Flush, py::arg("timeout"))
      .def("stats", &PyStore::Stats)
      .def("_capsule", &PyStore::Capsule);
  m.attr("_interrupts") = py::capsule(reinterpret_cast<void*>(ScopedInterrupt::slot()), kInterruptCapsule);
  m.def("connect", &PyStore::Connect, py::arg("url"), py::kw_only(), py::arg("memory") = py::none(),
        py::arg("disk") = "", py::arg("disk_bytes") = py::none(), py::arg("connect_timeout") = py::none(),
        py::arg("heartbeat") = py::none());
}

}  // namespace kvferry
