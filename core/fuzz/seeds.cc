// Writes the first inputs of each target into a folder, as valid files and records; libFuzzer finds the rest of a corpus from there.
// They are in corpus/ already: this is how they were made.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "../tests/hand_written_message.h"
#include "../tests/http2_client.h"
#include "fuzz.h"
#include "monolith/admission.h"
#include "monolith/framing.h"
#include "monolith/table_file.h"

namespace {

using namespace monolith;

void write(const std::filesystem::path& path, const Bytes& bytes) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

template <typename T>
void put(Bytes& out, T value) {
  std::uint8_t raw[sizeof value];
  std::memcpy(raw, &value, sizeof value);
  out.insert(out.end(), raw, raw + sizeof value);
}

Bytes list(const Bytes& packed, std::uint32_t field) { return Message().data(field, Message().data(1, packed).bytes).bytes; }

void table_files(const std::filesystem::path& folder) {
  for (const int rows : {0, 1, 20}) {
    Table table(fuzz::table_config());
    std::vector<std::int64_t> ids;
    for (int i = 0; i < rows; ++i) ids.push_back(i * 1000003);
    const std::vector<float> gradients(ids.size() * 5, 0.5f);
    const float rates[] = {0.1f, 0.1f};
    UpdateOptions options;
    options.learning_rates = rates;
    options.event_time = 9;
    table.apply_gradients(ids, gradients.data(), options);
    std::filesystem::create_directories(folder);
    const std::string path = (folder / ("rows-" + std::to_string(rows))).string();
    save_table(table, path, "{}", false);
  }
}

void streams(const std::filesystem::path& folder) {
  Bytes tfrecord{1, 20, 0};
  for (const std::string text : {"one", "", "three three"}) {
    const std::size_t start = tfrecord.size();
    put<std::uint64_t>(tfrecord, text.size());
    put(tfrecord, masked_crc32c(tfrecord.data() + start, 8));
    tfrecord.insert(tfrecord.end(), text.begin(), text.end());
    put(tfrecord, masked_crc32c(text.data(), text.size()));
  }
  write(folder / "tfrecord", tfrecord);
  for (const unsigned flags : {0u, 2u, 4u, 8u, 12u, 16u, 28u}) {
    Bytes records{static_cast<std::uint8_t>(flags), 30, 0};
    for (int i = 0; i < 3; ++i) {
      if (flags & 2) put<std::uint64_t>(records, 0x1234 << 8);
      if (flags & 4) put<std::uint64_t>(records, 0), put<std::uint64_t>(records, 5);
      if (flags & 8) put<std::uint64_t>(records, 2), put<std::uint16_t>(records, 0x4142);
      if (flags & 16) put<std::uint64_t>(records, 99);
      put<std::uint64_t>(records, 4);
      put<std::uint32_t>(records, 0x64636261);
    }
    write(folder / ("records-" + std::to_string(flags)), records);
  }
}

void records(const std::filesystem::path& folder) {
  const Bytes ids{1, 2, 0x80, 1};
  const Bytes floats{0, 0, 0x80, 0x3f, 0, 0, 0, 0x40};
  const auto column = [](const std::string& name, const Bytes& one, bool shared) {
    Message message;
    message.text(1, name).data(2, one);
    return shared ? message.number(3, 1).bytes : message.data(2, one).bytes;
  };
  const Bytes line = Message().number(2, 77).bytes;
  const Bytes payloads[] = {
      Message()
          .data(1, Message()
                       .data(1, named("ids", list(ids, 3)))
                       .data(1, named("pair", list(floats, 2)))
                       .data(1, named("name", list({'x', 'y'}, 1)))
                       .data(1, named("tags", list({'z'}, 1)))
                       .bytes)
          .bytes,
      Message()
          .data(1, named("ids", list(ids, 5)))
          .data(1, named("pair", list(floats, 3)))
          .data(1, named("name", list({'x'}, 6)))
          .data(1, named("tags", list({'z'}, 6)))
          .data(3, line)
          .bytes,
      Message()
          .data(1, column("ids", list(ids, 5), false))
          .data(1, column("pair", list(floats, 3), true))
          .data(1, column("tags", list({'z'}, 6), false))
          .data(1, column("__LABEL__", list(floats, 3), true))
          .number(3, 2)
          .bytes,
      Message()
          .data(1, {1, 0, 0, 0, 0, 0, 0xc0, 0})
          .data(9, Message().text(1, "ids").data(4, ids).bytes)
          .data(9, Message().text(1, "pair").data(3, floats).bytes)
          .data(9, Message().text(1, "tags").text(5, "z").text(5, "").bytes)
          .bytes};
  for (unsigned format = 0; format < 4; ++format) {
    for (const unsigned more : {0u, 4u, 8u, 12u}) {
      Bytes input{static_cast<std::uint8_t>(format | more), 3};
      for (int i = 0; i < 3; ++i) {
        put(input, static_cast<std::uint16_t>(payloads[format].size()));
        input.insert(input.end(), payloads[format].begin(), payloads[format].end());
      }
      write(folder / ("format-" + std::to_string(format) + "-" + std::to_string(more)), input);
    }
  }
}

void messages(const std::filesystem::path& folder) {
  const std::string texts[] = {
      R"({"ids": [1, -2, 18446744073709551615], "pair": [0.5, -1e-3], "name": "a\u00e9\ud834\udd1e\n", "tags": ["x", ""]})",
      R"({"lists": [[1], [], [2, 3]], "price": [1.7976931348623157e308, 0.1, 5e-324], "other": {"a": [null, true, {}]}})",
      "{\"ids\": 7, \"pair\": [1, 2], \"name\": \"\xc3\xa9\"} \n",
      R"({"slot_3": [false, true], "name": null})",
      R"({"ids": [1.5]})", R"({"price": [1e999]})", R"({"x": [[[[[[[[]]]]]]]]})", "{\"x\": NaN}", "", "{}"};
  Bytes input{0, 4};
  for (const std::string& text : texts) {
    Bytes alone{0, 0};
    for (Bytes* bytes : {&input, &alone}) {
      put(*bytes, static_cast<std::uint16_t>(text.size()));
      bytes->insert(bytes->end(), text.begin(), text.end());
    }
    write(folder / ("json-" + std::to_string(&text - texts)), alone);
  }
  write(folder / "json-all", input);
  const Bytes payload = Message().data(1, named("ids", list({1, 2}, 5))).bytes;
  for (const unsigned flags : {0u, 4u, 12u, 36u, 52u, 116u}) {
    Bytes message;
    if (flags & 8) put<std::uint64_t>(message, 1);
    if (flags & 16) put<std::uint64_t>(message, 0), put<std::uint64_t>(message, 5);
    if (flags & 32) put<std::uint64_t>(message, 2), put<std::uint16_t>(message, 0x4142);
    if (flags & 64) put<std::uint64_t>(message, 99);
    if (flags & 4) put<std::uint64_t>(message, payload.size());
    message.insert(message.end(), payload.begin(), payload.end());
    Bytes framed{static_cast<std::uint8_t>(flags | 1), 4};
    put(framed, static_cast<std::uint16_t>(message.size()));
    framed.insert(framed.end(), message.begin(), message.end());
    write(folder / ("example-" + std::to_string(flags)), framed);
  }
}

void filters(const std::filesystem::path& folder) {
  SlidingFilter sliding(300, 5, SlotThresholds(3));
  ProbabilisticFilter probabilistic(true, 7, SlotThresholds(3));
  for (const int adds : {0, 1, 100, 1000}) {
    for (int i = 0; i < adds; ++i) sliding.admit(i * 7 % 90, 1), probabilistic.admit(i, 1);
    int kind = 1;
    for (const AdmissionFilter* filter : {static_cast<AdmissionFilter*>(&sliding), static_cast<AdmissionFilter*>(&probabilistic)}) {
      Bytes input{static_cast<std::uint8_t>(kind)};
      for (const std::byte byte : filter->serialize()) input.push_back(static_cast<std::uint8_t>(byte));
      write(folder / (std::to_string(kind--) + "-" + std::to_string(adds)), input);
    }
  }
}

void requests(const std::filesystem::path& folder) {
  const auto write_one = [&](const char* name, std::uint8_t kind, std::uint16_t cut, const Bytes& bytes) {
    Bytes input{kind};
    put(input, cut);
    input.insert(input.end(), bytes.begin(), bytes.end());
    write(folder / name, input);
  };
  const auto bytes = [](const std::string& text) { return Bytes(text.begin(), text.end()); };
  const std::string json =
      R"({"id": "r", "inputs": [{"name": "a", "datatype": "INT64", "shape": [2], "data": [1, -9223372036854775807]},)"
      R"({"name": "b", "shape": [2], "datatype": "INT64", "data": [3, 4]}], "parameters": {"timeout": 9, "route_key": "k"}})";
  write_one("json", 0, 0, bytes(json));
  const std::string head =
      R"({"inputs":[{"name":"a","datatype":"INT64","shape":[1],"parameters":{"binary_data_size":8}},)"
      R"({"name":"b","datatype":"INT64","shape":[1],"parameters":{"binary_data_size":8}}],)"
      R"("parameters":{"binary_data_output":true}})";
  write_one("binary", 3, static_cast<std::uint16_t>(head.size()), bytes(head + std::string(16, '\1')));
  const auto input = [](const char* name) { return Message().text(1, name).text(2, "INT64"); };
  const Bytes typed = Message().data(3, {1, 0x80, 1}).bytes;
  write_one("raw", 1, 0,
            Message().text(1, "m").text(3, "r").data(5, input("a").number(3, 1).bytes).data(5, input("b").data(3, {1}).bytes)
                .data(7, Bytes(8, 1)).data(7, Bytes(8, 2)).bytes);
  write_one("typed", 1, 0, Message().text(1, "m").text(2, "3").data(5, input("a").number(3, 2).data(5, typed).bytes).bytes);
  write_one("post", 2, 0, bytes("POST /v2/models/m/infer HTTP/1.1\r\nHost: a:1\r\nConnection: Keep-Alive\r\nContent-Length: 2\r\n\r\n{}"));
}

void connections(const std::filesystem::path& folder) {
  const auto write_one = [&](const char* name, std::uint8_t choices, const std::string& frames) {
    const std::string bytes = http2::kPreface + frames;
    Bytes input{choices, 50};
    input.insert(input.end(), bytes.begin(), bytes.end());
    write(folder / name, input);
  };
  using namespace http2;
  const std::string settings = frame(kSettings, 0, 0, setting(4, 20)), head = block(usual_fields());
  write_one("calls", 1, settings + call(1, "one") + call(3, std::string(500, 'm')) + frame(kWindowUpdate, 0, 3, u32(600)) + call(5, ""));
  write_one("failures", 2, settings + call(1, "one") + frame(kHeaders, kEndHeaders | kEndStream, 3, head));
  write_one("parts", 5, settings + frame(kHeaders, kPadded | kHasPriority, 1, std::string("\2\0\0\0\0\0", 6) + head.substr(0, 9) + "xx") +
                            frame(kContinuation, kEndHeaders, 1, head.substr(9)) + frame(kData, kPadded, 1, "\1" + framed("parts").substr(0, 6) + "x") +
                            frame(kData, 0, 1, framed("parts").substr(6)) + frame(kHeaders, kEndHeaders | kEndStream, 1, block({{"a", "b"}})));
  write_one("others", 9, settings + frame(kPing, 0, 0, "12345678") + call(1, "") + frame(kPriority, 0, 3, "12345") + frame(kReset, 0, 1, u32(8)) +
                             frame(kGoAway, 0, 0, u32(0) + u32(0)) + frame(kSettings, kAck, 0) + frame(99, 0, 0, "extension"));
  // Huffman codes and the table: RFC 7541, C.4, and a size of the table.
  const std::string coded = "\x20\x3f\xe1\x1f\x82\x86\x84\x41\x8c\xf1\xe3\xc2\xe5\xf2\x3a\x6b\xa0\xab\x90\xf4\xff\xbe";
  write_one("table", 0, settings + frame(kHeaders, kEndHeaders | kEndStream, 1, coded));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::filesystem::path folder = argv[1];
  table_files(folder / "table_file");
  streams(folder / "framing");
  records(folder / "record_parser");
  messages(folder / "messages");
  filters(folder / "admission");
  requests(folder / "requests");
  connections(folder / "grpc");
  return 0;
}
