#include "client/cache/check.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "storage/base/status.h"

namespace kvferry {
namespace {

std::string ShapeString(const at::Tensor& t) { return absl::StrCat("[", absl::StrJoin(t.sizes(), ", "), "]"); }

std::string Name(c10::ScalarType type) { return c10::toString(type); }

// Bytes are copied by address, so there must be some: a subclass that keeps tensors of its own (a DTensor, one that
// functorch wraps) and a fake one have none.
bool HasBytes(const at::Tensor& t) {
  constexpr c10::DispatchKeySet kWrapped({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                          c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::BatchedNestedTensor,
                                          c10::DispatchKey::Functionalize, c10::DispatchKey::NestedTensor});
  if (t.key_set().has_any(kWrapped) || !t.has_storage()) return false;
  return t.numel() == 0 || t.storage().data() != nullptr;
}

absl::Status CheckTensor(const at::Tensor& t, const char* name) {
  if (!t.defined()) return absl::InvalidArgumentError(absl::StrCat(name, " is undefined, expected a tensor"));
  if (t.is_meta()) {
    return absl::InvalidArgumentError(absl::StrCat(name, " has device meta, expected cpu or another that has data"));
  }
  if (t.layout() == c10::kStrided && !HasBytes(t)) {
    return absl::InvalidArgumentError(
        absl::StrCat(name,
                     " is a tensor without memory of its own (a wrapper, or a fake), expected a plain one; of a "
                     "DTensor give to_local()"));
  }
  if (t.layout() != c10::kStrided) {
    return absl::InvalidArgumentError(absl::StrCat(name, " is not a dense (strided) tensor"));
  }
  if (t.dim() != 4) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " has shape ", ShapeString(t), ", expected 4 dimensions: [batch, heads, tokens, dim]"));
  }
  for (int64_t d = 0; d < 4; ++d) {
    if (t.size(d) < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, " has shape ", ShapeString(t), ", expected every dimension to be at least 1"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckSame(const at::Tensor& t, const at::Tensor& first, const char* name, int layer) {
  const auto error = [&](absl::string_view what, const auto& value, const auto& expected) {
    return absl::InvalidArgumentError(absl::StrCat(name, " of layer ", layer, " has ", what, " ", value, ", expected ",
                                                   expected, " as in the layer's first update"));
  };
  if (t.scalar_type() != first.scalar_type()) return error("dtype", Name(t.scalar_type()), Name(first.scalar_type()));
  if (t.device() != first.device()) return error("device", t.device().str(), first.device().str());
  if (t.size(1) != first.size(1)) return error("heads", t.size(1), first.size(1));
  if (t.size(3) != first.size(3)) return error("dim", t.size(3), first.size(3));
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckStates(const at::Tensor& k, const at::Tensor& v) {
  KVFERRY_RETURN_IF_ERROR(CheckTensor(k, "key_states"));
  KVFERRY_RETURN_IF_ERROR(CheckTensor(v, "value_states"));
  for (const int64_t d : {0, 2}) {
    if (k.size(d) != v.size(d)) {
      return absl::InvalidArgumentError(absl::StrCat("value_states has shape ", ShapeString(v), ", expected the same ",
                                                     d == 0 ? "batch" : "tokens", " as key_states, ", ShapeString(k)));
    }
  }
  if (k.device() != v.device()) {
    return absl::InvalidArgumentError(absl::StrCat("value_states is on ", v.device().str(),
                                                   ", expected the device of key_states, ", k.device().str()));
  }
  return absl::OkStatus();
}

absl::Status CheckLike(const at::Tensor& k, const at::Tensor& v, const KeysValues& first, int layer) {
  KVFERRY_RETURN_IF_ERROR(CheckSame(k, first.k, "key_states", layer));
  return CheckSame(v, first.v, "value_states", layer);
}

absl::Status CheckBatch(const at::Tensor& k, int64_t batch) {
  if (k.size(0) == batch) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("key_states has batch ", k.size(0), ", expected ", batch, " as held by the cache"));
}

}  // namespace kvferry
