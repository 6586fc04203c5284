#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "tests/bench/trace.h"

namespace kvferry {
namespace {

constexpr uint64_t kMemoryShare = 10;

}  // namespace

int TraceMain(const std::vector<std::string>& args) {
  if (args.empty() || args[0].substr(0, 1) == "-") {
    std::cerr << "usage: kvferry-bench trace FILE [CHUNKS...]\n";
    return 2;
  }
  std::vector<uint64_t> sizes;
  for (size_t i = 1; i < args.size(); ++i) {
    if (!absl::SimpleAtoi(args[i], &sizes.emplace_back()) || sizes.back() < kMemoryShare) {
      std::cerr << "kvferry-bench trace: CHUNKS is \"" << args[i] << "\", expected a number from " << kMemoryShare
                << " on\n";
      return 2;
    }
  }
  if (sizes.empty()) sizes = {2'000, 8'000, 32'000, 128'000};
  const absl::StatusOr<Trace> trace = ReadTrace(args[0]);
  if (!trace.ok()) {
    std::cerr << "kvferry-bench trace: " << trace.status().message() << "\n";
    return 1;
  }
  const char* between = "[";
  for (const uint64_t size : sizes) {
    for (const PolicyKind policy : kPolicies) {
      for (const WritePolicy write : kWritePolicies) {
        const uint64_t memory = size / kMemoryShare;
        const TraceResult r = Play(*trace, {policy, write, memory, size - memory});
        std::cout << between
                  << absl::StrFormat(
                         R"({"policy": "%s", "write": "%s", "chunks": %d, "hit_ratio": %.4f, "hit_memory": %.4f, )"
                         R"("written_per_served": %.4f})",
                         PolicyName(policy), WritePolicyName(write), size, r.hit_ratio(),
                         static_cast<double>(r.hit_memory) / static_cast<double>(r.asked), r.written_per_served());
        between = ",\n ";
      }
    }
  }
  std::cout << "]\n";
  return 0;
}

}  // namespace kvferry
