#include <nanobind/nanobind.h>

#include <cstdint>
#include <span>
#include <string_view>

#include "module.h"
#include "monolith/infer_request.h"

namespace nb = nanobind;
using namespace nb::literals;
using monolith::InferRequest;
using monolith::InferRequestReader;

namespace {

nb::str text(std::string_view value) { return nb::str(value.data(), value.size()); }

// The interpreter's lock is kept: most requests are read in less time than it takes to release it.
class Reader {
 public:
  // (names, ids as bytes, rows, id, parameters), or None.
  nb::object json(const nb::bytes& body) { return found(reader_.json(bytes_of(body))); }

  nb::object binary(const nb::bytes& body, std::size_t json_bytes) {
    const auto all = bytes_of(body);
    if (json_bytes > all.size()) return nb::none();
    return found(reader_.binary(all.first(json_bytes), all.subspan(json_bytes)));
  }

  // With the model, its version, and whether there are raw contents behind them.
  nb::object message(const nb::bytes& message) {
    const InferRequest* const request = reader_.message(bytes_of(message));
    if (request == nullptr) return nb::none();
    return nb::make_tuple(names(*request), ids(*request), request->rows, text(request->id), parameters(*request),
                          text(request->model), text(request->version), request->raw);
  }

 private:
  static std::span<const std::uint8_t> bytes_of(const nb::bytes& data) {
    return {static_cast<const std::uint8_t*>(data.data()), data.size()};
  }

  nb::object found(const InferRequest* request) {
    if (request == nullptr) return nb::none();
    return nb::make_tuple(names(*request), ids(*request), request->rows, text(request->id), parameters(*request));
  }

  // The same tuple as long as clients send the same names, so that comparing them is quick.
  nb::object names(const InferRequest& request) {
    if (!names_.is_valid() || !reader_.same_names()) {
      names_ = {};  // if there is no memory for the new ones, the old ones must not stay
      nb::list listed;
      for (const std::string_view name : request.names) listed.append(text(name));
      names_ = nb::tuple(listed);
    }
    return names_;
  }

  static nb::object ids(const InferRequest& request) {
    return nb::bytearray(request.ids.data(), request.ids.size() * sizeof(request.ids[0]));
  }

  static nb::object parameters(const InferRequest& request) {
    nb::dict parameters;
    if (request.binary_output) parameters["binary_data_output"] = *request.binary_output;
    if (request.timeout) parameters["timeout"] = *request.timeout;
    if (request.route_key) parameters["route_key"] = text(*request.route_key);
    return parameters;
  }

  InferRequestReader reader_;
  nb::object names_;
};

}  // namespace

void init_infer(nb::module_& m) {
  nb::class_<Reader>(m, "InferRequestReader")
      .def(nb::init<>())
      .def("json", &Reader::json, "body"_a,
           nb::sig("def json(self, body: bytes) -> tuple[tuple[str, ...], bytearray, int, str, dict[str, bool | int | str]] | None"),
           "Names, ids by column, rows, id and parameters. None if another reader has to read it.")
      .def("binary", &Reader::binary, "body"_a, "json_bytes"_a,
           nb::sig("def binary(self, body: bytes, json_bytes: int)"
                   " -> tuple[tuple[str, ...], bytearray, int, str, dict[str, bool | int | str]] | None"),
           "The same of JSON of `json_bytes` and the tensors behind it.")
      .def("message", &Reader::message, "message"_a,
           nb::sig("def message(self, message: bytes)"
                   " -> tuple[tuple[str, ...], bytearray, int, str, dict[str, bool | int | str], str, str, bool] | None"),
           "The same of a message of gRPC, with the model, its version, and whether contents are raw.");
}
