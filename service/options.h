// What kvferryd is told on its command line.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "service/listen_address.h"
#include "storage/base/memory_limit.h"
#include "storage/store.h"

namespace kvferry {

struct ServerOptions {
  std::vector<ListenAddress> listen;
  StoreOptions store;
  absl::Duration heartbeat = absl::Seconds(5);
  absl::Duration drain_grace = absl::Seconds(2);  // how long calls under way may go on after a drain began
  // How long writing to disk what is published may take after that. With the drain less than the 30 s after which
  // Kubernetes kills.
  absl::Duration flush_grace = absl::Seconds(20);
};

struct CommandLine {
  enum class Action { kServe, kShowHelp, kShowVersion };
  Action action = Action::kServe;
  ServerOptions options;
};

// `args` without the program's name. INVALID_ARGUMENT names the flag, its value and what was expected.
absl::StatusOr<CommandLine> ParseCommandLine(absl::Span<const std::string> args, const MemoryLimit& limit);

// The text of --help.
std::string HelpText();

// "4GiB", "512MiB", "64KiB", "1073741824". INVALID_ARGUMENT tells the form expected.
absl::StatusOr<uint64_t> ParseBytes(absl::string_view text);
// The reverse, for people: "4 GiB", "1.5 GiB".
std::string FormatBytes(uint64_t bytes);

}  // namespace kvferry
