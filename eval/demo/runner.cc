// SPDX-License-Identifier: Apache-2.0
#include "demo/runner.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "demo/fingerprint.h"
#include "engine/client.h"
#include "engine/port.h"
#include "report/machine.h"
#include "report/page.h"
#include "tasks/tasks.h"

namespace bitdecoding::eval {
namespace {

namespace fs = std::filesystem;

// Where the hidden facts lie; the same for --quick, so that its prompts are a part of the full
// ones.
constexpr std::size_t kFirstNeedleTokens = 1024;
constexpr std::size_t kNeedleTokens = 4096;
constexpr std::size_t kCalibrationTokens = 2048;  // of each text

Status interruption() { return {StatusCode::kIo, "Interrupted; ./demo again goes on from here."}; }

// Stock vLLM stands beside the others for its speed, its capacity and its divergence from bf16; its
// answers would cost half a minute and say what bf16's say.
bool shows_answers(const std::string& mode) { return mode != "stock"; }

bool needs_key_means(const std::string& mode) { return mode.rfind("bitdecoding-", 0) == 0; }

std::string score_words(const Json& needle) {
  std::string out;
  for (const Json& row : needle.value("summary", Json::array())) {
    out += fmt::format("{}{} of {} found at {}K", out.empty() ? "" : ", ", row.value("found", 0),
                       row.value("asked", 0), row.value("length", 0) / 1024);
  }
  return out;
}

std::string speed_words(const Json& throughput) {
  std::string out =
      fmt::format("prefill {} tokens/s",
                  compact(throughput.at("prefill").value("tokens_per_second", std::nan(""))));
  for (const Json& run : throughput.value("decode", Json::array())) {
    out += fmt::format(", {} user{} {} tokens/s", run.value("users", 0),
                       run.value("users", 0) == 1 ? "" : "s",
                       compact(run.value("tokens_per_second", std::nan(""))));
  }
  return out;
}

// One line about a task's result, for the terminal.
std::string result_words(const std::string& name, const Json& data) {
  if (name == "questions") return fmt::format("{} answers", data.at("answers").size());
  if (name == "needle") return score_words(data);
  if (name == "logits") return fmt::format("{} rows of logits", data.value("rows", 0));
  if (name == "kl") {
    return fmt::format("mean {} nats, top-1 agreement {:.1f} %", compact(data.value("mean", 0.0)),
                       100.0 * data.value("top1_agreement", 0.0));
  }
  if (name == "throughput") return speed_words(data);
  return fmt::format("{} tokens, BF16 pool {} bytes", grouped(data.value("tokens", 0.0)),
                     grouped(data.value("pool_bytes", 0.0)));
}

}  // namespace

DemoRunner::DemoRunner(DemoOptions options, Progress* progress)
    : options_(std::move(options)),
      plan_(options_.quick ? quick_plan() : full_plan()),
      progress_(progress) {
  serve_.program = options_.root + "/build/release/bin/bitdecoding";
  serve_.python = options_.venv + "/bin/python";
  serve_.model = options_.model;
  serve_.dtype = options_.dtype;
  serve_.cache_bytes = options_.cache_mib << 20;
  serve_.chunk_tokens = plan_.chunk_tokens;
  serve_.threads = options_.threads;
}

std::string DemoRunner::logits_path(const std::string& mode) const {
  return options_.out + "/logits/" + mode + ".bin";
}

Status DemoRunner::check_surroundings() const {
  if (!fs::exists(serve_.program)) {
    return {StatusCode::kNotFound,
            fmt::format("There is no program {}; ./demo builds it.", serve_.program)};
  }
  if (!fs::exists(options_.venv + "/bin/vllm")) {
    return {StatusCode::kNotFound,
            fmt::format("There is no vLLM in {}; ./demo makes it with tools/setup/venv.sh.",
                        options_.venv)};
  }
  if (!fs::exists(options_.model + "/config.json")) {
    return {StatusCode::kNotFound, fmt::format("{} is no Hugging Face model folder: it has no "
                                               "config.json. ./demo makes the default one with "
                                               "tools/setup/model.sh; --model names another.",
                                               options_.model)};
  }
  for (const std::string& text : options_.calibration_texts) {
    std::error_code error;
    if (fs::equivalent(text, options_.text, error)) {
      return {StatusCode::kInvalidArgument,
              fmt::format("{} is both the long text and a calibration text, which would flatter "
                          "the result; choose others with --calibration-text.",
                          text)};
    }
  }
  return {};
}

Json DemoRunner::settings() const {
  return {{"model", options_.model},
          {"model_name", fs::path(options_.model).filename().string()},
          {"text", options_.text},
          {"modes", options_.modes},
          {"dtype", options_.dtype},
          {"cache_bytes", serve_.cache_bytes},
          {"threads", options_.threads},
          {"seed", options_.seed},
          {"quick", options_.quick},
          {"questions", plan_.questions},
          {"needle_lengths", plan_.needle_lengths},
          {"kl_tokens", plan_.kl_tokens},
          {"kl_first", plan_.kl_first},
          {"chunk_tokens", plan_.chunk_tokens},
          {"context", plan_.context},
          {"users", plan_.users},
          {"decode_tokens", plan_.decode_tokens},
          {"machine", describe_machine()}};
}

Status DemoRunner::open_log() {
  Result<ResultsLog> log = ResultsLog::open(options_.out + "/results.jsonl");
  if (!log.ok()) return log.status();
  log_ = log.take();
  if (log_->dropped_lines() > 0) {
    progress_->say(
        fmt::format("  {} damaged lines of the results log are not used.", log_->dropped_lines()));
  }
  Json decides = settings();
  decides["identity"] = build_identity(options_);
  fingerprint_ = stable_hash(decides.dump());
  const std::optional<std::string> unfinished = log_->unfinished_run(fingerprint_);
  if (unfinished.has_value() && !options_.fresh) {
    run_ = *unfinished;
    progress_->say(fmt::format("  Finishing the run of {}; --fresh begins anew.", run_));
    return {};
  }
  run_ = utc_now();
  Json begin = settings();
  begin["date"] = run_;
  begin["command"] = options_.command;
  return record("run", begin);
}

Status DemoRunner::record(const std::string& key, const Json& data) {
  return log_->append({run_, fingerprint_, key, utc_now(), data});
}

bool DemoRunner::recorded(const std::string& mode, const std::string& name) const {
  return log_->find(run_, mode + "/" + name).has_value();
}

Status DemoRunner::task(const std::string& mode, const std::string& name, const std::string& words,
                        const std::function<Result<Json>()>& work) {
  if (interrupted()) return interruption();
  if (recorded(mode, name)) return {};
  progress_->begin(fmt::format("{}: {}", mode, words));
  const Result<Json> data = work();
  if (interrupted()) return interruption();
  if (!data.ok()) return data.status();
  progress_->done(result_words(name, data.value()));
  return record(mode + "/" + name, data.value());
}

Result<std::unique_ptr<Server>> DemoRunner::start_server(const std::string& mode,
                                                         const CacheChoice& means) {
  const Result<int> port = free_loopback_port();
  if (!port.ok()) return port.status();
  std::error_code error;
  fs::create_directories(options_.out + "/logs", error);
  const std::string log_path = options_.out + "/logs/" + mode + ".log";
  const Result<Command> command =
      serve_command(serve_, mode, means, port.value(), log_path + ".launch");
  if (!command.ok()) return command.status();
  last_command_ = command.value();
  progress_->begin(fmt::format("{}: starting the server", mode));
  Result<std::unique_ptr<Server>> server =
      Server::start(mode, last_command_, port.value(), log_path);
  if (!server.ok()) return server.status();
  const Status ready =
      server.value()->wait_ready(std::chrono::seconds(options_.start_timeout),
                                 [&](double, const std::string& line) { progress_->update(line); });
  if (interrupted()) return interruption();
  if (!ready.ok()) return ready;
  progress_->done(fmt::format("ready on port {}", port.value()));
  return server;
}

Status DemoRunner::observe_texts(Server* server, const std::string& path) {
  Client client(server->port(), options_.model);
  for (const std::string& text_path : options_.calibration_texts) {
    std::ifstream file(text_path);
    std::stringstream content;
    content << file.rdbuf();
    Result<Tokens> tokens = client.tokenize(content.str());
    if (!tokens.ok()) return tokens.status();
    CompletionRequest request;
    request.prompt = tokens.take();
    request.prompt.resize(std::min(request.prompt.size(), kCalibrationTokens));
    request.max_tokens = 1;
    const Result<Completion> done = client.complete(request);
    if (!done.ok()) return done.status();
  }
  const Result<Json> saved = client.collective_rpc("bitdecoding_save_calibration", {path});
  return saved.ok() ? Status() : saved.status();
}

// The key means come from other texts than the one that is measured on, in one short pass; a saved
// file is used again when model, texts and library are the same.
Status DemoRunner::calibrate() {
  const std::string path = options_.out + "/key_shift.safetensors";
  const std::string note_path = options_.out + "/key_shift.json";
  const Json wanted = {{"identity", build_identity(options_)},
                       {"texts", file_identities(options_.calibration_texts)},
                       {"tokens_a_text", kCalibrationTokens},
                       {"dtype", options_.dtype}};
  std::ifstream note_file(note_path);
  const Json note = Json::parse(note_file, nullptr, false);
  key_shift_file_ = path;
  if (Status status = record("calibration", {{"file", path},
                                             {"texts", options_.calibration_texts},
                                             {"tokens_a_text", kCalibrationTokens}});
      !status.ok()) {
    return status;
  }
  if (note == wanted && fs::exists(path)) return {};
  std::error_code error;
  fs::remove(note_path, error);
  // Observed over BF16 pages: the means of the keys themselves.
  Result<std::unique_ptr<Server>> started = start_server("bf16", CacheChoice{"", path, ""});
  if (!started.ok()) return started.status();
  progress_->begin("calibration: observing keys on other texts");
  Status observed = observe_texts(started.value().get(), path);
  started.value()->stop();
  if (interrupted()) return interruption();
  if (!observed.ok()) return observed;
  if (!fs::exists(path)) {
    return {StatusCode::kInternal, fmt::format("The calibration wrote no {}; its log is {}.", path,
                                               started.value()->log_path())};
  }
  std::ofstream(note_path) << wanted.dump(2) << "\n";
  progress_->done(fmt::format("key means saved to {}", path));
  return {};
}

bool DemoRunner::compares_logits() const {
  return std::count(options_.modes.begin(), options_.modes.end(), "bf16") > 0;
}

bool DemoRunner::baseline_captured() const { return fs::exists(logits_path("bf16")); }

Status DemoRunner::measure_divergence(const std::string& mode, const Client& client) {
  const std::string path = logits_path(mode);
  if (!compares_logits()) return {};
  if (mode == "bf16" ? recorded(mode, "logits") && baseline_captured() : recorded(mode, "kl")) {
    return {};
  }
  // A capture is of use only as long as its file is there, so it is made again rather than trusted.
  progress_->begin(fmt::format("{}: logits of {} positions", mode, plan_.kl_tokens));
  const Result<Json> captured = capture_logits(client, *document_, plan_, path);
  if (interrupted()) return interruption();
  if (!captured.ok()) return captured.status();
  progress_->done(result_words("logits", captured.value()));
  if (Status status = record(mode + "/logits", captured.value()); !status.ok()) return status;
  if (mode == "bf16") return {};
  Status status = task(mode, "kl", "KL divergence to bf16",
                       [&] { return run_kl(logits_path("bf16"), path, plan_, options_.threads); });
  std::error_code error;
  if (!options_.keep_logits) fs::remove(path, error);
  return status;
}

Status DemoRunner::run_tasks(const std::string& mode, Server* server, const Client& client) {
  if (!document_.has_value()) {
    Result<Document> document =
        make_document(client, options_.text, options_.seed, kFirstNeedleTokens, kNeedleTokens);
    if (!document.ok()) return document.status();
    document_ = document.take();
    if (document_->head.size() + document_->body.size() < plan_.context) {
      return {StatusCode::kInvalidArgument,
              fmt::format("The text {} has {} tokens, but {} are wanted; name a longer one with "
                          "--text.",
                          options_.text, document_->body.size(), plan_.context)};
    }
  }
  // The order matters: the long prompt fills the cache, the others find it there.
  Status status;
  if (shows_answers(mode)) {
    status =
        task(mode, "questions", "short questions", [&] { return run_questions(client, plan_); });
  }
  if (status.ok()) status = measure_divergence(mode, client);
  if (status.ok() && shows_answers(mode)) {
    status = task(mode, "needle", "needles in a haystack",
                  [&] { return run_needles(client, *document_, plan_); });
  }
  if (status.ok()) {
    status = task(mode, "throughput", "speed at a long context",
                  [&] { return run_throughput(client, *document_, plan_); });
  }
  if (status.ok()) {
    status = task(mode, "capacity", "KV capacity", [&] {
      return run_capacity(client, server->log_path(), serve_.cache_bytes, mode != "stock");
    });
  }
  return status;
}

Status DemoRunner::run_mode(const std::string& mode) {
  const auto is_recorded = [&](const char* name) { return recorded(mode, name); };
  const bool divergence_done =
      !compares_logits() ||
      (mode == "bf16" ? baseline_captured() && recorded(mode, "logits") : recorded(mode, "kl"));
  std::vector<const char*> others = {"throughput", "capacity"};
  if (shows_answers(mode)) others.insert(others.end(), {"questions", "needle"});
  if (divergence_done && std::all_of(others.begin(), others.end(), is_recorded)) {
    progress_->say(fmt::format("  {}: already measured in this run", mode));
    return {};
  }
  CacheChoice means;
  if (needs_key_means(mode)) means.use = key_shift_file_;
  Result<std::unique_ptr<Server>> started = start_server(mode, means);
  if (!started.ok()) return started.status();
  Server* server = started.value().get();
  const Client client(server->port(), options_.model);
  const Result<std::string> version = client.get("/version");
  Status status = version.ok() ? Status() : version.status();
  if (status.ok()) {
    status = record(mode + "/server", {{"command", shell_line(last_command_)},
                                       {"seconds_to_ready", server->seconds_to_ready()},
                                       {"version", Json::parse(version.value(), nullptr, false)}});
  }
  if (status.ok()) status = run_tasks(mode, server, client);
  // A request that failed says what the client saw; the reason is in the server's log.
  if (status.code() == StatusCode::kIo && !interrupted()) {
    status = {status.code(), status.message() + "\n" + server->explain_end()};
  }
  progress_->begin(fmt::format("{}: stopping the server", mode));
  server->stop();
  progress_->done("stopped");
  return status;
}

Summary DemoRunner::summary() const { return summarize(*log_, run_, options_.modes); }

Status DemoRunner::run() {
  if (Status status = check_surroundings(); !status.ok()) return status;
  if (Status status = open_log(); !status.ok()) return status;
  if (std::any_of(options_.modes.begin(), options_.modes.end(), needs_key_means)) {
    if (Status status = calibrate(); !status.ok()) return status;
  }
  for (const std::string& mode : options_.modes) {
    if (Status status = run_mode(mode); !status.ok()) return status;
    if (Status status = write_report(report_path(), summary()); !status.ok()) return status;
  }
  std::error_code error;
  if (!options_.keep_logits) fs::remove_all(options_.out + "/logits", error);
  return record(kRunEnd, Json::object());
}

}  // namespace bitdecoding::eval
