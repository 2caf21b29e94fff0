// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/data_file.h"

#include <fmt/format.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <unordered_map>

namespace bitdecoding::eval {
namespace {

constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

std::string name_list(std::initializer_list<const char*> names) {
  std::string out;
  for (const char* name : names) out += fmt::format("{}'{}'", out.empty() ? "" : " or ", name);
  return out;
}

// The parser's words after its own prefix "[json.exception.parse_error.101] ".
std::string reason(const nlohmann::json::exception& error) {
  const std::string text = error.what();
  const std::size_t end = text.find("] ");
  return end == std::string::npos ? text : text.substr(end + 2);
}

// A file that is one JSON list.
Status read_list(const std::string& path, std::istream& file, Problems& problems,
                 const std::function<void(DataLine&)>& use) {
  nlohmann::json list;
  try {
    list = nlohmann::json::parse(file);
  } catch (const nlohmann::json::exception& error) {
    return {StatusCode::kCorrupt,
            fmt::format("'{}' begins as a JSON list and is none: {}.", path, reason(error))};
  }
  for (std::size_t i = 0; i < list.size(); ++i) {
    DataLine out;
    out.where = fmt::format("{} item {}", path, i + 1);
    out.value = std::move(list[i]);
    if (out.value.is_object()) {
      use(out);
    } else {
      problems.push_back({out.where, "is " + json_kind(out.value) + ", not an object {...}"});
    }
  }
  return {};
}

}  // namespace

std::string json_kind(const nlohmann::json& value) {
  if (value.is_string()) return "a string";
  if (value.is_boolean()) return "true or false";
  if (value.is_number()) return "a number";
  if (value.is_array()) return "a list";
  if (value.is_object()) return "an object";
  return "null";
}

Status read_lines(const std::string& path, Problems& problems,
                  const std::function<void(DataLine&)>& use) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return {StatusCode::kNotFound,
            fmt::format("'{}' cannot be read: {}.", path, std::strerror(errno))};
  }
  if ((file >> std::ws).peek() == '[') return read_list(path, file, problems, use);
  file.clear();
  file.seekg(0);
  std::string text;
  std::uint64_t offset = 0;
  for (int number = 1; std::getline(file, text); ++number) {
    const std::uint64_t begin = offset;
    offset += text.size() + (file.eof() ? 0 : 1);
    std::string_view line = text;
    if (number == 1 && line.starts_with(kByteOrderMark)) line.remove_prefix(kByteOrderMark.size());
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    DataLine out;
    out.where = fmt::format("{} line {}", path, number);
    out.offset = begin + (text.size() - line.size());
    out.bytes = line.size();
    try {
      out.value = nlohmann::json::parse(line);
    } catch (const nlohmann::json::exception& error) {
      problems.push_back({out.where, "is not JSON in UTF-8: " + reason(error)});
      continue;
    }
    if (!out.value.is_object()) {
      problems.push_back({out.where, "is " + json_kind(out.value) + ", not an object {...}"});
      continue;
    }
    use(out);
  }
  if (file.bad()) {
    return {StatusCode::kIo, fmt::format("Reading '{}' failed: {}.", path, std::strerror(errno))};
  }
  return {};
}

Result<nlohmann::json> read_line_at(const std::string& path, std::uint64_t offset,
                                    std::uint64_t bytes) {
  std::ifstream file(path, std::ios::binary);
  std::string text(bytes, '\0');
  if (!file.seekg(static_cast<std::streamoff>(offset)) ||
      !file.read(text.data(), static_cast<std::streamsize>(bytes))) {
    return Status(StatusCode::kIo,
                  fmt::format("'{}' cannot be read at byte {}: it is not the file that the rows "
                              "were read from any more. Start the run again.",
                              path, offset));
  }
  try {
    return nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    return Status(StatusCode::kCorrupt,
                  fmt::format("'{}' has changed since its rows were read (byte {}: {}). Start the "
                              "run again.",
                              path, offset, reason(error)));
  }
}

void Fields::wrong(const std::string& what) {
  if (!problem_) problem_ = RowProblem{line_.where, what};
}

const nlohmann::json* Fields::find(std::initializer_list<const char*> names) const {
  for (const char* name : names) {
    const auto found = line_.value.find(name);
    if (found != line_.value.end() && !found->is_null()) return &*found;
  }
  return nullptr;
}

std::string Fields::optional_text(std::initializer_list<const char*> names) {
  const nlohmann::json* value = find(names);
  if (value == nullptr) return "";
  if (value->is_string()) return value->get<std::string>();
  wrong(fmt::format("{} is {}, not a string", name_list(names), json_kind(*value)));
  return "";
}

std::string Fields::text(std::initializer_list<const char*> names) {
  if (find(names) == nullptr) {
    wrong(fmt::format("has no field {}", name_list(names)));
    return "";
  }
  std::string out = optional_text(names);
  if (out.empty()) wrong(fmt::format("{} is empty", name_list(names)));
  return out;
}

std::string Fields::scalar(std::initializer_list<const char*> names) {
  const nlohmann::json* value = find(names);
  if (value != nullptr && value->is_number_integer()) return value->dump();
  if (value != nullptr && value->is_number()) {
    const double number = value->get<double>();
    if (number == std::floor(number) && std::fabs(number) < 1e15) {
      return fmt::format("{:.0f}", number);
    }
    return value->dump();
  }
  return text(names);
}

std::int64_t Fields::optional_integer(std::initializer_list<const char*> names,
                                      std::int64_t fallback) {
  const nlohmann::json* value = find(names);
  if (value == nullptr) return fallback;
  if (value->is_number_integer()) return value->get<std::int64_t>();
  if (value->is_number_float() && value->get<double>() == std::floor(value->get<double>()) &&
      std::fabs(value->get<double>()) < 1e15) {
    return static_cast<std::int64_t>(value->get<double>());
  }
  wrong(fmt::format("{} is {}, not a whole number", name_list(names), json_kind(*value)));
  return fallback;
}

std::int64_t Fields::integer(std::initializer_list<const char*> names) {
  if (find(names) == nullptr) wrong(fmt::format("has no field {}", name_list(names)));
  return optional_integer(names, 0);
}

Status read_rows(const std::string& path, LoadedRows& loaded,
                 const std::function<BenchmarkRow(const DataLine&, Fields&)>& row) {
  std::unordered_map<std::string, std::string> seen;
  const std::size_t before = loaded.rows.size();
  for (const BenchmarkRow& known : loaded.rows) seen.emplace(known.id, "another file");
  Status status = read_lines(path, loaded.problems, [&](DataLine& line) {
    Fields fields(line);
    BenchmarkRow out = row(line, fields);
    if (!fields.ok()) {
      loaded.problems.push_back(fields.problem());
      return;
    }
    const auto [first, fresh] = seen.emplace(out.id, line.where);
    if (!fresh) {
      loaded.problems.push_back(
          {line.where, fmt::format("has the id '{}' of {}", out.id, first->second)});
      return;
    }
    loaded.rows.push_back(std::move(out));
  });
  if (!status.ok()) return status;
  loaded.files.push_back(path);
  if (loaded.rows.size() == before) {
    return {StatusCode::kCorrupt,
            fmt::format("'{}' has no row that can be used{}.", path,
                        loaded.problems.empty() ? ""
                                                : "; " + loaded.problems.back().where + " " +
                                                      loaded.problems.back().what)};
  }
  return {};
}

std::string find_data(const LoadOptions& options, std::initializer_list<std::string_view> names) {
  for (const std::string_view name : names) {
    std::string path = (std::filesystem::path(options.data_folder) / name).string();
    std::error_code error;
    if (std::filesystem::is_regular_file(path, error)) return path;
  }
  return "";
}

std::vector<MissingItem> missing_data(const LoadOptions& options, std::string_view file,
                                      std::string_view parquet, std::string_view source,
                                      std::string_view licence) {
  if (!find_data(options, {file}).empty()) return {};
  MissingItem item;
  item.what = fmt::format("data file {}", file);
  item.licence = licence;
  if (!parquet.empty() && !find_data(options, {parquet}).empty()) {
    item.how =
        fmt::format("'{}' is there: tools/eval/parquet_to_jsonl.py makes it of that.", parquet);
  } else {
    item.how = fmt::format("tools/eval/stage.py fetches it from the data set {}.", source);
  }
  return {item};
}

Result<LoadedRows> load_file(const LoadOptions& options, std::string_view file,
                             const std::vector<MissingItem>& missing,
                             const std::function<BenchmarkRow(Fields&, int number)>& row) {
  const std::string path = find_data(options, {file});
  if (path.empty()) return no_data(options, missing);
  LoadedRows loaded;
  int number = 0;
  const Status status = read_rows(
      path, loaded, [&](const DataLine&, Fields& fields) { return row(fields, number++); });
  if (!status.ok()) return status;
  return loaded;
}

Status no_data(const LoadOptions& options, const std::vector<MissingItem>& items) {
  std::string text = fmt::format("The data folder '{}' lacks something.", options.data_folder);
  for (const MissingItem& item : items)
    text += fmt::format(" Missing: {}. {}", item.what, item.how);
  return {StatusCode::kNotFound, text};
}

}  // namespace bitdecoding::eval
