#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <memory>

#include "module.h"
#include "monolith/grpc_connection.h"

namespace nb = nanobind;
using namespace nb::literals;
using monolith::GrpcConnection;
using monolith::GrpcLimits;
using monolith::GrpcMemory;
using monolith::GrpcRequest;

namespace {

// Headers may be any bytes.
nb::object latin1(std::string_view text) {
  return nb::steal(PyUnicode_DecodeLatin1(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr));
}

nb::tuple request_of(const GrpcRequest& request) {
  nb::dict metadata;
  for (const auto& [name, value] : request.metadata) metadata[latin1(name)] = latin1(value);
  const std::string_view message = request.message();
  return nb::make_tuple(request.stream, request.arrived, latin1(request.path), metadata, nb::bytes(message.data(), message.size()),
                        request.is_compressed());
}

// The interpreter's lock is kept: a read of a socket is handled in microseconds.
nb::list receive(GrpcConnection& connection, const nb::bytes& data, double now) {
  nb::list found;
  for (const GrpcRequest& request : connection.receive({static_cast<const std::uint8_t*>(data.data()), data.size()}, now)) {
    found.append(request_of(request));
  }
  return found;
}

}  // namespace

void init_grpc(nb::module_& m) {
  nb::class_<GrpcMemory>(m, "GrpcMemory")
      .def("__init__", [](GrpcMemory* self, std::size_t limit) { new (self) GrpcMemory{.limit = limit}; }, "limit"_a)
      .def_ro("held", &GrpcMemory::held);
  nb::class_<GrpcConnection>(m, "GrpcConnection")
      .def(
          "__init__",
          [](GrpcConnection* self, std::shared_ptr<GrpcMemory> memory, double now, std::uint32_t max_streams,
             std::size_t max_message_bytes, double request_secs) {
            GrpcLimits limits;
            limits.max_streams = max_streams;
            limits.max_message_bytes = max_message_bytes;
            limits.request_secs = request_secs;
            new (self) GrpcConnection(limits, std::move(memory), now);
          },
          "memory"_a, "now"_a, nb::kw_only(), "max_streams"_a, "max_message_bytes"_a, "request_secs"_a)
      .def("receive", &receive, "data"_a, "now"_a,
           nb::sig("def receive(self, data: bytes, now: float) -> list[tuple[int, float, str, dict[str, str], bytes, bool]]"),
           "The requests that are now complete: stream, arrival, path, metadata, message, and whether it is compressed.")
      .def("answer", [](GrpcConnection& self, std::uint32_t stream, const nb::bytes& message) {
             self.answer(stream, {message.c_str(), message.size()});
           }, "stream"_a, "message"_a)
      .def("fail", [](GrpcConnection& self, std::uint32_t stream, std::uint8_t status, std::string_view text) {
             self.fail(stream, monolith::GrpcStatus{status}, text);
           }, "stream"_a, "status"_a, "text"_a)
      .def("is_open", &GrpcConnection::is_open, "stream"_a, "Whether the call waits for its answer.")
      .def("expire", &GrpcConnection::expire, "now"_a, "End what has taken too long.")
      .def("go_away", &GrpcConnection::go_away, "Accept no further calls.")
      .def("take_output", [](GrpcConnection& self) {
             const std::string output = self.take_output();
             return nb::bytes(output.data(), output.size());
           }, "What is to be sent.")
      .def_prop_ro("open_streams", &GrpcConnection::open_streams)
      .def_prop_ro("is_over", &GrpcConnection::is_over, "Whether the connection is closed when the output is sent.")
      .def_prop_ro("has_failed", &GrpcConnection::has_failed, "Whether the client has broken the protocol or a limit.");
}
