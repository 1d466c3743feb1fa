// Fuzz targets: each is one function that takes any bytes, and must neither crash, nor read outside of them, nor break a promise
// of the header it tests. The same source is linked with libFuzzer, which explores (`make test-slow`, needs clang), and with
// replay.cc, which runs what is in corpus/ (`make test`). An input that has found a fault stays in the corpus.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "monolith/table.h"

using Bytes = std::vector<std::uint8_t>;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace fuzz {

// Not assert: it must hold in every build, and libFuzzer keeps the input of an abort.
#define FUZZ_REQUIRE(condition)                                                   \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                               \
    }                                                                             \
  } while (false)

// Takes numbers from the front of an input; past its end they are 0.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : rest_(data, size) {}

  template <typename T>
  T take() {
    T value{};
    const std::size_t n = std::min(sizeof(value), rest_.size());
    std::memcpy(&value, rest_.data(), n);
    rest_ = rest_.subspan(n);
    return value;
  }

  // A copy of exactly its size lets the address sanitizer see a read outside.
  Bytes rest() const { return {rest_.begin(), rest_.end()}; }

 private:
  std::span<const std::uint8_t> rest_;
};

template <typename T>
T read_at(const Bytes& bytes, std::size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(value));
  return value;
}

template <typename T>
void write_at(Bytes& bytes, std::size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof(value));
}

// The table whose files the table_file target reads: two segments, half precision, slots.
inline monolith::TableConfig table_config() {
  monolith::TableConfig config;
  config.name = "fuzz";
  monolith::Segment first;
  first.dim = 3;
  first.optimizer.kind = monolith::OptimizerKind::kAdagrad;
  first.precision = monolith::Precision::kFp16;
  monolith::Segment second;
  second.dim = 2;
  second.optimizer.kind = monolith::OptimizerKind::kSgd;
  config.segments = {first, second};
  return config;
}

}  // namespace fuzz
