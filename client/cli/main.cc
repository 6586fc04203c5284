// kvferryctl: asks a running kvferryd and prints its answers.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cli/arguments.h"
#include "client/cli/render.h"
#include "client/grpc_connection.h"
#include "kvferry/v1/admin.grpc.pb.h"
#include "proto/codec.h"
#include "proto/version.h"

namespace kvferry::cli {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;

std::unique_ptr<v1::CacheAdmin::Stub> Admin(const Arguments& arguments) {
  return v1::CacheAdmin::NewStub(Dial(*DialTarget(arguments.server)));
}

void SetDeadline(const Arguments& arguments, grpc::ClientContext* context) {
  context->set_deadline(absl::ToChronoTime(absl::Now() + arguments.timeout));
}

absl::StatusOr<std::string> Stats(const Arguments& arguments, v1::CacheAdmin::Stub* stub) {
  grpc::ClientContext context;
  SetDeadline(arguments, &context);
  v1::StatsReply reply;
  if (grpc::Status s = stub->Stats(&context, v1::StatsRequest(), &reply); !s.ok()) return FromGrpc(s);
  return arguments.json ? StatsJson(reply) : StatsTable(arguments.server, reply);
}

absl::StatusOr<std::string> List(const Arguments& arguments, v1::CacheAdmin::Stub* stub) {
  grpc::ClientContext context;
  SetDeadline(arguments, &context);
  v1::ListRequest request;
  request.set_limit(arguments.limit);
  const auto reader = stub->List(&context, request);
  v1::ListReply all, part;
  while (reader->Read(&part)) all.MergeFrom(part);
  if (grpc::Status s = reader->Finish(); !s.ok()) return FromGrpc(s);
  return arguments.json ? ChunkJson(all) : ChunkTable(all);
}

std::string WhatToDo(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
      if (absl::StrContains(status.message(), "Permission denied")) {
        return "the socket is another user's; run as the one who started kvferryd, or start it under another umask";
      }
      return "is kvferryd running there? Start it, or name another one with --server=URL or KVFERRY_URL";
    case absl::StatusCode::kDeadlineExceeded:
      return "nothing answered in time; check the address, or wait longer with --timeout=TIME";
    case absl::StatusCode::kUnimplemented:
      return "another service answers there; name kvferryd's address with --server=URL or KVFERRY_URL";
    default:
      return "see kvferryd's log";
  }
}

int Main(int argc, char** argv) {
  const char* url = std::getenv("KVFERRY_URL");
  const auto arguments = ParseArguments(std::vector<std::string>(argv + 1, argv + argc), url == nullptr ? "" : url);
  if (!arguments.ok()) {
    fprintf(stderr, "kvferryctl: %s\n", std::string(arguments.status().message()).c_str());
    return kExitUsage;
  }
  absl::StatusOr<std::string> text;
  switch (arguments->command) {
    case Arguments::Command::kHelp:
      text = HelpText();
      break;
    case Arguments::Command::kVersion:
      text = absl::StrCat("kvferryctl ", kVersion, "\n");
      break;
    case Arguments::Command::kStats:
      text = Stats(*arguments, Admin(*arguments).get());
      break;
    case Arguments::Command::kList:
      text = List(*arguments, Admin(*arguments).get());
      break;
  }
  if (!text.ok()) {
    fprintf(stderr, "kvferryctl: %s: %s (%s)\n%s\n", arguments->server.c_str(),
            std::string(text.status().message()).c_str(), absl::StatusCodeToString(text.status().code()).c_str(),
            WhatToDo(text.status()).c_str());
    return kExitFailure;
  }
  fputs(text->c_str(), stdout);
  return 0;
}

}  // namespace
}  // namespace kvferry::cli

int main(int argc, char** argv) { return kvferry::cli::Main(argc, argv); }
