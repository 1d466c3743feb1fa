#include "monolith/rank_channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "monolith/error.h"
#include "shared_buffers.h"

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif
#ifndef MSG_CMSG_CLOEXEC
#define MSG_CMSG_CLOEXEC 0
#endif

namespace monolith {

// What precedes each message, in the order of this machine: ranks that differ in that do not agree on the magic.
struct RankChannel::Header {
  static constexpr std::uint32_t kMagic = 0x4b524f4d;  // "MORK"
  static constexpr std::uint16_t kShared = 1;          // the message is in the sender's shared memory
  static constexpr std::uint16_t kNewMemory = 2;       // a descriptor of new shared memory comes with the header

  std::uint32_t magic;
  std::uint16_t kind;
  std::uint16_t flags;
  std::uint64_t size;
  std::uint64_t round;
  std::int64_t step;
  std::uint64_t generation;
};

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kMaxParts = 64;                      // of one call of sendmsg
constexpr std::size_t kLeastCapacity = std::size_t{1} << 20;  // of a buffer in shared memory
constexpr std::chrono::milliseconds kLastWords{500};

bool would_block(int error) noexcept { return error == EAGAIN || error == EWOULDBLOCK; }

// Ends a call because of one rank.
struct Lost {
  int rank;
  std::string why;
};
struct Disagrees {
  int rank;
};

void close_descriptor(int& descriptor) noexcept {
  if (descriptor >= 0) ::close(descriptor);
  descriptor = -1;
}

}  // namespace

RankChannel::RankChannel(std::vector<Connection> connections, RankWatch& watch) : watch_(watch) {
  static_assert(sizeof(Header) == kHeader);
  for (const Connection& connection : connections) {
    Peer peer;
    peer.connection = connection;
    peer.out.memory_is_shared = connection.shares_memory;
    if (connection.socket >= 0) ::fcntl(connection.socket, F_SETFL, ::fcntl(connection.socket, F_GETFL) | O_NONBLOCK);
    peers_.push_back(std::move(peer));
  }
}

RankChannel::~RankChannel() { close(); }

void RankChannel::close() {
  if (!is_closed_.exchange(true)) {
    // Lets a thread that waits here, and the other ranks, see the end of the streams.
    for (const Peer& peer : peers_) {
      if (peer.connection.socket >= 0) ::shutdown(peer.connection.socket, SHUT_RDWR);
    }
  }
  const std::lock_guard guard(used_);
  abandon();
}

void RankChannel::abandon() noexcept {
  for (Peer& peer : peers_) {
    close_descriptor(peer.connection.socket);
    close_descriptor(peer.out.descriptor);
    close_descriptor(peer.in.descriptor);
  }
}

RankChannel::State RankChannel::begin(const RankWord& word, std::span<const Parts> out) {
  if (out.size() != peers_.size()) throw InvalidArgument("out: expected the parts of a message for each rank");
  const std::lock_guard guard(used_);
  if (is_closed_) return State::kClosed;
  if (is_running_ || is_broken_) return State::kBroken;
  if (auto known = watch_.loss()) {
    loss_ = std::move(*known);
    return State::kLost;
  }
  word_ = word;
  is_running_ = true;
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    Peer& peer = peers_[rank];
    if (peer.connection.socket < 0) continue;
    prepare(peer, word, out[rank]);
    // The other rank can begin to read while the messages to further ones are written.
    try {
      send(peer);
    } catch (const Lost&) {
      // wait() finds out whether it has left something to read.
    }
  }
  return State::kDone;
}

RankChannel::State RankChannel::wait(std::chrono::milliseconds limit) {
  const std::lock_guard guard(used_);
  if (is_closed_) return State::kClosed;
  if (!is_running_) return State::kBroken;
  const State state = run(false, limit);
  if (state == State::kInterrupted) return state;
  is_running_ = false;
  if (state != State::kDone) {
    is_broken_ = true;
    return state;
  }
  for (Peer& peer : peers_) {
    Incoming& in = peer.in;
    in.header_size = in.size = in.filled = 0;
    in.is_begun = in.is_complete = false;
    peer.out.left.clear();
    peer.out.at = 0;
  }
  ++round_;
  return state;
}

RankChannel::State RankChannel::wait_for_kind(std::chrono::milliseconds limit) {
  const std::lock_guard guard(used_);
  if (is_closed_) return State::kClosed;
  if (is_running_ || is_broken_) return State::kBroken;
  return run(true, limit);
}

RankChannel::State RankChannel::lose(int rank, const std::string& why, std::chrono::milliseconds patience) {
  if (is_closed_) return State::kClosed;
  // What the rank said before it ended, or what others have noticed before, is the cause.
  auto known = watch_.last_words(rank, patience);
  loss_ = known ? *known : watch_.report({RankLoss::Kind::kLost, rank, why, -1});
  return State::kLost;
}

RankChannel::State RankChannel::run(bool only_header, std::chrono::milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  std::vector<pollfd> waiting;
  bool is_over = false;  // a loss is known: take what has arrived, and no more
  try {
    while (true) {
      if (progress(only_header)) return State::kDone;
      if (is_over) {
        loss_ = *watch_.loss();
        return State::kLost;
      }
      waiting.assign(1, {watch_.descriptor(), POLLIN, 0});
      int slow = -1;
      for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
        const Peer& peer = peers_[rank];
        if (peer.connection.socket < 0) continue;
        const bool receives = only_header || !peer.in.is_complete;
        const bool sends = !is_sent(peer);
        if (!receives && !sends) continue;
        if (slow < 0) slow = static_cast<int>(rank);
        const int events = (receives ? POLLIN : 0) | (sends ? POLLOUT : 0);
        waiting.push_back({peer.connection.socket, static_cast<short>(events), 0});
      }
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
      if (left <= 0) return lose(slow, "it did not come in time", std::chrono::milliseconds(0));
      const int found = ::poll(waiting.data(), static_cast<nfds_t>(waiting.size()),
                               static_cast<int>(std::min<long long>(left, 3'600'000)));
      if (found < 0 && errno == EINTR) return State::kInterrupted;
      if (is_closed_) return State::kClosed;
      is_over = waiting[0].revents != 0;
    }
  } catch (const Lost& lost) {
    return lose(lost.rank, lost.why, kLastWords);
  } catch (const Disagrees& disagrees) {
    other_ = disagrees.rank;
    return State::kDisagree;
  }
}

// Sends and receives what is possible without waiting. Whether the call is done.
bool RankChannel::progress(bool only_header) {
  bool is_done = true;
  bool is_any = false;
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    Peer& peer = peers_[rank];
    if (peer.connection.socket < 0) continue;
    try {
      if (!is_sent(peer)) send(peer);
      receive(peer, only_header);
    } catch (const Lost& lost) {
      throw Lost{static_cast<int>(rank), lost.why};
    }
    if (only_header && peer.in.header_size == kHeader) {
      Header header;
      std::memcpy(&header, peer.in.header, kHeader);
      kind_ = header.kind;
      is_any = true;
    }
    is_done = is_done && is_sent(peer) && peer.in.is_complete;
  }
  return only_header ? is_any : is_done;
}

void RankChannel::prepare(Peer& peer, const RankWord& word, const Parts& parts) {
  Outgoing& out = peer.out;
  std::size_t size = 0;
  for (const auto& part : parts) size += part.size();
  Header header{Header::kMagic, word.kind, 0, size, round_, word.step, word.generation};
  out.left.clear();
  out.at = 0;
  out.left.emplace_back(out.header, kHeader);
  if (out.memory_is_shared && size >= kSharedFrom && size <= kMaxShared) {
    if (!out.memory || out.memory->capacity() < size) {
      close_descriptor(out.descriptor);
      // Somewhat larger, so that batches of slightly different sizes do not all need new memory.
      out.memory = SharedBuffers::make(kBuffers, std::max(kLeastCapacity, std::bit_ceil(size)), out.descriptor);
      out.memory_is_shared = out.memory != nullptr;
      if (out.memory) header.flags |= Header::kNewMemory;
    }
    if (out.memory) {
      header.flags |= Header::kShared;
      std::byte* to = out.memory->buffer(round_ % kBuffers);
      for (const auto& part : parts) {
        if (!part.empty()) std::memcpy(to, part.data(), part.size());
        to += part.size();
      }
    }
  }
  std::memcpy(out.header, &header, kHeader);
  if ((header.flags & Header::kShared) != 0) return;
  for (const auto& part : parts) {
    if (!part.empty()) out.left.push_back(part);
  }
}

void RankChannel::send(Peer& peer) {
  Outgoing& out = peer.out;
  while (out.at < out.left.size()) {
    iovec parts[kMaxParts];
    const std::size_t count = std::min(out.left.size() - out.at, kMaxParts);
    for (std::size_t i = 0; i < count; ++i) {
      const auto& part = out.left[out.at + i];
      parts[i] = {const_cast<std::byte*>(part.data()), part.size()};
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (out.descriptor >= 0) {
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
      cmsghdr* with = CMSG_FIRSTHDR(&message);
      with->cmsg_level = SOL_SOCKET;
      with->cmsg_type = SCM_RIGHTS;
      with->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(with), &out.descriptor, sizeof(int));
    }
    const ssize_t sent = ::sendmsg(peer.connection.socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && would_block(errno)) return;
    if (sent < 0) throw Lost{-1, std::string("it has closed its connection: ") + std::strerror(errno)};
    close_descriptor(out.descriptor);
    auto left = static_cast<std::size_t>(sent);
    while (left > 0) {
      auto& part = out.left[out.at];
      const std::size_t taken = std::min(left, part.size());
      part = part.subspan(taken);
      left -= taken;
      if (part.empty()) ++out.at;
    }
  }
}

void RankChannel::receive(Peer& peer, bool only_header) {
  Incoming& in = peer.in;
  if (in.is_complete) return;
  if (in.header_size < kHeader) receive_header(peer);
  if (in.header_size < kHeader || only_header) return;
  if (!in.is_begun) begin_body(peer);
  while (in.filled < in.size) {
    const ssize_t got = ::recv(peer.connection.socket, in.target + in.filled, in.size - in.filled, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && would_block(errno)) return;
    if (got < 0) throw Lost{-1, std::string("its connection failed: ") + std::strerror(errno)};
    if (got == 0) throw Lost{-1, "it has closed its connection"};
    in.filled += static_cast<std::size_t>(got);
  }
  in.is_complete = true;
}

void RankChannel::receive_header(Peer& peer) {
  Incoming& in = peer.in;
  while (in.header_size < kHeader) {
    iovec part{in.header + in.header_size, kHeader - in.header_size};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (peer.connection.shares_memory) {
      message.msg_control = control;
      message.msg_controllen = sizeof(control);
    }
    const ssize_t got = ::recvmsg(peer.connection.socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && would_block(errno)) return;
    if (got < 0) throw Lost{-1, std::string("its connection failed: ") + std::strerror(errno)};
    if (got == 0) throw Lost{-1, "it has closed its connection"};
    if (peer.connection.shares_memory) {
      for (cmsghdr* with = CMSG_FIRSTHDR(&message); with != nullptr; with = CMSG_NXTHDR(&message, with)) {
        if (with->cmsg_level != SOL_SOCKET || with->cmsg_type != SCM_RIGHTS) continue;
        close_descriptor(in.descriptor);
        std::memcpy(&in.descriptor, CMSG_DATA(with), sizeof(int));
      }
    }
    in.header_size += static_cast<std::size_t>(got);
  }
}

void RankChannel::begin_body(Peer& peer) {
  Incoming& in = peer.in;
  Header header;
  std::memcpy(&header, in.header, kHeader);
  if (header.magic != Header::kMagic || header.size > kMaxMessage) throw Lost{-1, "it sent what no rank sends"};
  if (header.kind != word_.kind || header.step != word_.step || header.generation != word_.generation || header.round != round_) {
    other_word_ = {header.kind, header.step, header.generation};
    other_round_ = header.round;
    throw Disagrees{static_cast<int>(&peer - peers_.data())};
  }
  if ((header.flags & Header::kNewMemory) != 0) {
    in.memory = in.descriptor >= 0 ? SharedBuffers::of(kBuffers, in.descriptor) : nullptr;
    if (!in.memory) throw Lost{-1, "its shared memory cannot be used"};
  }
  close_descriptor(in.descriptor);
  in.is_begun = true;
  if ((header.flags & Header::kShared) != 0) {
    if (!in.memory || in.memory->capacity() < header.size) throw Lost{-1, "its shared memory does not hold what it sent"};
    peer.message = {in.memory, {in.memory->buffer(round_ % kBuffers), header.size}};
    return;
  }
  peer.message = {};
  // A buffer that the program still has, for example to send it on, is not used again.
  auto free = std::find_if(in.buffers.begin(), in.buffers.end(), [](const auto& one) { return one.use_count() == 1; });
  if (free == in.buffers.end()) {
    if (in.buffers.size() >= 2) in.buffers.erase(in.buffers.begin());
    in.buffers.push_back(std::make_shared<Buffer>());
    free = std::prev(in.buffers.end());
  }
  Buffer& buffer = **free;
  if (buffer.capacity < header.size) {
    buffer.data = std::make_unique_for_overwrite<std::byte[]>(header.size);
    buffer.capacity = header.size;
  }
  in.size = header.size;
  in.target = buffer.data.get();
  peer.message = {*free, {in.target, in.size}};
}

}  // namespace monolith
