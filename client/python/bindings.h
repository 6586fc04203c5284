// What both extension modules say of errors, times and transports.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/interrupt.h"
#include "client/python/seconds.h"

namespace kvferry {

// Name of the capsule in which one extension module finds a heap std::shared_ptr<Transport> of another.
inline constexpr char kTransportCapsule[] = "kvferry.Transport";

// Name of the capsule in which _torch finds the place of _core's interrupts: each has a copy of the client.
inline constexpr char kInterruptCapsule[] = "kvferry.Interrupt";

// Throws what kvferry.errors makes of a status. A Python exception that is pending, since a callback raised it, is the
// better message and is thrown as it is. REQUIRES: the GIL is held.
[[noreturn]] inline void Throw(const absl::Status& status) {
  namespace py = pybind11;
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  const absl::string_view message = status.message();
  py::object error = py::module_::import("kvferry.errors")
                         .attr("from_status")(static_cast<int>(status.code()), py::str(message.data(), message.size()));
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

// Throws as Throw if `seconds` is no time to wait; `name` is the argument's.
inline absl::Duration Argument(double seconds, absl::string_view name) {
  const absl::StatusOr<absl::Duration> duration = Seconds(seconds, name);
  if (!duration.ok()) Throw(duration.status());
  return *duration;
}

// Python runs signal handlers on its main thread alone.
inline bool OnMainThread() {
  static const auto main =
      pybind11::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
  return PyThread_get_thread_ident() == main;
}

// Runs `call` without the GIL. Python's signal handlers run while it waits, so that Ctrl-C breaks a wait off; what a
// handler raised is thrown once `call` has returned, whatever it returned. REQUIRES: the GIL is held.
template <typename Call>
auto WithoutGil(Call call) {
  namespace py = pybind11;
  std::optional<py::error_already_set> raised;
  const auto run = [&] {
    std::optional<ScopedInterrupt> interrupt;
    if (OnMainThread()) {
      interrupt.emplace([&raised] {
        py::gil_scoped_acquire gil;
        // What a callback has raised already is told first.
        if (PyErr_Occurred() == nullptr && PyErr_CheckSignals() != 0) raised.emplace();
        return raised.has_value();
      });
    }
    py::gil_scoped_release free;
    return call();
  };
  if constexpr (std::is_void_v<decltype(call())>) {
    run();
    if (raised.has_value()) throw std::move(*raised);
  } else {
    std::optional result = run();
    if (raised.has_value()) {
      {
        py::gil_scoped_release free;
        result.reset();  // it may have threads to join
      }
      throw std::move(*raised);
    }
    return *std::move(result);
  }
}

}  // namespace kvferry
