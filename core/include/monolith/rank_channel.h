// Exchanges between the ranks of a synchronous run: every rank sends one message to each other rank and gets one from each. All
// connections are served at the same time, so large messages in both directions cannot block each other. Within a machine large
// messages are written to memory that both ends see, and only their header goes through the socket.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "monolith/rank_watch.h"

namespace monolith {

class SharedBuffers;

// What an exchange is. All ranks must be in the same one.
struct RankWord {
  std::uint16_t kind = 0;
  std::int64_t step = 0;
  std::uint64_t generation = 0;
};

// One sequence of exchanges. Used by one thread at a time; close() may be called by any. Sockets are owned.
class RankChannel {
 public:
  static constexpr std::size_t kSharedFrom = std::size_t{1} << 14;      // bytes of the smallest message in shared memory
  static constexpr std::size_t kMaxShared = std::size_t{1} << 28;       // larger ones go through the socket
  static constexpr std::uint64_t kMaxMessage = std::uint64_t{1} << 36;  // no message is longer

  struct Connection {
    int socket = -1;             // -1 for this rank
    bool shares_memory = false;  // a Unix socket to a process of this machine
  };
  enum class State {
    kDone,
    kInterrupted,  // by a signal: call wait() again
    kLost,         // see loss()
    kDisagree,     // see other() and its rank
    kClosed,
    kBroken,  // an earlier exchange was not finished
  };
  // The bytes of one message. `data` is valid as long as `owner` lives; those in shared memory change when the exchange after the next
  // one begins.
  struct Message {
    std::shared_ptr<const void> owner;
    std::span<const std::byte> data;
  };
  using Parts = std::vector<std::span<const std::byte>>;

  // `watch` outlives the channel.
  RankChannel(std::vector<Connection> connections, RankWatch& watch);
  ~RankChannel();
  RankChannel(const RankChannel&) = delete;
  RankChannel& operator=(const RankChannel&) = delete;

  // Begins an exchange: out[r] goes to rank r, that of this rank is ignored. The bytes must stay until wait() has returned kDone.
  State begin(const RankWord& word, std::span<const Parts> out);
  // Goes on until all messages are sent and received.
  State wait(std::chrono::milliseconds limit);
  // Waits until another rank has begun the next exchange; kind() is its kind. Takes nothing.
  State wait_for_kind(std::chrono::milliseconds limit);

  std::uint16_t kind() const noexcept { return kind_; }
  const Message& message(std::size_t rank) const { return peers_.at(rank).message; }
  // After kDisagree: the rank that is in another exchange, which one that is, and how many exchanges it has made.
  int other() const noexcept { return other_; }
  const RankWord& other_word() const noexcept { return other_word_; }
  std::uint64_t other_round() const noexcept { return other_round_; }
  std::uint64_t round() const noexcept { return round_; }
  const RankLoss& loss() const noexcept { return loss_; }

  void close();
  void abandon() noexcept;

 private:
  static constexpr std::size_t kHeader = 40;
  static constexpr int kBuffers = 3;
  struct Header;
  struct Buffer {
    std::unique_ptr<std::byte[]> data;
    std::size_t capacity = 0;
  };
  struct Outgoing {
    std::byte header[kHeader] = {};
    std::vector<std::span<const std::byte>> left;
    std::size_t at = 0;            // first of `left` that is not sent
    int descriptor = -1;           // of new shared memory, sent with the header
    bool memory_is_shared = true;  // false once the system refused memory
    std::shared_ptr<SharedBuffers> memory;
  };
  struct Incoming {
    std::byte header[kHeader] = {};
    std::size_t header_size = 0;
    std::size_t size = 0;
    std::size_t filled = 0;
    bool is_begun = false;  // the header was checked
    bool is_complete = false;
    int descriptor = -1;
    std::shared_ptr<SharedBuffers> memory;
    std::vector<std::shared_ptr<Buffer>> buffers;
    std::byte* target = nullptr;
  };
  struct Peer {
    Connection connection;
    Outgoing out;
    Incoming in;
    Message message;
  };

  State run(bool only_header, std::chrono::milliseconds limit);
  bool progress(bool only_header);
  void prepare(Peer& peer, const RankWord& word, const Parts& parts);
  void send(Peer& peer);
  void receive(Peer& peer, bool only_header);
  void receive_header(Peer& peer);
  void begin_body(Peer& peer);
  bool is_sent(const Peer& peer) const noexcept { return peer.out.at == peer.out.left.size(); }
  State lose(int rank, const std::string& why, std::chrono::milliseconds patience);

  RankWatch& watch_;
  std::vector<Peer> peers_;
  std::mutex used_;
  std::atomic<bool> is_closed_{false};
  bool is_running_ = false;
  bool is_broken_ = false;
  RankWord word_;
  std::uint64_t round_ = 0;
  std::uint16_t kind_ = 0;
  int other_ = -1;
  RankWord other_word_;
  std::uint64_t other_round_ = 0;
  RankLoss loss_;
};

}  // namespace monolith
