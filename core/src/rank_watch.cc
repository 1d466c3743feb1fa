#include "monolith/rank_watch.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "monolith/error.h"

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

namespace monolith {

namespace {

// A record of the connection: kind u16 (0 is a heartbeat), rank u16, bytes of text u32, the text. In the order of this machine, as the
// run's other messages.
constexpr std::size_t kRecord = 8;
constexpr std::chrono::milliseconds kPatience{1000};

std::string record(std::uint16_t kind, int rank, const std::string& text) {
  const auto number = static_cast<std::uint16_t>(rank);
  const auto size = static_cast<std::uint32_t>(std::min(text.size(), RankWatch::kMaxReason));
  std::string bytes(kRecord + size, '\0');
  std::memcpy(bytes.data(), &kind, 2);
  std::memcpy(bytes.data() + 2, &number, 2);
  std::memcpy(bytes.data() + 4, &size, 4);
  std::memcpy(bytes.data() + kRecord, text.data(), size);
  return bytes;
}

void make_pipe(int (&ends)[2]) {
#if defined(__linux__)
  // At once: another thread may start a program in between.
  const int made = ::pipe2(ends, O_CLOEXEC | O_NONBLOCK);
#else
  const int made = ::pipe(ends);
  for (const int end : ends) {
    ::fcntl(end, F_SETFD, FD_CLOEXEC);
    ::fcntl(end, F_SETFL, O_NONBLOCK);
  }
#endif
  if (made != 0) throw IoError(std::string("cannot make a pipe: ") + std::strerror(errno));
}

void close_descriptor(int& descriptor) noexcept {
  if (descriptor >= 0) ::close(descriptor);
  descriptor = -1;
}

}  // namespace

RankWatch::RankWatch(int rank, std::vector<int> sockets, std::chrono::milliseconds silence)
    : rank_(rank), silence_(silence), interval_(std::clamp(silence / 5, std::chrono::milliseconds(10), std::chrono::milliseconds(1000))) {
  const auto now = Clock::now();
  for (const int socket : sockets) {
    Peer peer;
    peer.socket = socket;
    peer.has_ended = socket < 0;
    peer.heard = now;
    peers_.push_back(std::move(peer));
  }
  make_pipe(known_);
  make_pipe(stop_);
  // Signals are for the threads of the program.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::make_unique<std::thread>([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

RankWatch::~RankWatch() {
  close();
  close_descriptor(known_[0]);
  close_descriptor(known_[1]);
  close_descriptor(stop_[0]);
  close_descriptor(stop_[1]);
}

RankLoss RankWatch::report(RankLoss loss) {
  if (loss.why.size() > kMaxReason) loss.why.resize(kMaxReason);
  know(std::move(loss), true);
  const std::lock_guard guard(lock_);
  return *loss_;
}

void RankWatch::fail(const std::string& why) {
  RankLoss loss{RankLoss::Kind::kFailed, rank_, why, -1};
  tell(loss, -1);
}

std::optional<RankLoss> RankWatch::loss() const {
  const std::lock_guard guard(lock_);
  return loss_;
}

std::optional<RankLoss> RankWatch::last_words(int rank, std::chrono::milliseconds limit) {
  std::unique_lock guard(lock_);
  changed_.wait_for(guard, limit, [&] { return is_closed_ || peers_.at(static_cast<std::size_t>(rank)).has_ended; });
  return loss_;
}

bool RankWatch::is_heard(int rank, std::chrono::milliseconds recent) const {
  const std::lock_guard guard(lock_);
  const Peer& peer = peers_.at(static_cast<std::size_t>(rank));
  return !peer.has_ended && Clock::now() - peer.heard <= recent;
}

void RankWatch::close() {
  const std::lock_guard closing(closing_);
  if (!thread_) return;
  {
    const std::lock_guard guard(lock_);
    is_closed_ = true;
  }
  changed_.notify_all();
  static_cast<void>(!::write(stop_[1], "", 1));
  thread_->join();
  thread_.reset();
  const std::lock_guard sending(sending_);
  const std::lock_guard guard(lock_);
  for (Peer& peer : peers_) close_descriptor(peer.socket);
}

void RankWatch::abandon() noexcept {
  // The thread is not in this process, and locks may be held for ever.
  static_cast<void>(thread_.release());
  for (Peer& peer : peers_) close_descriptor(peer.socket);
}

void RankWatch::run() {
  auto next_beat = Clock::now();
  auto last = next_beat;
  std::vector<pollfd> waiting;
  std::vector<std::size_t> ranks;
  while (true) {
    waiting.assign(1, {stop_[0], POLLIN, 0});
    ranks.assign(1, 0);
    {
      const std::lock_guard guard(lock_);
      if (is_closed_) return;
      for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
        if (peers_[peer].has_ended) continue;
        waiting.push_back({peers_[peer].socket, POLLIN, 0});
        ranks.push_back(peer);
      }
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(next_beat - Clock::now()).count();
    static_cast<void>(::poll(waiting.data(), static_cast<nfds_t>(waiting.size()), static_cast<int>(std::max<long long>(0, left))));
    for (std::size_t i = 1; i < waiting.size(); ++i) {
      if (waiting[i].revents != 0) listen_to(ranks[i]);
    }
    const auto now = Clock::now();
    if (now - last > silence_ / 2) {
      // This process itself was stopped: nobody could be heard.
      const std::lock_guard guard(lock_);
      for (Peer& peer : peers_) peer.heard = now;
    }
    last = now;
    if (now >= next_beat) {
      beat();
      find_silent(now);
      next_beat = now + interval_;
    }
  }
}

void RankWatch::beat() {
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    static_cast<void>(send_record(peer, RankLoss::Kind{}, rank_, "", false));
  }
}

void RankWatch::listen_to(std::size_t number) {
  Peer& peer = peers_[number];
  char bytes[4096];
  while (true) {
    const ssize_t got = ::recv(peer.socket, bytes, sizeof(bytes), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    bool is_over = got <= 0;
    if (!is_over) {
      {
        const std::lock_guard guard(lock_);
        peer.heard = Clock::now();
      }
      peer.received.append(bytes, static_cast<std::size_t>(got));
      while (take_record(number)) {
      }
      const std::lock_guard guard(lock_);
      is_over = peer.has_ended;
    }
    if (is_over) {
      {
        const std::lock_guard guard(lock_);
        peer.has_ended = true;
      }
      changed_.notify_all();
      return;
    }
  }
}

bool RankWatch::take_record(std::size_t number) {
  Peer& peer = peers_[number];
  if (peer.received.size() < kRecord) return false;
  std::uint16_t kind;
  std::uint16_t rank;
  std::uint32_t size;
  std::memcpy(&kind, peer.received.data(), 2);
  std::memcpy(&rank, peer.received.data() + 2, 2);
  std::memcpy(&size, peer.received.data() + 4, 4);
  if (kind > static_cast<std::uint16_t>(RankLoss::Kind::kDisagree) || rank >= peers_.size() || size > kMaxReason) {
    {
      const std::lock_guard guard(lock_);
      peer.has_ended = true;
    }
    know({RankLoss::Kind::kLost, static_cast<int>(number), "it sent what no rank sends", -1}, true);
    return false;
  }
  if (peer.received.size() < kRecord + size) return false;
  if (kind != 0) {
    know({static_cast<RankLoss::Kind>(kind), rank, peer.received.substr(kRecord, size), static_cast<int>(number)}, false);
  }
  peer.received.erase(0, kRecord + size);
  return true;
}

void RankWatch::find_silent(Clock::time_point now) {
  int silent = -1;
  {
    const std::lock_guard guard(lock_);
    for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
      if (!peers_[peer].has_ended && now - peers_[peer].heard > silence_) silent = static_cast<int>(peer);
    }
  }
  if (silent < 0) return;
  std::string text = std::to_string(std::chrono::duration<double>(silence_).count());
  text.resize(text.find('.') + 2);
  know({RankLoss::Kind::kLost, silent, "it was not heard from for " + text + " s", -1}, true);
}

void RankWatch::know(RankLoss loss, bool tells) {
  {
    const std::lock_guard guard(lock_);
    if (loss_) return;
    loss_ = loss;
  }
  static_cast<void>(!::write(known_[1], "", 1));
  changed_.notify_all();
  if (tells) tell(loss, loss.rank);
}

void RankWatch::tell(const RankLoss& loss, int except) {
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    // Also the rank that is lost: it may only have been slow, and should know.
    const bool patiently = static_cast<int>(peer) != except;
    static_cast<void>(send_record(peer, loss.kind, loss.rank, loss.why, patiently));
  }
}

bool RankWatch::send_record(std::size_t number, RankLoss::Kind kind, int rank, const std::string& text, bool patiently) {
  const std::string bytes = record(static_cast<std::uint16_t>(kind), rank, text);
  // A record is never sent in part with another after it: one at a time, and none after one that could not be finished.
  const std::lock_guard sending(sending_);
  Peer& peer = peers_[number];
  {
    const std::lock_guard guard(lock_);
    if (peer.has_ended || peer.socket < 0) return false;
  }
  const auto deadline = Clock::now() + kPatience;
  std::size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t count = ::send(peer.socket, bytes.data() + sent, bytes.size() - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count > 0) {
      sent += static_cast<std::size_t>(count);
      continue;
    }
    if (count < 0 && errno == EINTR) continue;
    const bool is_full = count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    // The end of the connection is noticed by the thread that reads, after the last words.
    if (!is_full || (sent == 0 && !patiently) || Clock::now() >= deadline) break;
    pollfd waiting{peer.socket, POLLOUT, 0};
    static_cast<void>(::poll(&waiting, 1, 50));
  }
  if (sent > 0 && sent < bytes.size()) ::shutdown(peer.socket, SHUT_WR);
  return sent == bytes.size();
}

}  // namespace monolith
