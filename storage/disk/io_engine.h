// How reads and writes reach the kernel.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/strings/string_view.h"

namespace kvferry {

// One transfer, which may turn out shorter than asked for.
struct IoRequest {
  enum Kind { kRead, kWrite, kSync };
  Kind kind = kRead;
  int fd = -1;
  uint64_t offset = 0;
  std::vector<iovec> pieces;
  // Bytes transferred, or -errno.
  absl::AnyInvocable<void(int64_t result)> done;
};

// Thread-safe. Callbacks and tasks run on the engine's threads, under no lock.
class IoEngine {
 public:
  virtual ~IoEngine() = default;  // Waits for all that was submitted and posted.

  virtual absl::string_view name() const = 0;  // "io_uring" or "threads"
  virtual void Submit(IoRequest request) = 0;
  // The same on the calling thread, which waits; `done` is not used.
  virtual int64_t Transfer(const IoRequest& request);
  // Runs a task that may block, beside the transfers.
  virtual void Post(absl::AnyInvocable<void()> task) = 0;
};

// preadv and pwritev on `threads` threads: as many transfers at a time.
std::unique_ptr<IoEngine> NewThreadEngine(int threads);

// A ring of `depth` transfers at a time. nullptr, with *why, where the kernel has no io_uring or denies it (containers
// do by default).
std::unique_ptr<IoEngine> NewUringEngine(int depth, std::string* why);

}  // namespace kvferry
