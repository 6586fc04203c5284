#include "client/cli/arguments.h"

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/grpc_connection.h"
#include "storage/base/status.h"

namespace kvferry::cli {
namespace {

constexpr char kDefaultServer[] = "grpc://127.0.0.1:7400";  // where kvferryd listens if nothing else is said

absl::Status SetFlag(absl::string_view name, absl::string_view value, Arguments* arguments) {
  const auto wrong = [&](absl::string_view expected) {
    return absl::InvalidArgumentError(absl::StrCat(name, "=", value, ": expected ", expected));
  };
  if (name == "--server") {
    arguments->server = std::string(value);
  } else if (name == "--timeout") {
    if (!absl::ParseDuration(value, &arguments->timeout) || arguments->timeout <= absl::ZeroDuration()) {
      return wrong("a time, as 500ms or 5s");
    }
  } else if (name == "--limit") {
    if (!absl::SimpleAtoi(value, &arguments->limit) || arguments->limit == 0) return wrong("a number of chunks from 1");
  } else {
    return absl::InvalidArgumentError(absl::StrCat("unknown flag \"", name, "\"; --help lists the flags"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Arguments> ParseArguments(absl::Span<const std::string> args, const std::string& environment_url) {
  Arguments arguments;
  arguments.server = environment_url.empty() ? kDefaultServer : environment_url;
  bool commanded = false;
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string& arg = args[i];
    if (arg == "--help" || arg == "-h" || arg == "--version") {
      arguments.command = arg == "--version" ? Arguments::Command::kVersion : Arguments::Command::kHelp;
      return arguments;
    }
    if (arg == "--json") {
      arguments.json = true;
    } else if (absl::StartsWith(arg, "--")) {
      const size_t equals = arg.find('=');
      if (equals == std::string::npos && i + 1 == args.size()) {
        return absl::InvalidArgumentError(absl::StrCat(arg, " has no value; write ", arg, "=VALUE"));
      }
      const std::string value = equals == std::string::npos ? args[++i] : arg.substr(equals + 1);
      KVFERRY_RETURN_IF_ERROR(SetFlag(arg.substr(0, equals), value, &arguments));
    } else if (!commanded && (arg == "stats" || arg == "ls")) {
      arguments.command = arg == "stats" ? Arguments::Command::kStats : Arguments::Command::kList;
      commanded = true;
    } else {
      return absl::InvalidArgumentError(absl::StrCat("unknown command \"", arg, "\", expected one of stats, ls"));
    }
  }
  if (!commanded) return absl::InvalidArgumentError("no command, expected one of stats, ls; --help tells more");
  KVFERRY_RETURN_IF_ERROR(DialTarget(arguments.server).status());
  return arguments;
}

std::string HelpText() {
  return "kvferryctl looks into a running kvferryd.\n"
         "\n"
         "usage: kvferryctl [FLAG]... COMMAND\n"
         "\n"
         "  stats               memory, sessions, and what was put and got since the start\n"
         "  ls [--limit=N]      the chunks it holds\n"
         "\n"
         "  --server=URL        unix:///path or grpc://host:port (default $KVFERRY_URL, else grpc://127.0.0.1:7400)\n"
         "  --timeout=TIME      how long to wait for the answer (default 5s)\n"
         "  --json              for programs\n"
         "  --version, --help\n"
         "\n"
         "exit status: 0 done, 1 the service failed or cannot be reached, 2 wrong arguments\n";
}

}  // namespace kvferry::cli
