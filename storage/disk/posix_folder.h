// A folder of a file system of this machine.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "storage/disk/file.h"
#include "storage/disk/io_engine.h"

namespace kvferry {

enum class IoKind { kAuto, kUring, kThreads };

struct PosixFolderOptions {
  std::string path;           // made if it is not there; its parent must be
  IoKind io = IoKind::kAuto;  // io_uring where the kernel allows it
  int depth = 16;             // transfers at a time
  bool direct = true;         // past the page cache, where the file system allows it
};

// The system calls that tests put faults into.
struct PosixCalls {
  std::function<int(const char* path, int flags, mode_t mode)> open;
  std::unique_ptr<IoEngine> engine;
};

// Locks the folder: FAILED_PRECONDITION if another process has it. The lock goes with the process, however that ends.
absl::StatusOr<std::unique_ptr<Folder>> OpenPosixFolder(const PosixFolderOptions& options);
// The same with calls of one's own.
absl::StatusOr<std::unique_ptr<Folder>> OpenPosixFolder(const PosixFolderOptions& options, PosixCalls calls);

}  // namespace kvferry
