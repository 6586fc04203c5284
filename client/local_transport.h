// A store in this process: `embedded://`. Blocks are views of its memory; nothing is copied or sent.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/transport.h"
#include "storage/executor.h"
#include "storage/store.h"

namespace kvferry {

// A store and the thread that drives its timers, shared by the transports on it. Thread-safe.
class EmbeddedStore {
 public:
  static absl::StatusOr<std::shared_ptr<EmbeddedStore>> Open(const StoreOptions& options);

  Store& store() { return *store_; }

 private:
  EmbeddedStore() = default;

  // Destroyed in reverse: the executor outlives the store.
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<Store> store_;
};

// A session of its own on `store`.
absl::StatusOr<std::shared_ptr<Transport>> NewLocalTransport(std::shared_ptr<EmbeddedStore> store);

}  // namespace kvferry
