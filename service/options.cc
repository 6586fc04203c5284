#include "service/options.h"

#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

constexpr char kDefaultListen[] = "127.0.0.1:7400";
constexpr absl::Duration kShortest = absl::Milliseconds(10);
constexpr absl::Duration kLongest = absl::Hours(24 * 365);
constexpr absl::Duration kLongestHeartbeat = absl::Hours(24);  // clients are told milliseconds in 32 bits

struct Unit {
  const char* suffix;
  uint64_t bytes;
};
constexpr Unit kUnits[] = {{"TiB", 1024 * kGiB}, {"GiB", kGiB}, {"MiB", kMiB}, {"KiB", kKiB}};

absl::Status SetListen(absl::string_view value, ServerOptions* options) {
  options->listen.clear();
  for (absl::string_view part : absl::StrSplit(value, ',')) {
    KVFERRY_ASSIGN_OR_RETURN(ListenAddress address, ParseListenAddress(part));
    options->listen.push_back(std::move(address));
  }
  return absl::OkStatus();
}

absl::Status SetMemory(absl::string_view value, const MemoryLimit& limit, ServerOptions* options) {
  if (value == "auto") {
    options->store.memory_bytes = limit.bytes / 10 * 8;
    return absl::OkStatus();
  }
  KVFERRY_ASSIGN_OR_RETURN(options->store.memory_bytes, ParseBytes(value));
  if (options->store.memory_bytes > limit.bytes) {
    return absl::InvalidArgumentError(absl::StrCat("this machine or container has ", FormatBytes(limit.bytes), " (",
                                                   limit.source, "), expected no more than that, or auto"));
  }
  return absl::OkStatus();
}

absl::Status SetDuration(absl::string_view value, absl::Duration least, absl::Duration most, absl::Duration* out) {
  if (!absl::ParseDuration(value, out) || *out < least || *out > most) {
    return absl::InvalidArgumentError(absl::StrCat("expected a time of ", absl::FormatDuration(least), " to ",
                                                   absl::FormatDuration(most), ", as 30s or 10m"));
  }
  return absl::OkStatus();
}

absl::Status SetDisk(absl::string_view value, ServerOptions* options) {
  if (value.empty()) return absl::InvalidArgumentError("expected a folder, as /var/lib/kvferry");
  options->store.disk_path = std::string(value);
  return absl::OkStatus();
}

absl::Status SetDiskKeepFree(absl::string_view value, ServerOptions* options) {
  if (value == "0") {
    options->store.disk_keep_free_bytes = 0;
    return absl::OkStatus();
  }
  KVFERRY_ASSIGN_OR_RETURN(options->store.disk_keep_free_bytes, ParseBytes(value));
  return absl::OkStatus();
}

// The flags that are of use only together.
absl::Status ValidateTogether(const StoreOptions& store) {
  if (!store.disk_path.empty() && store.disk_bytes == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--disk=", store.disk_path, " has no bound, expected --disk-bytes=SIZE with it"));
  }
  if (store.disk_path.empty() && store.disk_bytes != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--disk-bytes=", store.disk_bytes, " has no folder, expected --disk=FOLDER with it"));
  }
  return absl::OkStatus();
}

struct Flag {
  const char* name;
  std::function<absl::Status(absl::string_view value, ServerOptions* options)> set;
};

std::vector<Flag> Flags(const MemoryLimit& limit) {
  return {
      {"--listen", SetListen},
      {"--memory", [&limit](absl::string_view v, ServerOptions* o) { return SetMemory(v, limit, o); }},
      {"--segment",
       [](absl::string_view v, ServerOptions* o) -> absl::Status {
         KVFERRY_ASSIGN_OR_RETURN(o->store.segment_bytes, ParseBytes(v));
         return absl::OkStatus();
       }},
      {"--policy",
       [](absl::string_view v, ServerOptions* o) -> absl::Status {
         KVFERRY_ASSIGN_OR_RETURN(o->store.policy, ParsePolicy(v));
         return absl::OkStatus();
       }},
      {"--disk", SetDisk},
      {"--disk-bytes",
       [](absl::string_view v, ServerOptions* o) -> absl::Status {
         KVFERRY_ASSIGN_OR_RETURN(o->store.disk_bytes, ParseBytes(v));
         return absl::OkStatus();
       }},
      {"--disk-keep-free", SetDiskKeepFree},
      {"--write-policy",
       [](absl::string_view v, ServerOptions* o) -> absl::Status {
         KVFERRY_ASSIGN_OR_RETURN(o->store.write_policy, ParseWritePolicy(v));
         return absl::OkStatus();
       }},
      {"--live-grace",
       [](absl::string_view v, ServerOptions* o) { return SetDuration(v, kShortest, kLongest, &o->store.live_grace); }},
      {"--reservation-grace",
       [](absl::string_view v, ServerOptions* o) {
         return SetDuration(v, kShortest, kLongest, &o->store.reservation_grace);
       }},
      {"--heartbeat", [](absl::string_view v,
                         ServerOptions* o) { return SetDuration(v, kShortest, kLongestHeartbeat, &o->heartbeat); }},
      {"--drain-grace",
       [](absl::string_view v, ServerOptions* o) {
         return SetDuration(v, absl::ZeroDuration(), kLongest, &o->drain_grace);
       }},
      {"--flush-grace",
       [](absl::string_view v, ServerOptions* o) {
         return SetDuration(v, absl::ZeroDuration(), kLongest, &o->flush_grace);
       }},
  };
}

}  // namespace

absl::StatusOr<CommandLine> ParseCommandLine(absl::Span<const std::string> args, const MemoryLimit& limit) {
  CommandLine line;
  KVFERRY_RETURN_IF_ERROR(SetListen(kDefaultListen, &line.options));
  KVFERRY_RETURN_IF_ERROR(SetMemory("auto", limit, &line.options));
  const std::vector<Flag> flags = Flags(limit);
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string& arg = args[i];
    if (arg == "--help" || arg == "-h") {
      line.action = CommandLine::Action::kShowHelp;
      return line;
    }
    if (arg == "--version") {
      line.action = CommandLine::Action::kShowVersion;
      return line;
    }
    const size_t equals = arg.find('=');
    const std::string name = arg.substr(0, equals);
    const Flag* flag = nullptr;
    for (const Flag& known : flags) {
      if (name == known.name) flag = &known;
    }
    if (flag == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("unknown argument \"", arg, "\"; --help lists the flags"));
    }
    std::string value;
    if (equals != std::string::npos) {
      value = arg.substr(equals + 1);
    } else if (i + 1 < args.size()) {
      value = args[++i];
    } else {
      return absl::InvalidArgumentError(absl::StrCat(name, " has no value; write ", name, "=VALUE"));
    }
    if (const absl::Status status = flag->set(value, &line.options); !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(name, "=", value, ": ", std::string(status.message())));
    }
  }
  KVFERRY_RETURN_IF_ERROR(ValidateTogether(line.options.store));
  KVFERRY_RETURN_IF_ERROR(Validate(line.options.store));
  return line;
}

std::string HelpText() {
  return "kvferryd keeps the KV cache of language models in memory and on disk and serves it over gRPC.\n"
         "\n"
         "usage: kvferryd [FLAG=VALUE]...\n"
         "\n"
         "  --listen=ADDRESS,...      where to serve: unix:///path/to.sock, host:port (default 127.0.0.1:7400)\n"
         "  --memory=SIZE             budget of the cache: 4GiB, 512MiB (default auto: 80% of what the machine or\n"
         "                            the container has)\n"
         "  --segment=SIZE            unit in which memory is taken from the system (default 64MiB)\n"
         "  --policy=NAME             which published prefixes go first: lru, s3fifo, lfu (default lru)\n"
         "  --disk=FOLDER             where what memory cannot hold is written, and found again after a restart; no\n"
         "                            other kvferryd may use it (default none)\n"
         "  --disk-bytes=SIZE         bound on what is kept there; needed with --disk\n"
         "  --disk-keep-free=SIZE     left to others on that volume (default 256MiB)\n"
         "  --write-policy=NAME       when what is published is written: write_back, when memory gives it up;\n"
         "                            write_through, at once; on_second_hit, as write_back if it was asked for or\n"
         "                            came again, else it is dropped (default write_back)\n"
         "  --live-grace=TIME         how long the sequences of a lost client are kept (default 10m)\n"
         "  --reservation-grace=TIME  how long its unfinished writes are kept (default 30s)\n"
         "  --heartbeat=TIME          a client silent for three of these is taken to be lost (default 5s)\n"
         "  --drain-grace=TIME        how long calls may go on after SIGTERM (default 2s)\n"
         "  --flush-grace=TIME        how long writing what is published may take after that (default 20s)\n"
         "  --version, --help\n"
         "\n"
         "SIGTERM or SIGINT drains and stops; a second one stops at once.\n";
}

absl::StatusOr<uint64_t> ParseBytes(absl::string_view text) {
  absl::string_view number = text;
  uint64_t unit = 1;
  for (const Unit& known : kUnits) {
    if (absl::ConsumeSuffix(&number, known.suffix)) {
      unit = known.bytes;
      break;
    }
  }
  double value;
  if (number.empty() || !absl::SimpleAtod(number, &value) || !std::isfinite(value) || value <= 0 ||
      value * static_cast<double>(unit) >= static_cast<double>(std::numeric_limits<int64_t>::max())) {
    return absl::InvalidArgumentError("expected a size as 4GiB, 512MiB, 64KiB or a number of bytes");
  }
  return static_cast<uint64_t>(value * static_cast<double>(unit));
}

std::string FormatBytes(uint64_t bytes) {
  for (const Unit& unit : kUnits) {
    if (bytes >= unit.bytes) {
      return absl::StrFormat("%.4g %s", static_cast<double>(bytes) / static_cast<double>(unit.bytes), unit.suffix);
    }
  }
  return absl::StrCat(bytes, " B");
}

}  // namespace kvferry
