// One contract for every data plane: include this, link transport_contract.cc and instantiate the suite.
#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>

#include "client/transport.h"
#include "gtest/gtest.h"
#include "tests/support/put_and_get.h"

namespace kvferry {

// A store of its own, and transports to it.
class TransportHost {
 public:
  virtual ~TransportHost() = default;
  // A new transport with a session of its own. Dies with a test failure.
  virtual std::shared_ptr<Transport> Connect() = 0;
};

struct TransportBackend {
  std::string name;
  std::function<std::unique_ptr<TransportHost>(uint64_t memory_bytes)> open;
};

inline void PrintTo(const TransportBackend& backend, std::ostream* out) { *out << backend.name; }

// The same budget as one of memory and disk: what a test puts leaves memory and comes back. Where the budget is there
// to be exhausted the disk adds next to nothing to it.
struct SplitBudget {
  explicit SplitBudget(uint64_t bytes)
      : memory_bytes(bytes >= 64 * kMiB ? bytes / 32 : bytes), disk_bytes(bytes >= 64 * kMiB ? bytes : kMiB) {}
  uint64_t memory_bytes, disk_bytes;
};

class TransportContract : public ::testing::TestWithParam<TransportBackend> {};

inline std::string BackendName(const ::testing::TestParamInfo<TransportBackend>& info) { return info.param.name; }

}  // namespace kvferry
