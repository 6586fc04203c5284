// The right to listen on the path of a unix socket.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace kvferry {

// Held through a lock file beside the socket, so two services never fight over one path and a file that a killed one
// left behind is told from a live one's. Destroying it removes both files. Not thread-safe.
class UnixSocketClaim {
 public:
  // Removes a stale socket file. ALREADY_EXISTS if somebody answers on the path or holds it; FAILED_PRECONDITION if
  // something else than a socket lies there or its folder cannot be written.
  static absl::StatusOr<std::unique_ptr<UnixSocketClaim>> Take(const std::string& path);
  ~UnixSocketClaim();

  UnixSocketClaim(const UnixSocketClaim&) = delete;
  UnixSocketClaim& operator=(const UnixSocketClaim&) = delete;

 private:
  UnixSocketClaim(std::string path, int lock) : path_(std::move(path)), lock_(lock) {}

  const std::string path_;
  const int lock_;  // descriptor of the lock file
};

}  // namespace kvferry
