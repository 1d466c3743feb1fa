// Half of a step's memory traffic in a model with biases: a row that is shifted by one number trains, wrongly and without an error.
#include "monolith/bias.h"

#include <vector>

#include "check.h"
#include "monolith/error.h"
#include "monolith/thread_pool.h"

using Floats = std::vector<float>;

namespace {

void check_round_trip(std::size_t n, std::size_t dim) {
  Floats rows(n * (1 + dim));
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i);
  Floats bias(n, -1), vectors(n * dim, -1), again(rows.size(), -1);
  monolith::split_bias(rows, bias, vectors);
  for (std::size_t row = 0; row < n; ++row) {
    REQUIRE(bias[row] == rows[row * (1 + dim)]);
    for (std::size_t d = 0; d < dim; ++d) REQUIRE(vectors[row * dim + d] == rows[row * (1 + dim) + 1 + d]);
  }
  monolith::join_bias(bias, vectors, again);
  CHECK(again == rows);
}

}  // namespace

TEST("rows are taken apart and put together, in every width and on several threads") {
  const std::size_t threads = monolith::num_threads();
  for (const std::size_t dim : {0u, 1u, 3u, 4u, 5u, 8u, 16u, 17u}) {
    for (const std::size_t n : {0u, 1u, 2u, 100u}) check_round_trip(n, dim);
  }
  for (const std::size_t wanted : {1u, 3u}) {
    monolith::set_num_threads(wanted);
    check_round_trip(30000, 5);
  }
  monolith::set_num_threads(threads);
}

TEST("arrays that do not fit are refused before anything is written") {
  const Floats rows(12, 1), four(4, 1);
  Floats bias(4, 7), vectors(7, 7), out(11, 7), more(13, 7);
  CHECK_THROWS(monolith::split_bias(rows, bias, vectors), monolith::InvalidArgument);
  CHECK(bias == Floats(4, 7));
  CHECK_THROWS(monolith::join_bias(four, Floats(8, 1), out), monolith::InvalidArgument);
  CHECK_THROWS(monolith::join_bias(four, Floats(9, 1), more), monolith::InvalidArgument);
  CHECK(out == Floats(11, 7));
}
