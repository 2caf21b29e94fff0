// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "io/file.h"
#include "numeric/bf16.h"

namespace bitdecoding {
namespace {

using Json = nlohmann::json;

static_assert(std::endian::native == std::endian::little,
              "tensors are read as the machine's own bytes, and the file is little endian");

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr std::size_t kMaxDimensions = 8;
constexpr std::string_view kLfsPrefix = "version https://git-lfs";

constexpr std::array<std::pair<const char*, int>, 15> kDtypeBytes = {{{"BOOL", 1},
                                                                      {"U8", 1},
                                                                      {"I8", 1},
                                                                      {"F8_E4M3", 1},
                                                                      {"F8_E5M2", 1},
                                                                      {"F8_E8M0", 1},
                                                                      {"I16", 2},
                                                                      {"U16", 2},
                                                                      {"F16", 2},
                                                                      {"BF16", 2},
                                                                      {"I32", 4},
                                                                      {"U32", 4},
                                                                      {"F32", 4},
                                                                      {"I64", 8},
                                                                      {"F64", 8}}};

int dtype_size(std::string_view dtype) {
  if (dtype == "U64") return 8;
  for (const auto& [name, bytes] : kDtypeBytes) {
    if (dtype == name) return bytes;
  }
  return 0;
}

Status corrupt(const ByteSource& source, std::string message) {
  return {StatusCode::kCorrupt, fmt::format("'{}': {}", source.name(), message)};
}

// What the header's text says, before it is compared with the file.
struct Header {
  std::string text;
  std::uint64_t data_begin = 0;  // file offset of the first tensor byte

  // File offset of the entry of a tensor; the header's begin when its name is written with escapes.
  std::uint64_t offset_of(const std::string& name) const {
    const std::size_t at = text.find("\"" + name + "\"");
    return kLengthBytes + (at == std::string::npos ? 0 : at);
  }
};

Result<Header> read_header(const ByteSource& source) {
  const std::uint64_t size = source.size();
  std::array<std::uint8_t, kLfsPrefix.size()> begin{};
  if (size >= begin.size()) {
    if (Status s = source.read(0, begin); !s.ok()) return s;
    if (std::memcmp(begin.data(), kLfsPrefix.data(), begin.size()) == 0) {
      return corrupt(source,
                     "this is a git-lfs pointer (a text file of about 130 bytes), not the tensors "
                     "themselves; fetch them with `git lfs pull`");
    }
  }
  if (size < kLengthBytes) {
    return corrupt(source, fmt::format("the file is {} bytes long and ends inside the header "
                                       "length (bytes 0 to 7); it is truncated or no safetensors "
                                       "file",
                                       size));
  }
  std::array<std::uint8_t, kLengthBytes> length_bytes{};
  if (Status s = source.read(0, length_bytes); !s.ok()) return s;
  const auto length = std::bit_cast<std::uint64_t>(length_bytes);
  if (length < 2) {
    return corrupt(source, fmt::format("the header length at byte 0 is {}; the shortest header, "
                                       "'{{}}', has 2 bytes",
                                       length));
  }
  if (length > kMaxHeaderBytes) {
    return corrupt(source, fmt::format("the header length at byte 0 is {}, above the format's "
                                       "limit of {}; this is no safetensors file",
                                       length, kMaxHeaderBytes));
  }
  if (length > size - kLengthBytes) {
    return corrupt(source, fmt::format("the header at byte 8 claims {} bytes, and the file ends at "
                                       "byte {}; it is truncated",
                                       length, size));
  }
  Header header;
  header.text.resize(length);
  header.data_begin = kLengthBytes + length;
  if (Status s =
          source.read(kLengthBytes, {reinterpret_cast<std::uint8_t*>(header.text.data()), length});
      !s.ok()) {
    return s;
  }
  return header;
}

Result<Json> parse_header(const ByteSource& source, const Header& header) {
  constexpr int kDeepest = 3;  // {"tensor": {"shape": [
  std::map<std::string, int> names;
  std::string twice;
  bool deep = false;
  const auto observe = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth >= kDeepest &&
        (event == Json::parse_event_t::object_start || event == Json::parse_event_t::array_start)) {
      deep = true;
    }
    if (event == Json::parse_event_t::key && depth == 1) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (++names[key] > 1 && twice.empty()) twice = key;
    }
    return depth <= kDeepest;
  };
  try {
    Json json = Json::parse(header.text.begin(), header.text.end(), observe);
    if (deep) return corrupt(source, "the header at byte 8 is nested deeper than tensors need");
    if (!json.is_object()) {
      return corrupt(source, "the header at byte 8 is not a JSON object");
    }
    if (!twice.empty()) {
      return corrupt(source, fmt::format("the header names the tensor '{}' twice, first at byte {}",
                                         twice, header.offset_of(twice)));
    }
    return json;
  } catch (const Json::parse_error& error) {
    return corrupt(source, fmt::format("the header is not valid JSON at byte {}",
                                       kLengthBytes + (error.byte > 0 ? error.byte - 1 : 0)));
  } catch (const Json::exception&) {
    return corrupt(source, "the header at byte 8 holds a number outside JSON's range");
  }
}

std::optional<std::uint64_t> whole_number(const Json& json) {
  if (json.is_number_unsigned()) return json.get<std::uint64_t>();
  return std::nullopt;  // a negative or fractional number, or no number
}

Result<std::uint64_t> shape_bytes(const ByteSource& source, const Header& header, const Json& shape,
                                  int element_bytes, SafetensorsEntry* entry) {
  const std::uint64_t at = header.offset_of(entry->name);
  if (!shape.is_array() || shape.size() > kMaxDimensions) {
    return corrupt(source, fmt::format("tensor '{}' at byte {} has no shape of at most {} "
                                       "dimensions",
                                       entry->name, at, kMaxDimensions));
  }
  std::uint64_t bytes = static_cast<std::uint64_t>(element_bytes);
  for (const Json& dimension : shape) {
    const std::optional<std::uint64_t> n = whole_number(dimension);
    if (!n || *n > std::uint64_t{std::numeric_limits<std::int64_t>::max()} ||
        __builtin_mul_overflow(bytes, *n, &bytes)) {
      return corrupt(source, fmt::format("tensor '{}' at byte {} has a dimension that is negative, "
                                         "no integer or too large",
                                         entry->name, at));
    }
    entry->shape.push_back(static_cast<std::int64_t>(*n));
  }
  return bytes;
}

Result<SafetensorsEntry> read_entry(const ByteSource& source, const Header& header,
                                    const std::string& name, const Json& json) {
  SafetensorsEntry entry;
  entry.name = name;
  const std::uint64_t at = header.offset_of(name);
  if (!json.is_object() || !json.contains("dtype") || !json["dtype"].is_string() ||
      !json.contains("shape") || !json.contains("data_offsets")) {
    return corrupt(source, fmt::format("tensor '{}' at byte {} must have dtype, shape and "
                                       "data_offsets",
                                       name, at));
  }
  entry.dtype = json["dtype"].get<std::string>();
  const int element_bytes = dtype_size(entry.dtype);
  if (element_bytes == 0) {
    return corrupt(source, fmt::format("tensor '{}' at byte {} has the unknown dtype '{}'", name,
                                       at, entry.dtype));
  }
  const Result<std::uint64_t> bytes =
      shape_bytes(source, header, json["shape"], element_bytes, &entry);
  if (!bytes.ok()) return bytes.status();
  const Json& offsets = json["data_offsets"];
  const bool pair = offsets.is_array() && offsets.size() == 2;
  const std::optional<std::uint64_t> begin = pair ? whole_number(offsets[0]) : std::nullopt;
  const std::optional<std::uint64_t> end = pair ? whole_number(offsets[1]) : std::nullopt;
  if (!begin || !end || *begin > *end) {
    return corrupt(source, fmt::format("data_offsets of tensor '{}' at byte {} must be two "
                                       "ascending byte offsets",
                                       name, at));
  }
  const std::uint64_t data_bytes = source.size() - header.data_begin;
  if (*end > data_bytes) {
    return corrupt(source, fmt::format("tensor '{}' at byte {} ends at byte {} of the data, which "
                                       "has {} bytes from byte {} on; the file is truncated",
                                       name, at, *end, data_bytes, header.data_begin));
  }
  entry.offset = header.data_begin + *begin;
  entry.bytes = *end - *begin;
  if (entry.bytes != bytes.value()) {
    return corrupt(source, fmt::format("tensor '{}' at byte {} needs {} bytes for its shape and "
                                       "dtype {}, and its data_offsets span {}",
                                       name, at, bytes.value(), entry.dtype, entry.bytes));
  }
  return entry;
}

// The format wants the tensors to cover the data without gaps and overlaps.
Status check_cover(const ByteSource& source, const Header& header,
                   const std::vector<SafetensorsEntry>& tensors) {
  std::uint64_t expected = header.data_begin;
  for (const SafetensorsEntry& entry : tensors) {
    if (entry.offset != expected) {
      return corrupt(source,
                     fmt::format("tensor '{}' begins at byte {}, where {}; expected byte {}",
                                 entry.name, entry.offset,
                                 entry.offset < expected ? "it overlaps the tensor before it"
                                                         : "a hole lies before it",
                                 expected));
    }
    expected += entry.bytes;
  }
  if (expected != source.size()) {
    return corrupt(source, fmt::format("the tensors end at byte {}, and the file goes on to byte "
                                       "{}",
                                       expected, source.size()));
  }
  return {};
}

Status read_metadata(const ByteSource& source, const Header& header, const Json& json,
                     std::map<std::string, std::string>* metadata) {
  if (json.is_object()) {
    bool texts = true;
    for (const auto& [key, value] : json.items()) {
      if (value.is_string()) (*metadata)[key] = value.get<std::string>();
      texts = texts && value.is_string();
    }
    if (texts) return {};
  }
  return corrupt(source, fmt::format("__metadata__ at byte {} must map text to text",
                                     header.offset_of("__metadata__")));
}

}  // namespace

const SafetensorsEntry* SafetensorsIndex::find(std::string_view name) const {
  for (const SafetensorsEntry& entry : tensors) {
    if (entry.name == name) return &entry;
  }
  return nullptr;
}

Result<SafetensorsIndex> read_safetensors_index(const ByteSource& source) {
  Result<Header> header = read_header(source);
  if (!header.ok()) return header.status();
  Result<Json> json = parse_header(source, header.value());
  if (!json.ok()) return json.status();
  SafetensorsIndex index;
  for (const auto& [name, value] : json.value().items()) {
    if (name == "__metadata__") {
      if (Status s = read_metadata(source, header.value(), value, &index.metadata); !s.ok()) {
        return s;
      }
      continue;
    }
    Result<SafetensorsEntry> entry = read_entry(source, header.value(), name, value);
    if (!entry.ok()) return entry.status();
    index.tensors.push_back(entry.take());
  }
  std::sort(index.tensors.begin(), index.tensors.end(), [](const auto& a, const auto& b) {
    return a.offset != b.offset ? a.offset < b.offset : a.bytes < b.bytes;
  });
  if (Status s = check_cover(source, header.value(), index.tensors); !s.ok()) return s;
  return index;
}

Result<std::vector<float>> read_float_tensor(const ByteSource& source,
                                             const SafetensorsEntry& entry) {
  const bool f32 = entry.dtype == "F32";
  if (!f32 && entry.dtype != "BF16" && entry.dtype != "F16") {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("'{}': tensor '{}' has dtype {}; expected F32, BF16 or F16",
                              source.name(), entry.name, entry.dtype));
  }
  // The index has found these bytes in the file, so their number is no mere claim.
  std::vector<std::uint8_t> bytes(entry.bytes);
  if (Status s = source.read(entry.offset, bytes); !s.ok()) return s;
  const std::size_t width = f32 ? 4 : 2;
  std::vector<float> values(bytes.size() / width);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (f32) {
      std::memcpy(&values[i], bytes.data() + 4 * i, 4);
    } else {
      std::uint16_t half = 0;
      std::memcpy(&half, bytes.data() + 2 * i, 2);
      values[i] = entry.dtype == "BF16" ? decode_bf16(half) : decode_f16(half);
    }
    if (!std::isfinite(values[i])) {
      return corrupt(source, fmt::format("tensor '{}' holds {} at byte {} (element {})", entry.name,
                                         std::isnan(values[i]) ? "NaN" : "infinity",
                                         entry.offset + i * width, i));
    }
  }
  return values;
}

Result<std::vector<std::int8_t>> read_int8_tensor(const ByteSource& source,
                                                  const SafetensorsEntry& entry) {
  if (entry.dtype != "I8") {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("'{}': tensor '{}' has dtype {}; expected I8", source.name(),
                              entry.name, entry.dtype));
  }
  std::vector<std::int8_t> values(entry.bytes);
  const std::span<std::uint8_t> out(reinterpret_cast<std::uint8_t*>(values.data()), values.size());
  if (Status s = source.read(entry.offset, out); !s.ok()) return s;
  return values;
}

Result<std::vector<double>> read_double_tensor(const ByteSource& source,
                                               const SafetensorsEntry& entry) {
  if (entry.dtype != "F64") {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("'{}': tensor '{}' has dtype {}; expected F64", source.name(),
                              entry.name, entry.dtype));
  }
  std::vector<double> values(entry.bytes / sizeof(double));
  const std::span<std::uint8_t> out(reinterpret_cast<std::uint8_t*>(values.data()), entry.bytes);
  if (Status s = source.read(entry.offset, out); !s.ok()) return s;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) {
      return corrupt(source, fmt::format("tensor '{}' holds {} (element {})", entry.name,
                                         std::isnan(values[i]) ? "NaN" : "infinity", i));
    }
  }
  return values;
}

Status write_safetensors(const std::string& path, const std::vector<SafetensorsTensor>& tensors,
                         const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json json;
  json["__metadata__"] = metadata;
  std::uint64_t begin = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    const std::uint64_t end = begin + tensor.bytes.size();
    json[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}};
    begin = end;
  }
  std::string header = json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const auto length = std::bit_cast<std::array<char, 8>>(std::uint64_t{header.size()});
  std::string file(length.data(), length.size());
  file += header;
  for (const SafetensorsTensor& tensor : tensors) {
    file.append(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
  }
  return write_file_atomic(path, file);
}

}  // namespace bitdecoding
