// Messages between ranks: each rank gets exactly what the others sent to it, whatever the sizes, and memory that two processes share
// is not overwritten while the other one may read it.
#include "monolith/rank_channel.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "monolith/rank_watch.h"

using monolith::RankChannel;
using monolith::RankLoss;
using monolith::RankWatch;
using monolith::RankWord;
using State = RankChannel::State;
using std::chrono::milliseconds;

namespace {

constexpr milliseconds kLong{20'000};

struct Rank {
  std::unique_ptr<RankWatch> watch;
  std::unique_ptr<RankChannel> channel;
};

// Two ends of a TCP connection.
void tcp_pair(int (&ends)[2]) {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  REQUIRE(::bind(listener, reinterpret_cast<sockaddr*>(&address), size) == 0);
  REQUIRE(::listen(listener, 1) == 0);
  REQUIRE(::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  ends[0] = ::socket(AF_INET, SOCK_STREAM, 0);
  REQUIRE(::connect(ends[0], reinterpret_cast<sockaddr*>(&address), size) == 0);
  ends[1] = ::accept(listener, nullptr, nullptr);
  REQUIRE(ends[1] >= 0);
  ::close(listener);
}

// One rank, and what another would hold of the connections to it.
struct Alone {
  int data[2];
  int control[2];
  std::unique_ptr<RankWatch> watch;
  std::unique_ptr<RankChannel> channel;

  explicit Alone(bool shares_memory = true) {
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, data) == 0);
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, control) == 0);
    watch = std::make_unique<RankWatch>(0, std::vector<int>{-1, control[0]}, kLong);
    channel = std::make_unique<RankChannel>(std::vector<RankChannel::Connection>{{-1, false}, {data[0], shares_memory}}, *watch);
  }
  ~Alone() {
    ::close(data[1]);
    ::close(control[1]);
  }
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;
};

// As the core writes it.
struct WireHeader {
  std::uint32_t magic = 0x4b524f4d;
  std::uint16_t kind = 1;
  std::uint16_t flags = 0;
  std::uint64_t size = 0, round = 0;
  std::int64_t step = 0;
  std::uint64_t generation = 1;
};

void send_all(int socket, const void* bytes, std::size_t size) {
  REQUIRE(::send(socket, bytes, size, 0) == static_cast<ssize_t>(size));
}

int open_descriptors() {
  int count = 0;
  for (int descriptor = 0; descriptor < 256; ++descriptor) count += ::fcntl(descriptor, F_GETFD) != -1;
  return count;
}

// Ranks that are connected with each other by Unix sockets. Pairs that are plain share no memory.
std::vector<Rank> connected(
    std::size_t size, bool shares_memory, milliseconds silence = kLong,
    const std::function<bool(std::size_t, std::size_t)>& is_plain = [](std::size_t, std::size_t) { return false; }) {
  std::vector<std::vector<int>> control(size, std::vector<int>(size, -1));
  std::vector<std::vector<RankChannel::Connection>> data(size, std::vector<RankChannel::Connection>(size));
  for (std::size_t a = 0; a < size; ++a) {
    for (std::size_t b = a + 1; b < size; ++b) {
      int ends[2];
      REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
      control[a][b] = ends[0];
      control[b][a] = ends[1];
      REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
      const bool shares = shares_memory && !is_plain(a, b);
      data[a][b] = {ends[0], shares};
      data[b][a] = {ends[1], shares};
    }
  }
  std::vector<Rank> ranks(size);
  for (std::size_t a = 0; a < size; ++a) {
    ranks[a].watch = std::make_unique<RankWatch>(static_cast<int>(a), control[a], silence);
    ranks[a].channel = std::make_unique<RankChannel>(data[a], *ranks[a].watch);
  }
  return ranks;
}

std::vector<std::byte> bytes_of(std::size_t from, std::size_t to, std::size_t round, std::size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 31 + from * 7 + to * 13 + round * 3);
  return bytes;
}

bool is_equal(std::span<const std::byte> a, const std::vector<std::byte>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), b.size()) == 0);
}

State exchange(RankChannel& channel, const RankWord& word, const std::vector<RankChannel::Parts>& out, milliseconds limit = kLong) {
  const State begun = channel.begin(word, out);
  return begun == State::kDone ? channel.wait(limit) : begun;
}

// The same sizes on all ranks, so that each knows what to expect.
std::vector<std::size_t> sizes_of(std::size_t ranks, std::size_t round, std::size_t largest) {
  std::mt19937_64 random(round);
  std::vector<std::size_t> sizes(ranks * ranks);
  for (std::size_t& size : sizes) size = random() % 3 == 0 ? 0 : random() % largest;
  return sizes;
}

void run(const std::vector<Rank>& ranks, const std::function<void(std::size_t)>& body) {
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) threads.emplace_back([&, rank] { body(rank); });
  for (std::thread& thread : threads) thread.join();
}

void exchange_many(std::size_t size, bool shares_memory, std::size_t rounds, std::size_t largest) {
  const auto ranks = connected(size, shares_memory);
  run(ranks, [&](std::size_t rank) {
    for (std::size_t round = 0; round < rounds; ++round) {
      const auto sizes = sizes_of(size, round, largest);
      std::vector<std::vector<std::byte>> sent;
      std::vector<RankChannel::Parts> out(size);
      for (std::size_t to = 0; to < size; ++to) sent.push_back(bytes_of(rank, to, round, sizes[rank * size + to]));
      for (std::size_t to = 0; to < size; ++to) {
        // In two parts, which arrive as one message.
        const std::span<const std::byte> all(sent[to]);
        out[to] = {all.first(all.size() / 3), all.subspan(all.size() / 3)};
      }
      if (exchange(*ranks[rank].channel, {3, static_cast<std::int64_t>(round), 9}, out) != State::kDone) {
        check::report(__FILE__, __LINE__, "an exchange failed");
        return;
      }
      for (std::size_t from = 0; from < size; ++from) {
        if (from == rank) continue;
        // The slowest reader of all: the others have gone on as far as they can.
        if (round % 5 == rank) std::this_thread::sleep_for(milliseconds(2));
        CHECK(is_equal(ranks[rank].channel->message(from).data, bytes_of(from, rank, round, sizes[from * size + rank])));
      }
    }
  });
}

}  // namespace

TEST("messages of all sizes arrive through sockets") { exchange_many(3, false, 40, 300'000); }

TEST("messages of all sizes arrive through shared memory") { exchange_many(3, true, 40, 300'000); }

TEST("shared memory grows with the messages") { exchange_many(2, true, 12, 6'000'000); }

TEST("large messages in both directions do not block each other") {
  const auto ranks = connected(4, false);
  run(ranks, [&](std::size_t rank) {
    const std::vector<std::byte> large(8'000'000, static_cast<std::byte>(rank));
    const std::vector<RankChannel::Parts> out(4, RankChannel::Parts{large});
    CHECK(exchange(*ranks[rank].channel, {1, 0, 1}, out) == State::kDone);
    for (std::size_t from = 0; from < 4; ++from) {
      if (from != rank) CHECK(ranks[rank].channel->message(from).data.back() == static_cast<std::byte>(from));
    }
  });
}

TEST("what was received can be sent on in the next exchange") {
  for (const bool shares_memory : {false, true}) {
    const auto ranks = connected(3, shares_memory);
    run(ranks, [&](std::size_t rank) {
      RankChannel& channel = *ranks[rank].channel;
      const std::size_t next = (rank + 1) % 3;
      const std::size_t before = (rank + 2) % 3;
      const auto first = bytes_of(rank, rank, 0, 100'000);
      std::vector<RankChannel::Parts> out(3);
      out[next] = {first};
      CHECK(exchange(channel, {1, 0, 1}, out) == State::kDone);
      for (int hop = 1; hop < 12; ++hop) {
        const RankChannel::Message held = channel.message(before);
        std::vector<RankChannel::Parts> on(3);
        on[next] = {held.data};
        if (exchange(channel, {1, hop, 1}, on) != State::kDone) {
          check::report(__FILE__, __LINE__, "an exchange failed");
          return;
        }
        // After hop h, what began h + 1 ranks before is here.
        CHECK(is_equal(channel.message(before).data, bytes_of((rank + 3 * 12 - hop - 1) % 3, (rank + 3 * 12 - hop - 1) % 3, 0, 100'000)));
      }
    });
  }
}

TEST("what is being sent on to a slow rank is not overwritten by the rank it came from") {
  // 0 sends to 1, which sends it on to 2 through a socket, from the memory of 0 or from its own buffer. Meanwhile 0 sends the next to 1.
  for (const bool shares_memory : {true, false}) {
    std::vector<Rank> ranks = connected(3, shares_memory, kLong, [](std::size_t a, std::size_t b) { return a + b == 3; });
    run(ranks, [&](std::size_t rank) {
      RankChannel& channel = *ranks[rank].channel;
      for (std::size_t round = 0; round < 8; ++round) {
        const auto sent = bytes_of(0, 1, round, 4'000'000);
        std::vector<RankChannel::Parts> out(3);
        RankChannel::Message held;
        if (rank == 0) out[1] = {sent};
        if (rank == 1 && round > 0) {
          held = channel.message(0);
          out[2] = {held.data};
        }
        State state = channel.begin({1, 0, 1}, out);
        if (rank == 2) std::this_thread::sleep_for(milliseconds(20));
        if (state == State::kDone) state = channel.wait(kLong);
        if (state != State::kDone) {
          check::report(__FILE__, __LINE__, "an exchange failed");
          return;
        }
        if (rank == 2 && round > 0) CHECK(is_equal(channel.message(1).data, bytes_of(0, 1, round - 1, 4'000'000)));
      }
    });
  }
}

TEST("ranks in different exchanges learn of each other's") {
  const auto ranks = connected(3, true);
  run(ranks, [&](std::size_t rank) {
    const std::vector<RankChannel::Parts> out(3);
    const auto kind = static_cast<std::uint16_t>(rank == 2 ? 5 : 4);
    CHECK(exchange(*ranks[rank].channel, {kind, 7, 1}, out) == State::kDisagree);
    CHECK((ranks[rank].channel->other() == 2) == (rank != 2));
    CHECK_EQ(ranks[rank].channel->other_word().kind, rank == 2 ? 4 : 5);
    // Nothing more comes of a channel on which ranks are not together.
    CHECK(exchange(*ranks[rank].channel, {4, 7, 1}, out) == State::kBroken);
  });
}

TEST("a rank can wait for what the others do without taking it") {
  const auto ranks = connected(2, true);
  run(ranks, [&](std::size_t rank) {
    RankChannel& channel = *ranks[rank].channel;
    const auto sent = bytes_of(rank, 1 - rank, 0, 50'000);
    std::vector<RankChannel::Parts> out(2);
    out[1 - rank] = {sent};
    if (rank == 0) {
      CHECK(channel.wait_for_kind(kLong) == State::kDone);
      CHECK(channel.wait_for_kind(kLong) == State::kDone);
      CHECK_EQ(channel.kind(), 6);
    }
    CHECK(exchange(channel, {6, 1, 1}, out) == State::kDone);
    CHECK(is_equal(channel.message(1 - rank).data, bytes_of(1 - rank, rank, 0, 50'000)));
  });
}

TEST("the last exchange ends well for those who are slower than one that leaves") {
  for (int repeat = 0; repeat < 20; ++repeat) {
    auto ranks = connected(3, repeat % 2 == 0);
    run(ranks, [&](std::size_t rank) {
      const auto sent = bytes_of(rank, 0, 0, 40'000);
      const std::vector<RankChannel::Parts> out(3, RankChannel::Parts{sent});
      if (rank == 2) std::this_thread::sleep_for(milliseconds(1));
      CHECK(exchange(*ranks[rank].channel, {1, 0, 1}, out) == State::kDone);
      ranks[rank].channel->close();
      ranks[rank].watch->close();
    });
  }
}

TEST("a rank that leaves is named to those who wait for it") {
  const auto ranks = connected(3, true);
  run(ranks, [&](std::size_t rank) {
    if (rank == 1) {
      ranks[1].channel->close();
      ranks[1].watch->close();
      return;
    }
    CHECK(exchange(*ranks[rank].channel, {1, 0, 1}, std::vector<RankChannel::Parts>(3)) == State::kLost);
    CHECK_EQ(ranks[rank].channel->loss().rank, 1);
  });
}

TEST("whoever leaves because of a loss is not blamed for it") {
  for (int repeat = 0; repeat < 20; ++repeat) {
    // Only rank 0 is connected with rank 2 in a way that breaks: rank 1 learns of it from rank 0, which then leaves.
    const auto ranks = connected(3, true);
    run(ranks, [&](std::size_t rank) {
      if (rank == 2) return;
      if (rank == 0) {
        ranks[0].watch->report({RankLoss::Kind::kLost, 2, "its cable was cut", -1});
        ranks[0].channel->close();
        ranks[0].watch->close();
        return;
      }
      CHECK(exchange(*ranks[1].channel, {1, 0, 1}, std::vector<RankChannel::Parts>(3)) == State::kLost);
      CHECK_EQ(ranks[1].channel->loss().rank, 2);
      CHECK_EQ(ranks[1].channel->loss().why, std::string("its cable was cut"));
    });
  }
}

TEST("an exchange ends at its deadline and names the rank that did not come") {
  const auto ranks = connected(3, true);
  run(ranks, [&](std::size_t rank) {
    if (rank == 1) return;
    CHECK(exchange(*ranks[rank].channel, {1, 0, 1}, std::vector<RankChannel::Parts>(3), milliseconds(50)) == State::kLost);
    CHECK_EQ(ranks[rank].channel->loss().rank, 1);
  });
}

TEST("close ends a call that waits") {
  const auto ranks = connected(2, true);
  std::thread waiting([&] {
    CHECK(exchange(*ranks[0].channel, {1, 0, 1}, std::vector<RankChannel::Parts>(2)) == State::kClosed);
  });
  std::this_thread::sleep_for(milliseconds(20));
  ranks[0].channel->close();
  waiting.join();
}

TEST("messages of all sizes arrive over TCP") {
  int data[2];
  int control[2];
  tcp_pair(data);
  tcp_pair(control);
  std::vector<Rank> ranks(2);
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<int> watched(2, -1);
    std::vector<RankChannel::Connection> connections(2);
    watched[1 - rank] = control[rank];
    connections[1 - rank] = {data[rank], false};
    ranks[rank].watch = std::make_unique<RankWatch>(rank, watched, kLong);
    ranks[rank].channel = std::make_unique<RankChannel>(connections, *ranks[rank].watch);
  }
  run(ranks, [&](std::size_t rank) {
    for (std::size_t round = 0; round < 12; ++round) {
      const std::size_t size = round % 3 == 0 ? 0 : std::size_t{1} << (2 * round);
      const auto sent = bytes_of(rank, 1 - rank, round, size);
      std::vector<RankChannel::Parts> out(2);
      out[1 - rank] = {sent};
      if (exchange(*ranks[rank].channel, {2, 0, 1}, out) != State::kDone) {
        check::report(__FILE__, __LINE__, "an exchange failed");
        return;
      }
      CHECK(is_equal(ranks[rank].channel->message(1 - rank).data, bytes_of(1 - rank, rank, round, size)));
    }
  });
}

TEST("bytes that no rank sends end the exchange") {
  for (const std::size_t size : {std::size_t{48}, std::size_t{200}}) {
    const Alone rank;
    const std::vector<char> garbage(size, 'x');
    send_all(rank.data[1], garbage.data(), size);
    CHECK(exchange(*rank.channel, {1, 0, 1}, std::vector<RankChannel::Parts>(2)) == State::kLost);
    CHECK_EQ(rank.channel->loss().rank, 1);
  }
}

TEST("a message longer than any can be ends the exchange") {
  const Alone rank;
  WireHeader header;
  header.size = RankChannel::kMaxMessage + 1;
  send_all(rank.data[1], &header, sizeof(header));
  CHECK(exchange(*rank.channel, {1, 0, 1}, std::vector<RankChannel::Parts>(2)) == State::kLost);
}

TEST("a header may arrive byte by byte") {
  const Alone rank(false);
  WireHeader header;
  header.size = 3;
  char bytes[sizeof(header) + 3];
  std::memcpy(bytes, &header, sizeof(header));
  std::memcpy(bytes + sizeof(header), "abc", 3);
  std::thread slow([&] {
    for (const char& one : bytes) {
      send_all(rank.data[1], &one, 1);
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  CHECK(exchange(*rank.channel, {1, 0, 1}, std::vector<RankChannel::Parts>(2)) == State::kDone);
  slow.join();
  CHECK_EQ(rank.channel->message(1).data.size(), 3u);
}

TEST("a rank that dies within a message is named") {
  const Alone rank(false);
  WireHeader header;
  header.size = 100;
  send_all(rank.data[1], &header, sizeof(header));
  send_all(rank.data[1], "half", 4);
  ::shutdown(rank.data[1], SHUT_RDWR);
  ::shutdown(rank.control[1], SHUT_RDWR);
  CHECK(exchange(*rank.channel, {1, 0, 1}, std::vector<RankChannel::Parts>(2)) == State::kLost);
  CHECK(rank.channel->loss().why.starts_with("it has closed its connection"));
}

TEST("a message that claims to be in memory that was never given ends the exchange") {
  for (const std::uint16_t flags : {std::uint16_t{1}, std::uint16_t{3}}) {
    const Alone rank;
    WireHeader header;
    header.flags = flags;
    header.size = 100'000;
    send_all(rank.data[1], &header, sizeof(header));
    CHECK(exchange(*rank.channel, {1, 0, 1}, std::vector<RankChannel::Parts>(2)) == State::kLost);
  }
}

TEST("descriptors of shared memory are not leaked") {
  const int before = open_descriptors();
  exchange_many(2, true, 12, 3'000'000);
  CHECK_EQ(open_descriptors(), before);
}

TEST("a signal lets the caller look at it and go on") {
  struct sigaction ignoring {};
  struct sigaction old {};
  ignoring.sa_handler = [](int) {};
  REQUIRE(::sigaction(SIGUSR1, &ignoring, &old) == 0);
  const auto ranks = connected(2, true);
  std::atomic<bool> is_interrupted{false};
  std::thread waiting([&] {
    RankChannel& channel = *ranks[0].channel;
    const std::vector<RankChannel::Parts> out(2);
    CHECK(channel.begin({1, 0, 1}, out) == State::kDone);
    State state = channel.wait(kLong);
    CHECK(state == State::kInterrupted);
    is_interrupted = true;
    while (state == State::kInterrupted) state = channel.wait(kLong);
    CHECK(state == State::kDone);
  });
  while (!is_interrupted) {
    ::pthread_kill(waiting.native_handle(), SIGUSR1);
    std::this_thread::sleep_for(milliseconds(5));
  }
  CHECK(exchange(*ranks[1].channel, {1, 0, 1}, std::vector<RankChannel::Parts>(2)) == State::kDone);
  waiting.join();
  ::sigaction(SIGUSR1, &old, nullptr);
}

TEST("an exchange that was left unfinished is not followed by another") {
  const Alone rank;
  const std::vector<RankChannel::Parts> out(2);
  CHECK(rank.channel->begin({1, 0, 1}, out) == State::kDone);
  CHECK(rank.channel->begin({1, 0, 1}, out) == State::kBroken);
  CHECK(rank.channel->wait_for_kind(kLong) == State::kBroken);
}

TEST("a forked child lets go of the connections without ending them") {
  const auto ranks = connected(2, true);
  const pid_t child = ::fork();
  if (child == 0) {
    for (const Rank& rank : ranks) {
      rank.channel->abandon();
      rank.watch->abandon();
    }
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK_EQ(status, 0);
  run(ranks, [&](std::size_t rank) {
    CHECK(exchange(*ranks[rank].channel, {1, 0, 1}, std::vector<RankChannel::Parts>(2)) == State::kDone);
  });
}
