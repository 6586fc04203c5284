#include "storage/base/memory_limit.h"

#include <fstream>
#include <limits>
#include <sstream>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace kvferry {
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream in(path);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

void TakeLower(const std::string& root, const std::string& path, MemoryLimit* limit) {
  uint64_t bytes;  // "max" and a missing file are no limit
  if (absl::SimpleAtoi(absl::StripAsciiWhitespace(ReadFile(root + path)), &bytes) && bytes < limit->bytes) {
    *limit = {bytes, path};
  }
}

// The group itself and all above it. In a container the path seen may be that of the host, so the mount's own root
// comes last in any case.
void TakeGroups(const std::string& root, const std::string& mount, std::string group, const char* file,
                MemoryLimit* limit) {
  while (!group.empty() && group != "/") {
    TakeLower(root, absl::StrCat(mount, group, "/", file), limit);
    group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
  }
  TakeLower(root, absl::StrCat(mount, "/", file), limit);
}

}  // namespace

MemoryLimit DetectMemoryLimit(const std::string& root) {
  MemoryLimit limit{std::numeric_limits<uint64_t>::max(), "nothing"};
  for (absl::string_view line : absl::StrSplit(ReadFile(root + "/proc/meminfo"), '\n')) {
    uint64_t kib;
    if (absl::ConsumePrefix(&line, "MemTotal:") && absl::ConsumeSuffix(&line, "kB") && absl::SimpleAtoi(line, &kib)) {
      limit = {kib * 1024, "/proc/meminfo"};
    }
  }
  for (absl::string_view line : absl::StrSplit(ReadFile(root + "/proc/self/cgroup"), '\n')) {
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));  // "id:controllers:path"
    if (fields.size() != 3) continue;
    if (fields[1].empty()) {
      TakeGroups(root, "/sys/fs/cgroup", fields[2], "memory.max", &limit);
    } else if (absl::StrContains(absl::StrCat(",", fields[1], ","), ",memory,")) {
      TakeGroups(root, "/sys/fs/cgroup/memory", fields[2], "memory.limit_in_bytes", &limit);
    }
  }
  return limit;
}

}  // namespace kvferry
