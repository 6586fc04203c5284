// What kvferryctl is told on its command line.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace kvferry::cli {

struct Arguments {
  enum class Command { kStats, kList, kHelp, kVersion };
  Command command = Command::kHelp;
  std::string server;  // URL
  absl::Duration timeout = absl::Seconds(5);
  uint32_t limit = 0;  // chunks listed; 0: all
  bool json = false;
};

// `args` without the program's name; `environment_url` is what KVFERRY_URL says, or empty. INVALID_ARGUMENT names the
// argument, its value and what was expected.
absl::StatusOr<Arguments> ParseArguments(absl::Span<const std::string> args, const std::string& environment_url);

std::string HelpText();

}  // namespace kvferry::cli
