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

class TransportContract : public ::testing::TestWithParam<TransportBackend> {};

inline std::string BackendName(const ::testing::TestParamInfo<TransportBackend>& info) { return info.param.name; }

}  // namespace kvferry
