// Reads the usual request for predictions of the Open Inference Protocol v2: columns of one id per row, INT64 [rows] each, as JSON,
// as JSON with the tensors after it, or as the message of gRPC.
//
// Whatever else a request may have, or have wrong, is left to the reader of all requests, which also says what is wrong with it.
// So a request that is read here has to mean exactly what it means there.
//
// Thread-safety: an InferRequestReader is used by one thread at a time. Ownership: what is found points into the request.
// Failure: std::bad_alloc. Memory is bounded by 16 bytes per byte of the request.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace monolith {

struct InferRequest {
  std::string_view model, version;  // of gRPC, which has no URL
  bool raw = false;                 // whether a message of gRPC has raw contents, not typed ones
  std::string_view id;
  std::optional<bool> binary_output;
  std::optional<std::uint64_t> timeout;
  std::optional<std::string_view> route_key;
  std::vector<std::string_view> names;  // different ones, of ASCII
  std::size_t rows = 0;                 // at least 1
  std::vector<std::int64_t> ids;        // [names, rows]
};

class InferRequestReader {
 public:
  using Bytes = std::span<const std::uint8_t>;

  // Each returns null if the request is for the other reader. What is found is valid until the next call.
  const InferRequest* json(Bytes text);
  const InferRequest* binary(Bytes text, Bytes tensors);
  const InferRequest* message(Bytes message);

  // Whether the last request had the same names as the one before, in the same order.
  bool same_names() const { return same_names_; }

 private:
  bool compare_names();

  InferRequest found_;
  std::string scratch_;
  std::string joined_, last_joined_;
  bool same_names_ = false;
};

}  // namespace monolith
