// SPDX-License-Identifier: Apache-2.0
#include "calibrate/runner.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <future>

#include "engine/port.h"
#include "io/file.h"
#include "report/results_log.h"

namespace bitdecoding::eval {
namespace {

namespace fs = std::filesystem;

Status invalid(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::size_t total_tokens(const std::vector<CalibrationPrompt>& prompts) {
  std::size_t tokens = 0;
  for (const CalibrationPrompt& prompt : prompts) tokens += prompt.tokens.size();
  return tokens;
}

}  // namespace

CalibrateRunner::CalibrateRunner(CalibrateOptions options, Progress* progress)
    : options_(std::move(options)), progress_(progress) {
  if (options_.out.empty()) options_.out = options_.model + "/" + kCalibrationFolder;
  options_.recipe.key_shift_file.clear();
  options_.recipe.tau_calibrate = true;
  options_.recipe.calibrate_file = folder() + "/" + kCalibrationFile;
  if (options_.measure_overhead) phases_ = {"off"};
  phases_.insert(phases_.end(), {"keys", "probabilities"});
}

Identity CalibrateRunner::identity() const {
  Identity all = model_;
  all.merge(recipe_identity(options_.recipe));
  all.insert_or_assign("calibration_version", std::string(kCalibrationVersion));
  all["corpus"] = corpus_;
  all["tokens_wanted"] = std::to_string(options_.tokens);
  all["prompt_tokens"] = std::to_string(options_.prompt_tokens);
  all["dtype"] = options_.dtype;
  return all;
}

Status CalibrateRunner::prepare() {
  if (!fs::exists(options_.model + "/config.json")) {
    return {StatusCode::kNotFound,
            fmt::format("'{}' is no model folder with a config.json; a calibration lies beside its "
                        "model, so name the folder (of a downloaded model, the snapshot's)",
                        options_.model)};
  }
  if (!is_tiled(options_.recipe.format)) {
    return invalid(
        fmt::format("mode {} keeps '{}' pages, which have no key means and no tau; "
                    "calibrate bitdecoding-nvfp4 or bitdecoding-mxfp4",
                    options_.recipe.mode, format_name(options_.recipe.format)));
  }
  Result<Identity> model = model_identity(options_.model);
  if (!model.ok()) return model.status();
  model_ = model.take();
  if (options_.data == "builtin") {
    texts_ = builtin_corpus();
  } else {
    Result<std::vector<CalibrationText>> texts = read_corpus(options_.data);
    if (!texts.ok()) return texts.status();
    texts_ = texts.take();
  }
  corpus_ = corpus_hash(texts_);
  std::string all;
  for (const auto& [key, value] : identity()) all += fmt::format("{}={}\n", key, value);
  fingerprint_ = content_hash(all);
  return {};
}

// A calibration that is there already is the answer, or it is of something else.
Status CalibrateRunner::check_saved(bool* reuse) {
  *reuse = false;
  if (options_.force || !fs::exists(sidecar_path())) return {};
  const Result<KeyShift> saved = load_key_shift(sidecar_path());
  if (!saved.ok()) return saved.status();
  if (saved.value().metadata.count("calibration_version") == 0) {
    return invalid(
        fmt::format("'{}' was not made by a calibration of this kind; --force replaces "
                    "it, --out names another folder",
                    sidecar_path()));
  }
  if (Status s = check_identity(saved.value(), identity()); !s.ok()) {
    return invalid(s.message() + ". --force replaces it, --out names another folder");
  }
  *reuse = true;
  progress_->say(
      fmt::format("  {} is this calibration already; --force makes it anew.", sidecar_path()));
  return {};
}

Status CalibrateRunner::begin_or_resume() {
  const Result<CalibrationState> state = read_state();
  if (state.ok()) {
    const auto note = state.value().metadata.find("note");
    const Json json =
        Json::parse(note == state.value().metadata.end() ? "" : note->second, nullptr, false);
    if (json.is_object() && json.value("fingerprint", "") == fingerprint_) {
      const auto phase =
          std::find(phases_.begin(), phases_.end(), json.value("phase", std::string()));
      if (phase != phases_.end()) {
        first_phase_ = static_cast<std::size_t>(phase - phases_.begin());
        first_prompt_ = json.value("done", std::size_t{0});
        progress_->say(
            fmt::format("  Going on with phase '{}' after {} prompts.", *phase, first_prompt_));
        return {};
      }
    }
  }
  std::error_code error;
  fs::remove_all(folder(), error);
  fs::create_directories(folder(), error);
  return write_file_atomic(folder() + "/recipe.json", recipe_to_json(options_.recipe));
}

Status CalibrateRunner::start_server() {
  ServeSettings settings;
  settings.program = options_.program;
  settings.python = options_.python;
  settings.model = options_.model;
  settings.dtype = options_.dtype;
  settings.cache_bytes = options_.cache_bytes;
  // A prompt is one chunk: it attends to its own exact keys, so what is observed is the model and
  // not its quantized cache. A prefix found in the cache would not be observed at all.
  settings.chunk_tokens = options_.prompt_tokens;
  settings.max_model_len = options_.prompt_tokens + 16;
  settings.max_requests = 1;
  settings.threads = options_.threads;
  settings.prefix_caching = false;
  const Result<int> port = free_loopback_port();
  if (!port.ok()) return port.status();
  CacheChoice choice;
  choice.recipe = folder() + "/recipe.json";
  const Result<Command> command =
      serve_command(settings, "", choice, port.value(), folder() + "/launch.log");
  if (!command.ok()) return command.status();
  progress_->begin("starting the engine");
  Result<std::unique_ptr<Server>> server =
      Server::start("calibration", command.value(), port.value(), folder() + "/server.log");
  if (!server.ok()) return server.status();
  server_ = server.take();
  Status ready =
      server_->wait_ready(std::chrono::seconds(options_.start_timeout),
                          [&](double, const std::string& line) { progress_->update(line); });
  if (!ready.ok()) return ready;
  progress_->done(fmt::format("ready on port {}", port.value()));
  client_.emplace(port.value(), options_.model);
  return {};
}

Status CalibrateRunner::set_phase(const std::string& phase) {
  return client_->collective_rpc("bitdecoding_calibrate", {phase}).status();
}

void CalibrateRunner::report_non_finite(const Json& answers, const std::string& prompt) {
  std::uint64_t rows = 0;
  for (const Json& answer : answers.value("results", Json::array())) {
    rows += answer.value("skipped_rows", std::uint64_t{0});
    const Json at = answer.value("non_finite", Json());
    if (!at.is_object()) continue;
    progress_->say(fmt::format(
        "  WARNING: a {} of layer {}, KV head {} was NaN or infinite in {}; such rows are left "
        "out.",
        at.value("side", "key"), at.value("layer", -1), at.value("kv_head", -1), prompt));
  }
  skipped_rows_ = rows;
}

Status CalibrateRunner::save_state(std::size_t phase, std::size_t done) {
  const Json note = {{"fingerprint", fingerprint_}, {"phase", phases_[phase]}, {"done", done}};
  const Result<Json> saved =
      client_->collective_rpc("bitdecoding_calibrate", {"", state_path(), note.dump()});
  if (!saved.ok()) return saved.status();
  if (done > 0) report_non_finite(saved.value(), prompts_[done - 1].name);
  return {};
}

Status CalibrateRunner::run_prompt(std::size_t phase, std::size_t index) {
  CompletionRequest request;
  request.prompt = prompts_[index].tokens;
  request.max_tokens = 1;
  const double begin = now();
  std::future<Result<Completion>> reply =
      std::async(std::launch::async, [&] { return client_->complete(request); });
  while (reply.wait_for(std::chrono::milliseconds(500)) != std::future_status::ready) {
    progress_->update(remaining_->words(phase, now() - begin));
  }
  const Result<Completion> done = reply.get();
  if (interrupted()) return {StatusCode::kIo, "interrupted; the same command goes on from here"};
  if (!done.ok()) {
    return server_->running() ? done.status() : Status(StatusCode::kIo, server_->explain_end());
  }
  const double seconds = now() - begin;
  remaining_->done(phase, request.prompt.size(), seconds);
  timed_[phases_[phase]].first += request.prompt.size();
  timed_[phases_[phase]].second += seconds;
  return save_state(phase, index + 1);
}

Status CalibrateRunner::run_phase(std::size_t phase) {
  if (Status s = set_phase(phases_[phase]); !s.ok()) return s;
  const std::map<std::string, const char*> words = {{"off", "timing prefill without observing"},
                                                    {"keys", "key means"},
                                                    {"probabilities", "probabilities"}};
  progress_->begin(words.at(phases_[phase]));
  std::size_t seen = 0;
  std::size_t next = 512;
  for (std::size_t i = 0; i < prompts_.size(); ++i) {
    seen += prompts_[i].tokens.size();
    if (phase == first_phase_ && i < first_prompt_) {
      remaining_->done(phase, prompts_[i].tokens.size(), 0);
      continue;
    }
    if (Status s = run_prompt(phase, i); !s.ok()) return s;
    if (phases_[phase] != "keys" || (seen < next && i + 1 < prompts_.size())) continue;
    Result<CalibrationState> state = read_state();
    if (!state.ok()) return state.status();
    snapshots_.emplace_back(seen, state.take());
    while (next <= seen) next *= 2;
  }
  progress_->done(fmt::format("{} tokens", seen));
  return {};
}

Status CalibrateRunner::run() {
  if (Status s = prepare(); !s.ok()) return s;
  bool reuse = false;
  if (Status s = check_saved(&reuse); !s.ok() || reuse) return s;
  if (Status s = begin_or_resume(); !s.ok()) return s;
  if (Status s = start_server(); !s.ok()) return s;
  const auto sinks = static_cast<std::size_t>(options_.recipe.sink_tokens);
  Result<std::vector<CalibrationPrompt>> prompts =
      make_prompts(*client_, texts_, options_.tokens, options_.prompt_tokens, sinks);
  if (!prompts.ok()) return prompts.status();
  prompts_ = prompts.take();
  const std::size_t tokens = total_tokens(prompts_);
  if (tokens < std::min(kMinCorpusTokens, options_.tokens) || prompts_.empty()) {
    return invalid(fmt::format(
        "'{}' gives {} tokens in texts longer than the {} sinks, and key means need at least {}: "
        "the mean of n tokens is off by about 1/sqrt(n) of a channel's spread",
        options_.data, tokens, sinks, kMinCorpusTokens));
  }
  if (tokens < options_.tokens) {
    progress_->say(fmt::format("  All of '{}' is {} tokens, fewer than the {} of --tokens.",
                               options_.data, tokens, options_.tokens));
  }
  remaining_.emplace(std::vector<std::size_t>(phases_.size(), tokens));
  if (fs::exists(state_path()) || first_prompt_ > 0) {
    Status s = client_->collective_rpc("bitdecoding_resume_calibration", {state_path()}).status();
    if (!s.ok()) return s;
  }
  for (std::size_t phase = 0; phase < phases_.size(); ++phase) {
    if (phase < first_phase_) {
      remaining_->done(phase, tokens, 0);
      continue;
    }
    if (Status s = run_phase(phase); !s.ok()) return s;
  }
  server_->stop();
  return finish();
}

}  // namespace bitdecoding::eval
