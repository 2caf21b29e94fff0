// SPDX-License-Identifier: Apache-2.0
// Joins the sidecars of a tensor-parallel model's ranks.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/key_shift.h"

namespace bitdecoding {
namespace {

struct Heads {
  int first = 0;
  int count = 0;
  int total = 0;
};

Status invalid(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }

template <class Int>
bool read_int(std::string_view text, Int* value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, *value);
  return error == std::errc() && stop == end && *value >= 0;
}

// Which heads of the model a part holds: "kv_heads" is "first-last".
Result<Heads> heads_of(const KeyShift& part) {
  const auto range = part.metadata.find("kv_heads");
  const auto total = part.metadata.find("total_kv_heads");
  if (range == part.metadata.end() || total == part.metadata.end()) {
    return invalid(
        fmt::format("'{}' does not say which heads it holds (metadata kv_heads and "
                    "total_kv_heads); only the files FILE.headsA-B that the ranks of a "
                    "tensor-parallel model write can be joined",
                    part.path));
  }
  const std::string_view text = range->second;
  const std::size_t dash = text.find('-');
  Heads heads;
  int last = 0;
  if (dash == std::string_view::npos || !read_int(text.substr(0, dash), &heads.first) ||
      !read_int(text.substr(dash + 1), &last) || !read_int(total->second, &heads.total) ||
      last >= heads.total || std::int64_t{last} - heads.first + 1 != part.num_kv_heads) {
    return Status(StatusCode::kCorrupt,
                  fmt::format("'{}' says that it holds KV heads '{}' of '{}', and its tensor has "
                              "{} heads; expected first-last, so many, within the model's",
                              part.path, range->second, total->second, part.num_kv_heads));
  }
  heads.count = part.num_kv_heads;
  return heads;
}

Status missing_heads(std::int64_t held, std::int64_t total) {
  return {StatusCode::kNotFound,
          fmt::format("the files hold {} of the model's {} KV heads; give the files of all ranks",
                      held, total)};
}

std::string model_of(const KeyShift& part) {
  const auto model = part.metadata.find("model");
  return model == part.metadata.end() ? "" : model->second;
}

Status check_same_model(const KeyShift& first, int first_total, const KeyShift& part, int total) {
  if (part.value_means.empty() != first.value_means.empty()) {
    return invalid(
        fmt::format("of '{}' and '{}' one holds value means and the other does not; "
                    "join files of one run",
                    first.path, part.path));
  }
  if (part.num_layers == first.num_layers && part.head_dim == first.head_dim &&
      total == first_total && model_of(part) == model_of(first)) {
    return {};
  }
  return invalid(fmt::format(
      "'{}' ({} layers, {} KV heads in all, head_dim {}, model '{}') and '{}' ({} layers, {} KV "
      "heads in all, head_dim {}, model '{}') are not parts of one sidecar",
      first.path, first.num_layers, first_total, first.head_dim, model_of(first), part.path,
      part.num_layers, total, part.head_dim, model_of(part)));
}

// Copies a part's heads into `joined`; `owner` says which part a head came from, -1 for none.
Status take_heads(const std::vector<KeyShift>& parts, int index, const Heads& heads,
                  std::vector<int>* owner, KeyShift* joined) {
  const KeyShift& part = parts[static_cast<std::size_t>(index)];
  for (int i = 0; i < heads.count; ++i) {
    const int head = heads.first + i;
    int& from = (*owner)[static_cast<std::size_t>(head)];
    for (int layer = 0; layer < part.num_layers; ++layer) {
      const std::span<const float> source = part.slice(layer, i, 1);
      const std::span<const float> target = joined->slice(layer, head, 1);
      const std::span<const float> values = part.value_slice(layer, i, 1);
      const std::span<const float> target_values = joined->value_slice(layer, head, 1);
      const auto at = target.data() - joined->values.data();
      if (from < 0) {
        std::copy(source.begin(), source.end(), joined->values.begin() + at);
        if (!values.empty()) {
          std::copy(values.begin(), values.end(), joined->value_means.begin() + at);
        }
      } else if (!std::equal(source.begin(), source.end(), target.begin()) ||
                 !std::equal(values.begin(), values.end(), target_values.begin())) {
        return invalid(fmt::format(
            "'{}' and '{}' both hold KV head {}, with different means; join files of one run",
            parts[static_cast<std::size_t>(from)].path, part.path, head));
      }
    }
    if (from < 0) from = index;
  }
  return {};
}

// What the whole says of itself: its number of tokens is the least of any part.
void join_metadata(const std::vector<KeyShift>& parts, KeyShift* joined) {
  joined->metadata = parts.front().metadata;
  joined->metadata.erase("kv_heads");
  joined->metadata.erase("total_kv_heads");
  // Each rank's own, of the heads or probabilities it has seen: no number stands for all.
  for (const char* key : {"skipped_rows", "outlier_channels", "probability_blocks",
                          "probability_layer_taus", "probability_detail"}) {
    joined->metadata.erase(key);
  }
  joined->metadata["joined_parts"] = std::to_string(parts.size());
  std::int64_t least = -1;
  for (const KeyShift& part : parts) {
    const auto tokens = part.metadata.find("tokens");
    std::int64_t value = 0;
    if (tokens != part.metadata.end() && read_int(tokens->second, &value) &&
        (least < 0 || value < least)) {
      least = value;
    }
  }
  if (least >= 0) joined->metadata["tokens"] = std::to_string(least);
}

// tau is one number of the whole model; ranks that chose differently have no common one.
Status check_tau(const std::vector<KeyShift>& parts) {
  for (const KeyShift& part : parts) {
    for (const char* key : {"probability_taus"}) {
      const auto value = [key](const KeyShift& p) {
        const auto found = p.metadata.find(key);
        return found == p.metadata.end() ? std::string("none") : found->second;
      };
      if (value(part) != value(parts.front())) {
        return invalid(
            fmt::format("'{}' has {} {}, and '{}' has {}; the ranks chose different ones, so set "
                        "probability_tau in the recipe and calibrate without it",
                        parts.front().path, key, value(parts.front()), part.path, value(part)));
      }
    }
  }
  return {};
}

}  // namespace

Result<KeyShift> join_key_shift(const std::vector<KeyShift>& parts) {
  if (parts.empty()) return invalid("there are no sidecars to join");
  std::vector<Heads> heads;
  std::int64_t held = 0;
  for (const KeyShift& part : parts) {
    const Result<Heads> own = heads_of(part);
    if (!own.ok()) return own.status();
    heads.push_back(own.value());
    held += own.value().count;
    if (Status s = check_same_model(parts[0], heads[0].total, part, own.value().total); !s.ok()) {
      return s;
    }
  }
  KeyShift joined;
  joined.num_layers = parts[0].num_layers;
  joined.num_kv_heads = heads[0].total;
  joined.head_dim = parts[0].head_dim;
  // Before anything is allocated: the total is a file's word.
  if (held < joined.num_kv_heads) return missing_heads(held, joined.num_kv_heads);
  const auto total = static_cast<std::size_t>(joined.num_kv_heads);
  joined.values.resize(static_cast<std::size_t>(joined.num_layers) * total *
                       static_cast<std::size_t>(joined.head_dim));
  if (!parts[0].value_means.empty()) joined.value_means.resize(joined.values.size());
  std::vector<int> owner(total, -1);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (Status s = take_heads(parts, static_cast<int>(i), heads[i], &owner, &joined); !s.ok()) {
      return s;
    }
  }
  const auto absent = std::count(owner.begin(), owner.end(), -1);
  if (absent > 0) return missing_heads(joined.num_kv_heads - absent, joined.num_kv_heads);
  if (Status s = check_tau(parts); !s.ok()) return s;
  join_metadata(parts, &joined);
  return joined;
}

}  // namespace bitdecoding
