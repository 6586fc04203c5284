#include "service/listen_address.h"

#include <sys/un.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace kvferry {

std::string ListenAddress::ForGrpc() const {
  return unix_path.empty() ? absl::StrCat(host, ":", port) : absl::StrCat("unix:", unix_path);
}

std::string ListenAddress::Url() const {
  return unix_path.empty() ? absl::StrCat("grpc://", host, ":", port) : absl::StrCat("unix://", unix_path);
}

absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view text) {
  ListenAddress address;
  absl::string_view rest = text;
  if (absl::ConsumePrefix(&rest, "unix:")) {
    absl::ConsumePrefix(&rest, "//");
    if (!absl::StartsWith(rest, "/") || absl::EndsWith(rest, "/")) {
      return absl::InvalidArgumentError(absl::StrCat(
          "address \"", text, "\": expected unix:// and an absolute path, as unix:///run/kvferry/kvferry.sock"));
    }
    constexpr size_t kLongest = sizeof(sockaddr_un{}.sun_path) - 1;
    if (rest.size() > kLongest) {
      return absl::InvalidArgumentError(absl::StrCat("address \"", text, "\": the path has ", rest.size(),
                                                     " bytes, a unix socket's may have at most ", kLongest));
    }
    address.unix_path = std::string(rest);
    return address;
  }
  absl::ConsumePrefix(&rest, "grpc://");
  const size_t colon = rest.rfind(':');
  const absl::string_view host = rest.substr(0, colon);
  const bool plain = !absl::StrContains(host, ":") || (absl::StartsWith(host, "[") && absl::EndsWith(host, "]"));
  int port = -1;
  if (colon == absl::string_view::npos || colon == 0 || !plain || absl::StrContains(host, "/") ||
      !absl::SimpleAtoi(rest.substr(colon + 1), &port) || port < 0 || port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat(
        "address \"", text, "\": expected host:port with a port of 0 to 65535, as 127.0.0.1:7400, or unix:///path"));
  }
  address.host = std::string(host);
  address.port = port;
  return address;
}

}  // namespace kvferry
