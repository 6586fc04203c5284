// The seam between the store and its disk: all that the disk tier does to the machine goes through a Folder and its
// Files. Tests put a simulated disk here, or one that fails.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "storage/base/bytes.h"

namespace kvferry {

// Offsets, sizes and memory of every read and write are multiples of this, so that they can bypass the page cache.
inline constexpr uint64_t kDiskAlignment = 4096;

using IoDone = absl::AnyInvocable<void(absl::Status)>;
using IoPieces = std::vector<ByteView>;

// One file of a Folder. Thread-safe. Each `done` runs once, on a thread of the folder's and under no lock, never inside
// the call. What is lent to a call stays as it is until then. Statuses name the file, the operation and the system's
// error: RESOURCE_EXHAUSTED where the disk or a quota is full, OUT_OF_RANGE where the file ends, else UNAVAILABLE.
class File {
 public:
  virtual ~File() = default;  // REQUIRES: no operation is in progress. Closes the file.

  // Fills `to`, whole or with an error.
  virtual void Read(uint64_t offset, MutableByteView to, IoDone done) = 0;
  // Writes all pieces, one behind the other. After an error any part of them may have been written.
  virtual void Write(uint64_t offset, IoPieces pieces, IoDone done) = 0;
  // Done when everything written before the call, and the file's size, survive a loss of power.
  virtual void Sync(IoDone done) = 0;

  // These block: call them from Folder::Post, or at start, where nobody waits.
  virtual absl::Status ReadNow(uint64_t offset, MutableByteView to) = 0;
  virtual absl::Status WriteNow(uint64_t offset, ByteView from) = 0;
  virtual absl::Status SyncNow() = 0;
  // Gives the bytes' room back to the file system; they read as zeros then. UNIMPLEMENTED where it has no holes.
  virtual absl::Status Punch(uint64_t offset, uint64_t bytes) = 0;
  virtual absl::Status Truncate(uint64_t bytes) = 0;
  virtual absl::StatusOr<uint64_t> Size() = 0;
  // Of the disk: a file may take less than its size where it has holes, and more where it was given room ahead.
  virtual absl::StatusOr<uint64_t> AllocatedBytes() = 0;
};

// A directory that belongs to one store. Thread-safe. All but Post block.
class Folder {
 public:
  virtual ~Folder() = default;  // REQUIRES: its files are gone. Waits for what was posted.

  // A new file, given room for `bytes` at once so that writing into it does not have to find any. ALREADY_EXISTS if
  // there is one of the name.
  virtual absl::StatusOr<std::unique_ptr<File>> Create(absl::string_view name, uint64_t bytes) = 0;
  // NOT_FOUND if there is none.
  virtual absl::StatusOr<std::unique_ptr<File>> Open(absl::string_view name) = 0;
  // Puts `from` in the place of `to`, whatever that was.
  virtual absl::Status Rename(absl::string_view from, absl::string_view to) = 0;
  virtual absl::Status Remove(absl::string_view name) = 0;
  // The names of its files, in order.
  virtual absl::StatusOr<std::vector<std::string>> List() = 0;
  // Done when what was created, renamed and removed survives a loss of power.
  virtual absl::Status Sync() = 0;
  // Bytes that the volume has left for us.
  virtual absl::StatusOr<uint64_t> FreeBytes() = 0;

  // How transfers reach the disk, for logs and metrics: "io_uring" or "threads"; and past the page cache or not.
  virtual absl::string_view io() const = 0;
  virtual bool direct() const = 0;

  // Runs `task`, which may block, on a thread of the folder's. In no order.
  virtual void Post(absl::AnyInvocable<void()> task) = 0;
};

}  // namespace kvferry
