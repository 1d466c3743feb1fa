// A rank that is alive must never be called lost, however long it computes, and one that is stopped must be, on all ranks.
#include "monolith/rank_watch.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

using monolith::RankLoss;
using monolith::RankWatch;
using std::chrono::milliseconds;

namespace {

constexpr milliseconds kLong{20'000};

std::vector<std::vector<int>> sockets_of(std::size_t size) {
  std::vector<std::vector<int>> sockets(size, std::vector<int>(size, -1));
  for (std::size_t a = 0; a < size; ++a) {
    for (std::size_t b = a + 1; b < size; ++b) {
      int ends[2];
      REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
      sockets[a][b] = ends[0];
      sockets[b][a] = ends[1];
    }
  }
  return sockets;
}

bool is_known(const RankWatch& watch, int limit) {
  pollfd waiting{watch.descriptor(), POLLIN, 0};
  return ::poll(&waiting, 1, limit) == 1;
}

}  // namespace

TEST("ranks that beat are not lost, however short the limit is against their silence otherwise") {
  const auto sockets = sockets_of(2);
  const RankWatch a(0, sockets[0], milliseconds(1000));
  const RankWatch b(1, sockets[1], milliseconds(1000));
  CHECK(!is_known(a, 2500));
  CHECK(!is_known(b, 0));
  CHECK(a.is_heard(1, milliseconds(1000)));
}

TEST("a rank that is silent is lost, and whoever notices tells the others") {
  // Rank 2 never beats. Rank 0 would wait for it much longer than rank 1.
  const auto sockets = sockets_of(3);
  const RankWatch a(0, sockets[0], kLong);
  const RankWatch b(1, sockets[1], milliseconds(100));
  for (const RankWatch* watch : {&a, &b}) {
    REQUIRE(is_known(*watch, 10'000));
    CHECK_EQ(watch->loss()->rank, 2);
    CHECK(watch->loss()->kind == RankLoss::Kind::kLost);
  }
  CHECK_EQ(a.loss()->told_by, 1);
  CHECK_EQ(a.loss()->why, std::string("it was not heard from for 0.1 s"));
  ::close(sockets[2][0]);
  ::close(sockets[2][1]);
}

TEST("a rank that fails says why, and is not lost to itself") {
  const auto sockets = sockets_of(3);
  RankWatch a(0, sockets[0], kLong);
  const RankWatch b(1, sockets[1], kLong);
  const RankWatch c(2, sockets[2], kLong);
  a.fail("no memory");
  for (const RankWatch* watch : {&b, &c}) {
    REQUIRE(is_known(*watch, 10'000));
    CHECK_EQ(watch->loss()->rank, 0);
    CHECK_EQ(watch->loss()->why, std::string("no memory"));
    CHECK(watch->loss()->kind == RankLoss::Kind::kFailed);
  }
  CHECK(!a.loss());
}

TEST("the first loss counts") {
  const auto sockets = sockets_of(3);
  RankWatch a(0, sockets[0], kLong);
  const RankWatch b(1, sockets[1], kLong);
  CHECK_EQ(a.report({RankLoss::Kind::kLost, 2, "first", -1}).rank, 2);
  CHECK_EQ(a.report({RankLoss::Kind::kLost, 1, "second", -1}).rank, 2);
  REQUIRE(is_known(b, 10'000));
  CHECK_EQ(b.loss()->why, std::string("first"));
  ::close(sockets[2][0]);
  ::close(sockets[2][1]);
}

TEST("a rank that others take for lost is told so") {
  const auto sockets = sockets_of(2);
  RankWatch a(0, sockets[0], kLong);
  const RankWatch b(1, sockets[1], kLong);
  a.report({RankLoss::Kind::kLost, 1, "slow", -1});
  REQUIRE(is_known(b, 10'000));
  CHECK_EQ(b.loss()->rank, 1);
  CHECK_EQ(b.loss()->told_by, 0);
}

TEST("a connection that ends is not a loss by itself, and last words are heard before it counts") {
  const auto sockets = sockets_of(2);
  auto a = std::make_unique<RankWatch>(0, sockets[0], milliseconds(200));
  RankWatch b(1, sockets[1], milliseconds(200));
  a->close();
  CHECK(!b.last_words(0, kLong));
  CHECK(!b.is_heard(0, kLong));
  CHECK(!is_known(b, 500));
}

TEST("reasons of any length and garbage cannot confuse a watch") {
  const auto sockets = sockets_of(2);
  {
    RankWatch a(0, sockets[0], kLong);
    const RankWatch b(1, sockets[1], kLong);
    a.fail(std::string(100'000, 'x'));
    REQUIRE(is_known(b, 10'000));
    CHECK_EQ(b.loss()->why.size(), RankWatch::kMaxReason);
  }
  const auto others = sockets_of(2);
  const RankWatch c(0, others[0], kLong);
  const std::string garbage(100, '\xff');
  REQUIRE(::send(others[1][0], garbage.data(), garbage.size(), 0) == 100);
  REQUIRE(is_known(c, 10'000));
  CHECK_EQ(c.loss()->rank, 1);
  ::close(others[1][0]);
}
