// SPDX-License-Identifier: Apache-2.0
#include "run/mode_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <thread>

#include "engine/process.h"
#include "report/results_log.h"

namespace bitdecoding::eval {
namespace {

using Json = nlohmann::json;

// Of the window, for the chat template, where a budget takes all that is left.
constexpr std::size_t kTemplateRoom = 256;
// How often the threads are looked at, and their progress told.
constexpr std::chrono::milliseconds kLook{20};
constexpr int kLooksPerProgress = 10;

Json messages_json(const BenchmarkRow& row) {
  Json out = Json::array();
  for (const ChatMessage& m : row.messages)
    out.push_back({{"role", m.role}, {"content", m.content}});
  return out;
}

void put_score(const Benchmark& benchmark, const BenchmarkRow& row, const LoadOptions& load,
               RowRecord* record) {
  const Result<Score> score = benchmark.score(row, record->reply, load);
  record->score = 0.0;
  record->missing = true;
  record->extracted.clear();
  record->detail = nullptr;
  if (!score.ok()) {
    record->why = score.status().message();
    return;
  }
  record->score = score.value().value;
  record->missing = score.value().missing;
  record->why = score.value().why;
  record->extracted = score.value().extracted;
  record->detail = score.value().detail;
}

Json asked_sampling(const PlannedBenchmark& benchmark, const PlannedRow& row,
                    const LoadOptions& load, std::size_t most_new_tokens) {
  Json out = sampling_json(benchmark.sampling, row.seed, benchmark.budget.max_new_tokens);
  out["fill_window"] = benchmark.budget.fill_window;
  out["window"] = load.model.window;
  out["most_new_tokens"] = most_new_tokens;
  return out;
}

std::string key_of(const ModeSettings& settings, const PlannedBenchmark& planned,
                   const PlannedRow& row) {
  const Json sampling = asked_sampling(planned, row, settings.load, settings.most_new_tokens);
  return row_key(row.prompt_hash, sampling, settings.engine, row.repeat);
}

}  // namespace

Result<std::vector<RowRecord>> planned_records(const ModeSettings& settings,
                                               const PlannedBenchmark& planned) {
  const std::string name(planned.benchmark->name());
  Result<std::vector<RowRecord>> all =
      RowLog::read(row_log_path(settings.folder, settings.mode, name));
  if (!all.ok()) return all.status();
  std::set<std::string> keys;
  for (const PlannedRow& row : planned.rows) keys.insert(key_of(settings, planned, row));
  std::vector<RowRecord> out;
  for (RowRecord& record : all.value()) {
    if (keys.count(record.key) > 0) out.push_back(std::move(record));
  }
  return out;
}

Status ModeRun::prepare() {
  for (const PlannedBenchmark& planned : *plan_) {
    const std::string name(planned.benchmark->name());
    Result<std::unique_ptr<RowLog>> log =
        RowLog::open(row_log_path(settings_.folder, settings_.mode, name));
    if (!log.ok()) return log.status();
    for (const PlannedRow& row : planned.rows) {
      Job job{&planned, &row, key_of(settings_, planned, row), 0, ""};
      ++progress_.total;
      if (log.value()->finished(job.key)) {
        ++progress_.done;
        ++progress_.reused;
      } else {
        queue_.push_back(std::move(job));
      }
    }
    logs_[name] = log.take();
  }
  return {};
}

RowRecord ModeRun::begin_record(const Job& job) const {
  RowRecord record;
  record.key = job.key;
  record.mode = settings_.mode;
  record.benchmark = job.benchmark->benchmark->name();
  record.row = job.row->row.id;
  record.repeat = job.row->repeat;
  record.seed = job.row->seed;
  record.prompt_hash = job.row->prompt_hash;
  record.labels = job.row->row.labels;
  return record;
}

std::size_t ModeRun::room_for(ChatClient* client, const Job& job, const Json& messages,
                              RowRecord* record) const {
  const Budget& budget = job.benchmark->budget;
  const std::size_t window = settings_.load.model.window;
  const std::size_t cap = settings_.most_new_tokens;
  const auto capped = [&](std::size_t tokens) { return cap > 0 ? std::min(tokens, cap) : tokens; };
  const std::optional<std::size_t> counted = client->count_tokens(messages);
  // A server that counts has put the chat template around the prompt.
  const std::size_t prompt = counted.value_or(job.row->row.stated_tokens);
  const std::size_t template_room = counted && !budget.fill_window ? 0 : kTemplateRoom;
  record->prompt_tokens = prompt;
  if (window == 0 || prompt == 0) {
    if (!budget.fill_window) return capped(budget.max_new_tokens);
    record->skipped =
        "The reply may fill the window, but the server does not say how long its window or this "
        "prompt is; name the window with --window.";
    return 0;
  }
  if (prompt + template_room >= window) {
    record->skipped = fmt::format(
        "The prompt has {} tokens, which leaves no room for a reply in the window of {}.", prompt,
        window);
    return 0;
  }
  const std::size_t left = window - prompt - template_room;
  return capped(budget.fill_window ? left : std::min(left, budget.max_new_tokens));
}

void ModeRun::score(const Job& job, RowRecord* record) const {
  put_score(*job.benchmark->benchmark, job.row->row, settings_.load, record);
}

void ModeRun::store(const Job& job, RowRecord record) {
  record.time = utc_now();
  const Status stored = logs_.at(record.benchmark)->append(record);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!stored.ok() && failed_.ok()) failed_ = stored;
  ++progress_.done;
  progress_.tokens_in +=
      record.prompt_tokens - std::min(record.prompt_tokens, record.cached_tokens);
  progress_.tokens_out += record.completion_tokens;
  progress_.errors += record.error.empty() ? 0 : 1;
  progress_.skipped += record.skipped.empty() ? 0 : 1;
  progress_.benchmark = job.benchmark->benchmark->name();
}

ModeRun::Turn ModeRun::take(ChatClient* client, Job* job) {
  RowRecord record = begin_record(*job);
  const Json messages = messages_json(job->row->row);
  record.max_tokens = room_for(client, *job, messages, &record);
  if (record.max_tokens == 0) {
    store(*job, std::move(record));
    return Turn::kDone;
  }
  Json fields = sampling_json(job->benchmark->sampling, job->row->seed, record.max_tokens);
  fields["messages"] = messages;
  ChatOutcome outcome = client->ask(fields);
  if (outcome.problem == ChatProblem::kStopped) return Turn::kStopped;
  if (outcome.problem == ChatProblem::kTooLong) {
    record.skipped = outcome.sentence;
    record.max_tokens = 0;
    store(*job, std::move(record));
    return Turn::kDone;
  }
  if (outcome.problem != ChatProblem::kNone) {
    ++job->attempts;
    job->last_error = outcome.sentence;
    if (stop_now()) return Turn::kStopped;
    // A server that is killed closes the connection before it is seen to have ended.
    if (worth_a_retry(outcome.problem)) std::this_thread::sleep_for(settings_.pause);
    const bool gone = !host_->running();
    if (gone) job->last_error = host_->explain_end();
    const bool again = gone || worth_a_retry(outcome.problem);
    if (again && job->attempts < settings_.attempts) {
      return gone ? Turn::kEngineGone : Turn::kAgain;
    }
    record.error = job->attempts == 1 ? job->last_error
                                      : fmt::format("{} attempts failed, the last so: {}",
                                                    job->attempts, job->last_error);
    store(*job, std::move(record));
    return gone ? Turn::kEngineGone : Turn::kDone;
  }
  record.reply = std::move(outcome.reply.text);
  record.finish_reason = outcome.reply.finish_reason;
  record.truncated = outcome.reply.finish_reason == "length";
  if (outcome.reply.prompt_tokens > 0) record.prompt_tokens = outcome.reply.prompt_tokens;
  record.cached_tokens = outcome.reply.cached_tokens;
  record.completion_tokens = outcome.reply.completion_tokens;
  record.latency = outcome.reply.latency;
  record.first_token = outcome.reply.first_token;
  score(*job, &record);
  store(*job, std::move(record));
  return Turn::kDone;
}

void ModeRun::work(ChatClient* client) {
  for (;;) {
    Job job;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (queue_.empty() || gone_ || !failed_.ok() || interrupted()) return;
      job = std::move(queue_.front());
      queue_.pop_front();
    }
    const int attempts = job.attempts;
    const Turn turn = take(client, &job);
    const bool recorded = turn == Turn::kDone || job.attempts >= settings_.attempts;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (turn == Turn::kEngineGone) gone_ = true;
    if (turn == Turn::kStopped) job.attempts = attempts;
    if (turn == Turn::kStopped || !recorded) queue_.push_front(std::move(job));
    if (turn == Turn::kStopped) return;
  }
}

Status ModeRun::run_engine(const std::function<void(const ModeProgress&)>& progress) {
  const Result<Endpoint> endpoint = host_->up();
  if (!endpoint.ok()) return endpoint.status();
  ChatClient client(endpoint.value(), settings_.model, settings_.silence);
  std::size_t window = 0;
  const Result<std::vector<std::string>> models = client.models(&window);
  if (!models.ok()) return models.status();
  if (settings_.model.empty()) client.set_model(models.value().front());
  if (settings_.load.model.window == 0) settings_.load.model.window = window;
  gone_ = false;
  std::atomic<int> at_work{settings_.concurrency};
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(settings_.concurrency));
  for (int i = 0; i < settings_.concurrency; ++i) {
    threads.emplace_back([&] {
      work(&client);
      --at_work;
    });
  }
  int looks = 0;
  while (at_work > 0) {
    std::this_thread::sleep_for(kLook);
    if (stop_now()) client.stop();
    if (!progress || ++looks % kLooksPerProgress != 0) continue;
    const std::lock_guard<std::mutex> lock(mutex_);
    progress_.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begun_).count();
    progress(progress_);
  }
  for (std::thread& thread : threads) thread.join();
  return failed_;
}

Status ModeRun::run(const std::function<void(const ModeProgress&)>& progress) {
  begun_ = std::chrono::steady_clock::now();
  while (!queue_.empty() && !interrupted()) {
    if (Status s = run_engine(progress); !s.ok()) return s;
    if (queue_.empty() || interrupted()) break;
    // A row is taken a bounded number of times, so this ends.
    host_->down();
    if (host_->can_restart()) continue;
    return {StatusCode::kIo, fmt::format("{} {} rows are not answered; the same command goes on "
                                         "with them.",
                                         host_->explain_end(), queue_.size())};
  }
  return {};
}

Status rescore(const std::string& folder, const std::string& mode,
               const std::vector<PlannedBenchmark>& plan, const LoadOptions& load,
               std::size_t* rows) {
  for (const PlannedBenchmark& planned : plan) {
    const std::string name(planned.benchmark->name());
    Result<std::unique_ptr<RowLog>> log = RowLog::open(row_log_path(folder, mode, name));
    if (!log.ok()) return log.status();
    std::map<std::pair<std::string, std::string>, const BenchmarkRow*> by_prompt;
    for (const PlannedRow& row : planned.rows) by_prompt[{row.row.id, row.prompt_hash}] = &row.row;
    std::vector<RowRecord> records = log.value()->rows();
    for (RowRecord& record : records) {
      const auto row = by_prompt.find({record.row, record.prompt_hash});
      if (!record.answered() || row == by_prompt.end()) continue;
      put_score(*planned.benchmark, *row->second, load, &record);
      ++*rows;
    }
    if (records.empty()) continue;
    if (Status s = log.value()->rewrite(records); !s.ok()) return s;
  }
  return {};
}

}  // namespace bitdecoding::eval
