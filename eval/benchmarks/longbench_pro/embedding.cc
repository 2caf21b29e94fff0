// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/longbench_pro/embedding.h"

#include <fmt/format.h>
#include <httplib.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "benchmarks/text/unicode.h"

namespace bitdecoding::eval {
namespace {

Status failed(const std::string& endpoint, const std::string& why) {
  return {StatusCode::kIo,
          fmt::format("The embedding server at '{}' {}. Give --embedding-endpoint an OpenAI-style "
                      "server of an embedding model, http://HOST:PORT.",
                      endpoint, why)};
}

// A body that is JSON, or what went wrong.
Result<nlohmann::json> body_of(const std::string& endpoint, const httplib::Result& response) {
  if (!response) return failed(endpoint, "does not answer");
  if (response->status != 200) {
    return failed(endpoint, fmt::format("answers with status {}: {}", response->status,
                                        valid_utf8(response->body.substr(0, 200))));
  }
  nlohmann::json body = nlohmann::json::parse(response->body, nullptr, false);
  if (!body.is_object() || !body.contains("data") || !body["data"].is_array()) {
    return failed(endpoint, "answers with something else than {\"data\": [...]}");
  }
  return body;
}

Result<std::string> first_model(httplib::Client& client, const std::string& endpoint) {
  const Result<nlohmann::json> body = body_of(endpoint, client.Get("/v1/models"));
  if (!body.ok()) return body.status();
  const nlohmann::json& data = body.value()["data"];
  if (data.empty() || !data[0].is_object() || !data[0].contains("id") ||
      !data[0]["id"].is_string()) {
    return failed(endpoint, "names no model");
  }
  return data[0]["id"].get<std::string>();
}

Result<std::vector<std::vector<double>>> embeddings(httplib::Client& client,
                                                    const std::string& endpoint,
                                                    const std::string& model,
                                                    const std::vector<std::string>& texts) {
  const nlohmann::json request = {{"model", model}, {"input", texts}};
  const Result<nlohmann::json> body = body_of(
      endpoint, client.Post("/v1/embeddings",
                            request.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace),
                            "application/json"));
  if (!body.ok()) return body.status();
  std::vector<std::vector<double>> out(texts.size());
  std::size_t place = 0;
  for (const nlohmann::json& item : body.value()["data"]) {
    const bool shaped = item.is_object() && item.contains("embedding") &&
                        item["embedding"].is_array() && !item["embedding"].empty();
    const bool numbered = shaped && item.contains("index") && item["index"].is_number_unsigned();
    const std::size_t index =
        numbered ? item["index"].get<std::size_t>() : (shaped ? place : texts.size());
    ++place;
    if (index >= texts.size())
      return failed(endpoint, "answers with something else than embeddings");
    for (const nlohmann::json& x : item["embedding"]) {
      if (!x.is_number()) return failed(endpoint, "answers with an embedding that is no numbers");
      out[index].push_back(x.get<double>());
    }
  }
  if (std::any_of(out.begin(), out.end(),
                  [&](const auto& it) { return it.empty() || it.size() != out[0].size(); })) {
    return failed(endpoint, "answers with embeddings of fewer texts than it was asked for");
  }
  return out;
}

double cosine(const std::vector<double>& a, const std::vector<double>& b) {
  double dot = 0.0;
  double aa = 0.0;
  double bb = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    dot += a[i] * b[i];
    aa += a[i] * a[i];
    bb += b[i] * b[i];
  }
  return aa > 0.0 && bb > 0.0 ? dot / std::sqrt(aa * bb) : 0.0;
}

}  // namespace

Result<double> best_similarity(const std::string& endpoint, const std::string& model,
                               const std::vector<std::string>& others, const std::string& text) {
  httplib::Client client(endpoint);
  if (!client.is_valid()) return failed(endpoint, "has no address that can be read");
  client.set_read_timeout(300, 0);
  std::string name = model;
  if (name.empty()) {
    Result<std::string> first = first_model(client, endpoint);
    if (!first.ok()) return first.status();
    name = first.take();
  }
  std::vector<std::string> texts = others;
  texts.push_back(text);
  const auto all = embeddings(client, endpoint, name, texts);
  if (!all.ok()) return all.status();
  double best = -1.0;
  for (std::size_t i = 0; i < others.size(); ++i) {
    best = std::max(best, cosine(all.value()[i], all.value().back()));
  }
  return best;
}

}  // namespace bitdecoding::eval
