// kvferryd as an object: a store, its gRPC services and the sockets they are served on.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "service/options.h"
#include "service/service_stats.h"
#include "storage/store.h"

namespace kvferry {

// Serves from Start until Shutdown. Thread-safe, apart from Shutdown, which one thread calls.
class Server {
 public:
  // Errors name the address, or the option as Validate does.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options);
  ~Server();  // as Shutdown(), without grace

  // As clients dial them, with the ports that were chosen where 0 was asked.
  const std::vector<std::string>& Addresses() const;

  // No new sessions and reservations from now on; clients are told.
  void Drain();
  // Drain, let calls under way go on for `grace`, end the rest with UNAVAILABLE, stop. Returns when no call is left.
  void Shutdown(absl::Duration grace);
  // Writes to disk what is published, so that the next start finds it. DEADLINE_EXCEEDED: it takes longer than `grace`.
  absl::Status Flush(absl::Duration grace);

  Store* store();
  const ServiceStats& stats() const;

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry
