// SPDX-License-Identifier: Apache-2.0
// Data files of one JSON object a line, and the fields of such an object under the names that
// different releases gave them. What cannot be used is named by file and line; the rest is read.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "benchmarks/benchmark.h"

namespace bitdecoding::eval {

struct DataLine {
  std::string where;  // "FILE line 7"
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  nlohmann::json value;  // an object
};

using Problems = std::vector<RowProblem>;

// Lines end with LF or CRLF; a byte order mark and empty lines are passed over. A line that is no
// JSON object in UTF-8 becomes a problem. `use` gets every other line. A file that begins with a
// bracket is one JSON list: `use` gets its items, which have no offset.
Status read_lines(const std::string& path, Problems& problems,
                  const std::function<void(DataLine&)>& use);

// One line again, by the place that `DataLine` gave.
Result<nlohmann::json> read_line_at(const std::string& path, std::uint64_t offset,
                                    std::uint64_t bytes);

// The fields of a line. The first thing that is wrong is kept; what is asked afterwards does not
// matter any more, so a reader asks for everything and looks at `ok()` once.
class Fields {
 public:
  explicit Fields(const DataLine& line) : line_(line) {}

  // The first of `names` that the line has; a string that is not empty.
  std::string text(std::initializer_list<const char*> names);
  // A string, or a number, as text.
  std::string scalar(std::initializer_list<const char*> names);
  std::int64_t integer(std::initializer_list<const char*> names);
  // Empty, or the fallback, when there is none; a wrong type is still a problem.
  std::string optional_text(std::initializer_list<const char*> names);
  std::int64_t optional_integer(std::initializer_list<const char*> names, std::int64_t fallback);
  const nlohmann::json* find(std::initializer_list<const char*> names) const;

  void wrong(const std::string& what);
  bool ok() const { return !problem_.has_value(); }
  RowProblem problem() const { return problem_.value_or(RowProblem()); }

 private:
  const DataLine& line_;
  std::optional<RowProblem> problem_;
};

// "a string", "a list": what a person calls a JSON value's type.
std::string json_kind(const nlohmann::json& value);

// Reads a file of rows: `row` fills a row from a line's fields, or says what is wrong. Ids must be
// unique; a second row of the same id is a problem. kCorrupt when the file has lines and none is a
// row.
Status read_rows(const std::string& path, LoadedRows& loaded,
                 const std::function<BenchmarkRow(const DataLine&, Fields&)>& row);

// The rows of the one file that a benchmark is; `row` also gets the number of the line among those
// that are objects, from 0. Without the file the error that `missing` spells out.
Result<LoadedRows> load_file(const LoadOptions& options, std::string_view file,
                             const std::vector<MissingItem>& missing,
                             const std::function<BenchmarkRow(Fields&, int number)>& row);

// The path of the first of these files that is in the data folder; empty when none is.
std::string find_data(const LoadOptions& options, std::initializer_list<std::string_view> names);

// What is missing when `file` is not in the data folder: an item that says where it comes from, or
// that the `parquet` beside it only has to be converted.
std::vector<MissingItem> missing_data(const LoadOptions& options, std::string_view file,
                                      std::string_view parquet, std::string_view source,
                                      std::string_view licence);
// The same as an error of `load`.
Status no_data(const LoadOptions& options, const std::vector<MissingItem>& items);

}  // namespace bitdecoding::eval
