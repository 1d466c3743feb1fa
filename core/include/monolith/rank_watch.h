// Which ranks of a synchronous run are alive. A thread sends and receives heartbeats over one connection to each other rank, so a
// rank that computes for minutes is heard from, and one that was stopped or cut off is not. Whoever notices a loss tells the others.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace monolith {

// Why a run cannot go on.
struct RankLoss {
  enum class Kind : std::uint16_t {
    kLost = 1,      // a rank died or fell silent
    kFailed = 2,    // a rank has said that it ends
    kDisagree = 3,  // ranks do not do the same thing
  };
  Kind kind = Kind::kLost;
  int rank = -1;
  std::string why;
  int told_by = -1;  // the rank that noticed it; -1 if this one did
};

// Thread-safe. Sockets are owned: they are closed by the destructor.
class RankWatch {
 public:
  static constexpr std::size_t kMaxReason = 4096;  // longer texts are cut

  // `sockets` has a connected stream socket for each rank, -1 for this one. A rank that sent nothing for `silence` is lost.
  RankWatch(int rank, std::vector<int> sockets, std::chrono::milliseconds silence);
  ~RankWatch();
  RankWatch(const RankWatch&) = delete;
  RankWatch& operator=(const RankWatch&) = delete;

  // Makes `loss` known here and to the other ranks, unless one is known already. Returns the one that is known.
  RankLoss report(RankLoss loss);
  // Tells the other ranks that this one ends. Nothing becomes known here.
  void fail(const std::string& why);
  // What is known, if anything.
  std::optional<RankLoss> loss() const;
  // Readable as soon as a loss is known. Never read from it.
  int descriptor() const noexcept { return known_[0]; }
  // After the connection of `rank` has ended: waits until everything it said before is read, at most for `limit`, then as loss().
  std::optional<RankLoss> last_words(int rank, std::chrono::milliseconds limit);
  // Whether `rank` has not closed its connection and was heard from within `recent`.
  bool is_heard(int rank, std::chrono::milliseconds recent) const;

  // Ends the thread and the connections. Idempotent.
  void close();
  // In a forked child: closes the child's copies, and nothing of the parent's.
  void abandon() noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer {
    int socket = -1;
    bool has_ended = false;
    Clock::time_point heard;
    std::string received;  // part of a record
  };

  void run();
  void beat();
  void listen_to(std::size_t peer);
  bool take_record(std::size_t peer);
  void find_silent(Clock::time_point now);
  void know(RankLoss loss, bool tell);
  void tell(const RankLoss& loss, int except);
  bool send_record(std::size_t peer, RankLoss::Kind kind, int rank, const std::string& text, bool patiently);

  const int rank_;
  const std::chrono::milliseconds silence_;
  const std::chrono::milliseconds interval_;
  int known_[2] = {-1, -1};
  int stop_[2] = {-1, -1};
  mutable std::mutex lock_;
  std::condition_variable changed_;
  std::vector<Peer> peers_;
  std::optional<RankLoss> loss_;
  std::mutex sending_;
  std::mutex closing_;
  bool is_closed_ = false;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace monolith
