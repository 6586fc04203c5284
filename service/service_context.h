// What every call of the service works with.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/time/time.h"
#include "service/client_sessions.h"
#include "service/live_streams.h"
#include "service/service_stats.h"
#include "storage/store.h"

namespace kvferry {

// Callers are not told apart yet: all belong to this tenant.
inline constexpr char kDefaultTenant[] = "default";

// Constant after the server has started, apart from what is thread-safe by itself.
struct ServiceContext {
  Store* store = nullptr;
  ClientSessions* sessions = nullptr;
  LiveStreams* streams = nullptr;
  ServiceStats* stats = nullptr;
  uint64_t boot = 0;  // random: tells one start of the service from the next
  absl::Duration heartbeat;
  absl::Time started;
  std::atomic<bool> draining{false};
};

}  // namespace kvferry
