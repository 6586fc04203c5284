#include <malloc.h>

#include <algorithm>
#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/grpc_transport.h"
#include "client/local_transport.h"
#include "client/transport.h"
#include "storage/base/memory_limit.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

constexpr uint64_t kDefaultMemory = 2 * kGiB;

// glibc gives large buffers back to the system at once and faults them in anew for the next message. Keeping them is
// worth up to 1.3x on a socket, but this is the model's process: only if asked.
void TuneMallocIfAsked() {
  const char* asked = std::getenv("KVFERRY_TUNE_MALLOC");
  if (asked == nullptr || std::string(asked) != "1") return;
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
  mallopt(M_TOP_PAD, 64 << 20);
}

absl::Status Validate(const ConnectOptions& options) {
  if (options.connect_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("connect_timeout is ", absl::FormatDuration(options.connect_timeout), "; expected more than 0"));
  }
  if (options.heartbeat <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("heartbeat is ", absl::FormatDuration(options.heartbeat), "; expected more than 0"));
  }
  if (!options.disk_path.empty() && !options.disk_bytes.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("disk is \"", options.disk_path, "\" and disk_bytes is not given; expected a bound with it"));
  }
  if (options.disk_path.empty() && options.disk_bytes.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("disk_bytes is ", *options.disk_bytes, " and disk is not given; expected a folder with it"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<Transport>> Connect(const std::string& url, const ConnectOptions& options) {
  KVFERRY_RETURN_IF_ERROR(Validate(options));
  if (url != "embedded://") {
    if (!absl::StartsWith(url, "unix://") && !absl::StartsWith(url, "grpc://")) {
      return absl::InvalidArgumentError(
          absl::StrCat("store URL is \"", url, "\"; expected embedded://, unix:///absolute/path or grpc://host:port"));
    }
    TuneMallocIfAsked();
    return NewGrpcTransport(url, options);
  }
  const MemoryLimit limit = DetectMemoryLimit();
  if (options.memory_bytes > limit.bytes) {
    return absl::InvalidArgumentError(absl::StrCat("memory is ", *options.memory_bytes,
                                                   " bytes; expected no more than ", limit.bytes,
                                                   ", which this machine or container has (", limit.source, ")"));
  }
  StoreOptions store_options;
  store_options.memory_bytes = options.memory_bytes.value_or(std::min(kDefaultMemory, limit.bytes / 10 * 8));
  store_options.disk_path = options.disk_path;
  store_options.disk_bytes = options.disk_bytes.value_or(0);
  KVFERRY_ASSIGN_OR_RETURN(std::shared_ptr<EmbeddedStore> store, EmbeddedStore::Open(store_options));
  return NewLocalTransport(std::move(store));
}

}  // namespace kvferry
