// kvferryd: serves until it is told to stop.

#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/codec.h"
#include "proto/version.h"
#include "service/options.h"
#include "service/server.h"
#include "storage/base/log.h"

namespace kvferry {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;
constexpr int kExitSecondSignal = 3;

// Received slices are large and short-lived: glibc would map, fault in, zero and unmap each of them.
void KeepFreedMemory() {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the largest glibc accepts
  mallopt(M_TRIM_THRESHOLD, 128 << 20);
  mallopt(M_TOP_PAD, 16 << 20);
}

sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return signals;
}

void StopAtOnce(int) { _exit(kExitSecondSignal); }

// From now on a signal does not wait for the drain.
void LetNextSignalStopAtOnce(const sigset_t& signals) {
  struct sigaction action {};
  action.sa_handler = StopAtOnce;
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
  pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
}

void LogDisk(const StoreOptions& options, const StoreStats& stats) {
  if (options.disk_path.empty()) return;
  Log(LogLevel::kInfo,
      absl::StrCat("disk: ", options.disk_path, " through ", stats.disk_io_uring != 0 ? "io_uring" : "threads", ", ",
                   stats.disk_direct != 0 ? "direct" : "buffered", ", bound ", FormatBytes(options.disk_bytes), ", ",
                   stats.chunks_found, " chunks found, ", FormatBytes(stats.bytes_found)));
}

// So that the next start finds all that is published.
void Flush(const ServerOptions& options, Server* server) {
  if (options.store.disk_path.empty()) return;
  const absl::Status status = server->Flush(options.flush_grace);
  const StoreStats stats = server->store()->Stats();
  if (status.ok()) {
    Log(LogLevel::kInfo, absl::StrCat("disk: ", options.store.disk_path, " has all ", stats.chunks_published,
                                      " chunks that are published"));
  } else {
    Log(LogLevel::kWarning,
        absl::StrCat("disk: ", options.store.disk_path, " may lack published chunks after this; of ",
                     stats.chunks_published, " there are ", stats.chunks_dirty, " not written: ", status.message()));
  }
}

int Serve(const ServerOptions& options) {
  KeepFreedMemory();
  const sigset_t signals = StopSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // before there are other threads, which inherit it
  signal(SIGPIPE, SIG_IGN);

  auto server = Server::Start(options);
  if (!server.ok()) {
    fprintf(stderr, "kvferryd: %s\n", std::string(server.status().message()).c_str());
    return kExitFailure;
  }
  const std::string addresses = absl::StrJoin((*server)->Addresses(), ", ");
  Log(LogLevel::kInfo, absl::StrCat("kvferryd ", kVersion, " serves on ", addresses, ", memory ",
                                    FormatBytes(options.store.memory_bytes)));
  LogDisk(options.store, (*server)->store()->Stats());
  printf("kvferryd ready on %s\n", addresses.c_str());
  fflush(stdout);

  int received = 0;
  sigwait(&signals, &received);
  LetNextSignalStopAtOnce(signals);
  Log(LogLevel::kInfo, absl::StrCat("kvferryd drains after ", received == SIGINT ? "SIGINT" : "SIGTERM",
                                    "; another one stops it at once"));
  (*server)->Shutdown(options.drain_grace);
  Flush(options, server->get());
  server->reset();
  Log(LogLevel::kInfo, "kvferryd stopped");
  return 0;
}

int Main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  const auto line = ParseCommandLine(args, DetectMemoryLimit());
  if (!line.ok()) {
    fprintf(stderr, "kvferryd: %s\n", std::string(line.status().message()).c_str());
    return kExitUsage;
  }
  switch (line->action) {
    case CommandLine::Action::kShowHelp:
      fputs(HelpText().c_str(), stdout);
      return 0;
    case CommandLine::Action::kShowVersion:
      printf("kvferryd %s (protocol %u to %u)\n", kVersion, kProtocolVersionMin, kProtocolVersionMax);
      return 0;
    case CommandLine::Action::kServe:
      break;
  }
  return Serve(line->options);
}

}  // namespace
}  // namespace kvferry

int main(int argc, char** argv) { return kvferry::Main(argc, argv); }
