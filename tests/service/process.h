// A program run as a user runs it.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "gtest/gtest.h"

extern char** environ;

namespace kvferry {

// Killed when destroyed. Not thread-safe.
class Process {
 public:
  explicit Process(const std::vector<std::string>& command) {
    int out[2], err[2];
    EXPECT_EQ(pipe2(out, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(err, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, err[1], STDERR_FILENO);
    std::vector<char*> argv;
    for (const std::string& argument : command) argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    EXPECT_EQ(posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ), 0) << command[0];
    posix_spawn_file_actions_destroy(&actions);
    close(out[1]);
    close(err[1]);
    out_ = out[0];
    err_ = err[0];
  }
  ~Process() {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
    close(out_);
    close(err_);
  }

  void Signal(int signal) const { kill(pid_, signal); }

  // The next line of its output, or what there was of it after a minute.
  std::string ReadLine() const {
    std::string line;
    char c;
    while (line.empty() || line.back() != '\n') {
      pollfd waiting{out_, POLLIN, 0};
      if (poll(&waiting, 1, 60'000) <= 0 || read(out_, &c, 1) != 1) break;
      line += c;
    }
    return line;
  }

  // Waits for its end: the exit status, or minus the signal.
  int Wait() {
    Drain(out_, &out);
    Drain(err_, &err);
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  std::string out, err;  // after Wait

 private:
  static void Drain(int fd, std::string* text) {
    char buffer[4096];
    ssize_t n;
    while ((n = read(fd, buffer, sizeof(buffer))) > 0) text->append(buffer, n);
  }

  pid_t pid_ = -1;
  int out_ = -1, err_ = -1;
};

}  // namespace kvferry
