// A reader that runs ahead must lose nothing: no chunk and no error. It must also end when the rest is not consumed.
#include "read_ahead.h"

#include <atomic>
#include <cstring>
#include <set>
#include <stdexcept>
#include <thread>

#include "check.h"

using monolith::ReadAhead;

namespace {

// Fills a piece with bytes that tell its number.
void fill(ReadAhead::Piece& piece) {
  const std::size_t size = 100 + piece.number % 7 * 50;
  piece.data = piece.room(size);
  std::memset(piece.data, static_cast<int>(piece.number % 251), size);
}

}  // namespace

TEST("one taker gets every piece in order") {
  ReadAhead ahead(500, 3, fill);
  std::unique_ptr<ReadAhead::Piece> piece;
  std::size_t expected = 0;
  while (ahead.next(piece)) {
    CHECK_EQ(piece->number, expected);
    CHECK_EQ(static_cast<std::size_t>(piece->data[99]), expected % 251);
    ++expected;
  }
  CHECK_EQ(expected, 500u);
  CHECK(!ahead.next(piece));
}

TEST("several takers get every piece once, and no more are in memory than there is room for") {
  std::atomic<int> read{0}, done{0}, most{0};
  std::atomic<std::uint64_t> sum{0};
  {
    ReadAhead ahead(2000, 5, [&](ReadAhead::Piece& piece) {
      fill(piece);
      const int there = ++read - done;
      if (there > most) most = there;
    });
    std::vector<std::thread> takers;
    for (int t = 0; t < 3; ++t) {
      takers.emplace_back([&] {
        std::unique_ptr<ReadAhead::Piece> piece;
        while (ahead.next(piece)) {
          sum += piece->number;
          ++done;
        }
      });
    }
    for (std::thread& taker : takers) taker.join();
  }
  CHECK_EQ(sum.load(), 2000u * 1999 / 2);
  CHECK_EQ(done.load(), 2000);
  CHECK(most <= 5);
}

TEST("an error of reading reaches whoever waits for the piece") {
  ReadAhead ahead(10, 2, [](ReadAhead::Piece& piece) {
    if (piece.number == 4) throw std::runtime_error("broken");
    fill(piece);
  });
  std::unique_ptr<ReadAhead::Piece> piece;
  const auto take_all = [&] {
    while (ahead.next(piece)) CHECK(piece->number < 4);
  };
  CHECK_THROWS(take_all(), std::runtime_error);
}

TEST("it can be left at any moment") {
  for (std::size_t taken = 0; taken < 6; ++taken) {
    ReadAhead ahead(100, 2, fill);
    std::unique_ptr<ReadAhead::Piece> piece;
    for (std::size_t i = 0; i < taken; ++i) REQUIRE(ahead.next(piece));
  }
}
