// Threads do not survive fork(): what was opened in the parent must not be waited for in the child.
#pragma once

#include <unistd.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace kvferry {

// Remembers the process that made it. Thread-safe.
class ForkGuard {
 public:
  bool forked() const { return getpid() != pid_; }

  // FAILED_PRECONDITION in a forked child.
  absl::Status Check(const std::string& url) const {
    if (!forked()) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat("store ", url, ": opened by process ", pid_,
                                                      " before fork(), used in its child ", getpid(),
                                                      "; connect in the child, or start it with the spawn method"));
  }

 private:
  const pid_t pid_ = getpid();
};

}  // namespace kvferry
