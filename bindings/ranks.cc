#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "arrays.h"
#include "module.h"
#include "monolith/error.h"
#include "monolith/rank_channel.h"
#include "monolith/rank_watch.h"

namespace nb = nanobind;
using monolith::RankChannel;
using monolith::RankLoss;
using monolith::RankWatch;
using monolith::RankWord;

namespace {

using State = RankChannel::State;
using LossTuple = std::tuple<int, int, std::string, int>;

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000.0));
}

LossTuple as_tuple(const RankLoss& loss) { return {static_cast<int>(loss.kind), loss.rank, loss.why, loss.told_by}; }

// The bytes of Python objects, which stay where they are for the length of a call.
class Views {
 public:
  Views() = default;
  Views(const Views&) = delete;
  Views& operator=(const Views&) = delete;
  ~Views() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
  }

  std::vector<RankChannel::Parts> of(const nb::list& out) {
    std::size_t count = 0;
    for (nb::handle parts : out) count += nb::len(parts);
    views_.reserve(count);
    std::vector<RankChannel::Parts> found;
    found.reserve(nb::len(out));
    for (nb::handle parts : out) {
      auto& of_rank = found.emplace_back();
      for (nb::handle part : parts) {
        Py_buffer view;
        if (PyObject_GetBuffer(part.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
        views_.push_back(view);
        of_rank.emplace_back(static_cast<const std::byte*>(view.buf), static_cast<std::size_t>(view.len));
      }
    }
    return found;
  }

 private:
  std::vector<Py_buffer> views_;
};

// Waits without the interpreter's lock, and lets Python handle signals. Not `Unlocked`: a fork must not wait for other ranks.
template <typename Wait>
State wait_unlocked(double seconds, const Wait& wait) {
  const auto deadline = std::chrono::steady_clock::now() + milliseconds(seconds);
  while (true) {
    State state;
    {
      const nb::gil_scoped_release release;
      const auto left = deadline - std::chrono::steady_clock::now();
      state = wait(std::chrono::ceil<std::chrono::milliseconds>(left));
    }
    if (state != State::kInterrupted) return state;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

nb::object as_array(const RankChannel::Message& message) {
  auto owner = std::make_unique<RankChannel::Message>(message);
  auto* data = const_cast<std::byte*>(message.data.data());
  return nb::cast(nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>>(
      reinterpret_cast<std::uint8_t*>(data), {message.data.size()}, keep(std::move(owner))));
}

nb::tuple exchange(RankChannel& self, const RankWord& word, const nb::list& out, double seconds) {
  Views views;
  const auto parts = views.of(out);
  State state;
  {
    const nb::gil_scoped_release release;
    state = self.begin(word, parts);
  }
  if (state == State::kDone) state = wait_unlocked(seconds, [&](auto left) { return self.wait(left); });
  nb::list messages;
  if (state == State::kDone) {
    for (std::size_t rank = 0; rank < parts.size(); ++rank) messages.append(as_array(self.message(rank)));
  }
  return nb::make_tuple(static_cast<int>(state), messages);
}

}  // namespace

void init_ranks(nb::module_& m) {
  nb::class_<RankWatch>(m, "RankWatch", "Heartbeats between ranks, and news of those that are lost.")
      .def(
          "__init__",
          [](RankWatch* self, int rank, std::vector<int> sockets, double silence_secs) {
            new (self) RankWatch(rank, std::move(sockets), milliseconds(silence_secs));
          },
          nb::arg("rank"), nb::arg("sockets"), nb::arg("silence_secs"), "Takes over one connected socket for each rank, -1 for this one.")
      .def(
          "report",
          [](RankWatch& self, int kind, int rank, const std::string& why) {
            const nb::gil_scoped_release release;
            return as_tuple(self.report({static_cast<RankLoss::Kind>(kind), rank, why, -1}));
          },
          nb::arg("kind"), nb::arg("rank"), nb::arg("why"), "Makes a loss known to all ranks; returns the one that was known first.")
      .def("fail", &RankWatch::fail, nb::arg("why"), nb::call_guard<nb::gil_scoped_release>(), "Tells the others that this rank ends.")
      .def(
          "loss",
          [](const RankWatch& self) {
            const auto loss = self.loss();
            return loss ? std::optional(as_tuple(*loss)) : std::nullopt;
          },
          "The loss that is known: kind, rank, reason, and the rank that noticed it.")
      .def(
          "is_heard",
          [](const RankWatch& self, int rank, double recent_secs) { return self.is_heard(rank, milliseconds(recent_secs)); },
          nb::arg("rank"), nb::arg("recent_secs"), "Whether a rank is connected and was heard from recently.")
      .def("close", &RankWatch::close, nb::call_guard<nb::gil_scoped_release>(), "Ends the thread and the connections.")
      .def("abandon", &RankWatch::abandon, "Closes the copies of a forked child.");

  nb::class_<RankChannel>(m, "RankChannel", "Exchanges of messages between all ranks.")
      .def(
          "__init__",
          [](RankChannel* self, const std::vector<int>& sockets, const std::vector<bool>& shares_memory, RankWatch& watch) {
            if (sockets.size() != shares_memory.size()) throw monolith::InvalidArgument("shares_memory: expected one for each socket");
            std::vector<RankChannel::Connection> connections;
            for (std::size_t rank = 0; rank < sockets.size(); ++rank) connections.push_back({sockets[rank], shares_memory[rank]});
            new (self) RankChannel(std::move(connections), watch);
          },
          nb::arg("sockets"), nb::arg("shares_memory"), nb::arg("watch"), nb::keep_alive<1, 4>(),
          "Takes over one connected socket for each rank, -1 for this one.")
      .def(
          "exchange",
          [](RankChannel& self, int kind, std::int64_t step, std::uint64_t generation, const nb::list& out, double timeout_secs) {
            return exchange(self, {static_cast<std::uint16_t>(kind), step, generation}, out, timeout_secs);
          },
          nb::arg("kind"), nb::arg("step"), nb::arg("generation"), nb::arg("out"), nb::arg("timeout_secs"),
          "Sends the parts out[r] to each rank r; returns the state and the message of each rank.")
      .def(
          "next_kind",
          [](RankChannel& self, double timeout_secs) {
            const State state = wait_unlocked(timeout_secs, [&](auto left) { return self.wait_for_kind(left); });
            return std::tuple(static_cast<int>(state), static_cast<int>(self.kind()));
          },
          nb::arg("timeout_secs"), "Waits for the next message of any rank; returns the state and its kind.")
      .def_prop_ro("loss", [](const RankChannel& self) { return as_tuple(self.loss()); })
      .def_prop_ro("other",
                   [](const RankChannel& self) {
                     const RankWord& word = self.other_word();
                     return std::tuple(self.other(), static_cast<int>(word.kind), word.step, word.generation, self.other_round());
                   })
      .def_prop_ro("round", &RankChannel::round)
      .def("close", &RankChannel::close, nb::call_guard<nb::gil_scoped_release>(), "Ends the connections and calls that wait.")
      .def("abandon", &RankChannel::abandon, "Closes the copies of a forked child.");
}
