// A real kvferryd as a child process, to be killed, stopped and started again.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace kvferry {

// Serves on a unix socket and on a TCP port of 127.0.0.1, the same ones after a restart. Any failure to start is fatal
// to the test program. Not thread-safe.
class ChildDaemon {
 public:
  // `flags` beside --listen.
  explicit ChildDaemon(std::vector<std::string> flags);
  ~ChildDaemon();

  std::string unix_url() const { return "unix://" + socket_; }
  const std::string& tcp_url() const { return tcp_url_; }

  void Kill();       // SIGKILL; returns when it is gone
  void Terminate();  // SIGTERM; the same
  void Start();      // after Kill or Terminate; returns when it serves
  void Stop();       // SIGSTOP; returns when it is stopped
  void Continue();   // SIGCONT

 private:
  const std::vector<std::string> flags_;
  std::string folder_, socket_, tcp_url_;
  pid_t pid_ = 0;
};

}  // namespace kvferry
