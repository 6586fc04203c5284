// An address the service listens on.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvferry {

struct ListenAddress {
  std::string unix_path;  // of a unix socket; empty: TCP
  std::string host;       // as written, "[::1]" with its brackets
  int port = 0;           // 0: any free one

  std::string ForGrpc() const;  // "unix:/run/kvferry/kvferry.sock", "127.0.0.1:7400"
  std::string Url() const;      // as a client dials it: "unix:///run/kvferry/kvferry.sock", "grpc://127.0.0.1:7400"
};

// "unix:///absolute/path" or "host:port", with or without "grpc://". INVALID_ARGUMENT naming what was expected.
absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view text);

}  // namespace kvferry
