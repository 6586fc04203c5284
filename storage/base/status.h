// absl::Status is the only error channel; these two macros pass one on.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define KVFERRY_CONCAT_INNER(a, b) a##b
#define KVFERRY_CONCAT(a, b) KVFERRY_CONCAT_INNER(a, b)

// Returns from the enclosing function if `expr` is not OK.
#define KVFERRY_RETURN_IF_ERROR(expr)                                       \
  do {                                                                      \
    if (absl::Status kvferry_s = (expr); !kvferry_s.ok()) return kvferry_s; \
  } while (false)

// Evaluates a StatusOr; returns its status from the enclosing function or moves its value into `lhs`.
#define KVFERRY_ASSIGN_OR_RETURN(lhs, expr) \
  KVFERRY_ASSIGN_OR_RETURN_IMPL(KVFERRY_CONCAT(kvferry_or_, __LINE__), lhs, expr)
#define KVFERRY_ASSIGN_OR_RETURN_IMPL(tmp, lhs, expr) \
  auto tmp = (expr);                                  \
  if (!tmp.ok()) return std::move(tmp).status();      \
  lhs = *std::move(tmp)
