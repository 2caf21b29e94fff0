// SPDX-License-Identifier: Apache-2.0
#include "engine/server.h"

#include <fmt/format.h>
#include <httplib.h>

#include <algorithm>
#include <deque>
#include <fstream>
#include <thread>

namespace bitdecoding::eval {
namespace {

constexpr int kTailLines = 15;

// Progress bars overwrite themselves with carriage returns; only what they ended with counts.
std::string last_state(const std::string& line) {
  std::size_t end = line.find_last_not_of("\r\n ");
  if (end == std::string::npos) return "";
  const std::size_t begin = line.rfind('\r', end);
  return line.substr(begin == std::string::npos ? 0 : begin + 1,
                     begin == std::string::npos ? end + 1 : end - begin);
}

std::string with_tail(std::string sentence, const std::string& log_path) {
  return fmt::format("{} The end of its log:\n{}\nThe whole log: {}", sentence,
                     log_tail(log_path, kTailLines), log_path);
}

}  // namespace

std::string log_tail(const std::string& path, int count, std::size_t width) {
  std::ifstream file(path);
  std::deque<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    line = last_state(line);
    if (line.empty()) continue;
    if (line.size() > width) line = line.substr(0, width) + "...";
    lines.push_back(std::move(line));
    if (lines.size() > static_cast<std::size_t>(std::max(count, 0))) lines.pop_front();
  }
  std::string out;
  for (const std::string& line : lines) out += (out.empty() ? "" : "\n") + line;
  return out.empty() ? "(the log is empty)" : out;
}

Result<std::unique_ptr<Server>> Server::start(std::string name, const Command& command, int port,
                                              std::string log_path) {
  Result<std::unique_ptr<ChildProcess>> process = ChildProcess::start(command, log_path);
  if (!process.ok()) return process.status();
  return std::unique_ptr<Server>(
      new Server(std::move(name), process.take(), port, std::move(log_path)));
}

Status Server::wait_ready(std::chrono::seconds timeout,
                          const std::function<void(double, const std::string&)>& progress) {
  httplib::Client client("127.0.0.1", port_);
  client.set_connection_timeout(1);
  client.set_read_timeout(5);
  for (;;) {
    const double elapsed =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
    if (interrupted()) return {StatusCode::kIo, "Interrupted while a server was starting."};
    if (!process_->running()) return {StatusCode::kIo, explain_end()};
    const httplib::Result answer = client.Get("/health");
    if (answer && answer->status == 200) {
      seconds_to_ready_ = elapsed;
      return {};
    }
    if (elapsed > static_cast<double>(timeout.count())) {
      return {StatusCode::kIo,
              with_tail(fmt::format("The {} server did not answer within {} s; a slower machine "
                                    "needs a larger --start-timeout.",
                                    name_, timeout.count()),
                        log_path_)};
    }
    if (progress) progress(elapsed, log_tail(log_path_, 1));
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
  }
}

std::string Server::explain_end() {
  if (process_->running())
    return with_tail(fmt::format("The {} server still runs.", name_), log_path_);
  return with_tail(
      fmt::format("The {} server ended by itself ({}).", name_, process_->how_it_ended()),
      log_path_);
}

}  // namespace bitdecoding::eval
