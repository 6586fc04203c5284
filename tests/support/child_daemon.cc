#include "tests/support/child_daemon.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

extern char** environ;

namespace kvferry {
namespace {

[[noreturn]] void Die(const std::string& what) {
  fprintf(stderr, "kvferryd in a test: %s\n", what.c_str());
  abort();
}

void Signal(pid_t pid, int signal) {
  if (kill(pid, signal) != 0) Die(std::string("cannot be sent a signal: ") + strerror(errno));
}

}  // namespace

ChildDaemon::ChildDaemon(std::vector<std::string> flags) : flags_(std::move(flags)) {
  char folder[] = "/tmp/kvferry-test-XXXXXX";
  if (mkdtemp(folder) == nullptr) Die("no folder for its socket");
  folder_ = folder;
  socket_ = folder_ + "/kvferry.sock";
  Start();
}

ChildDaemon::~ChildDaemon() {
  if (pid_ != 0) Kill();
  unlink(socket_.c_str());
  unlink((socket_ + ".lock").c_str());
  rmdir(folder_.c_str());
}

void ChildDaemon::Start() {
  const std::string tcp = tcp_url_.empty() ? "127.0.0.1:0" : tcp_url_.substr(strlen("grpc://"));
  std::vector<std::string> args = {KVFERRYD, "--listen=" + unix_url() + "," + tcp};
  args.insert(args.end(), flags_.begin(), flags_.end());
  std::vector<char*> argv;
  for (std::string& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);

  int out[2];
  if (pipe2(out, O_CLOEXEC) != 0) Die("no pipe");
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
  const int failed = posix_spawn(&pid_, KVFERRYD, &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(out[1]);
  if (failed != 0) Die(strerror(failed));

  // "kvferryd ready on unix:///..., grpc://127.0.0.1:7400"
  FILE* const stream = fdopen(out[0], "r");
  char line[1024];
  if (fgets(line, sizeof line, stream) == nullptr) Die("ended before it was ready");
  fclose(stream);
  const char* const url = strstr(line, "grpc://");
  if (url == nullptr) Die(std::string("names no TCP address: ") + line);
  tcp_url_.assign(url, strcspn(url, ", \n"));
}

void ChildDaemon::Kill() {
  Signal(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = 0;
}

void ChildDaemon::Terminate() {
  Signal(pid_, SIGTERM);
  waitpid(pid_, nullptr, 0);
  pid_ = 0;
}

void ChildDaemon::Stop() {
  Signal(pid_, SIGSTOP);
  int status = 0;
  if (waitpid(pid_, &status, WUNTRACED) != pid_ || !WIFSTOPPED(status)) Die("did not stop");
}

void ChildDaemon::Continue() { Signal(pid_, SIGCONT); }

}  // namespace kvferry
