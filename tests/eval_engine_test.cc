// SPDX-License-Identifier: Apache-2.0
// The client against a server that misbehaves, and child processes with children of their own.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <httplib.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "engine/client.h"
#include "engine/launch.h"
#include "engine/port.h"
#include "engine/process.h"
#include "engine/request_fields.h"
#include "engine/server.h"

namespace bitdecoding::eval {
namespace {

namespace fs = std::filesystem;

// A server on the loopback address that answers as the test says.
class FakeServer {
 public:
  FakeServer() { port_ = server_.bind_to_any_port("127.0.0.1"); }
  ~FakeServer() {
    server_.stop();
    if (thread_.joinable()) thread_.join();
  }
  httplib::Server& on() { return server_; }
  int start() {
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    while (!server_.is_running()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return port_;
  }

 private:
  httplib::Server server_;
  std::thread thread_;
  int port_ = 0;
};

CompletionRequest short_request() {
  CompletionRequest request;
  request.prompt = {1, 2, 3};
  return request;
}

TEST(Client, ReadsACompletionAndSendsItGreedy) {
  FakeServer fake;
  Json seen;
  fake.on().Post("/v1/completions", [&](const httplib::Request& in, httplib::Response& out) {
    seen = Json::parse(in.body);
    out.set_content(
        R"({"choices": [{"text": "hi", "finish_reason": "stop", "token_ids": [7, 8],
            "prompt_logprobs": [null, {"2": {"logprob": -0.5}, "9": {"logprob": -0.1}},
                                {"3": {"logprob": -2.0}}]}],
            "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}})",
        "application/json");
  });
  const Client client(fake.start(), "m");
  CompletionRequest request = short_request();
  request.prompt_logprobs = 0;
  const Result<Completion> reply = client.complete(request);
  ASSERT_TRUE(reply.ok()) << reply.status().message();
  EXPECT_EQ(reply.value().text, "hi");
  EXPECT_EQ(reply.value().tokens, (Tokens{7, 8}));
  EXPECT_EQ(reply.value().cached_tokens, 2);
  ASSERT_EQ(reply.value().prompt_logprobs.size(), 3U);
  EXPECT_EQ(reply.value().prompt_logprobs[1], -0.5);
  EXPECT_EQ(reply.value().prompt_logprobs[2], -2.0);
  EXPECT_EQ(seen["temperature"], 0.0);
  EXPECT_EQ(seen["prompt"], (Json{1, 2, 3}));
  EXPECT_EQ(seen["prompt_logprobs"], 0);
}

TEST(Client, ARefusalCarriesTheServersWords) {
  FakeServer fake;
  fake.on().Post("/v1/completions", [](const httplib::Request&, httplib::Response& out) {
    out.status = 400;
    out.set_content(R"({"error": {"message": "the prompt is too long"}})", "application/json");
  });
  const Client client(fake.start(), "m");
  for (const Status& status :
       {client.complete(short_request()).status(), client.stream(short_request()).status()}) {
    ASSERT_FALSE(status.ok());
    EXPECT_NE(status.message().find("400"), std::string::npos) << status.message();
    EXPECT_NE(status.message().find("the prompt is too long"), std::string::npos);
  }
}

TEST(Client, AnswersThatAreNoAnswersAreErrors) {
  FakeServer fake;
  std::string body;
  const auto give = [&](const httplib::Request&, httplib::Response& out) {
    out.set_content(body, "application/json");
  };
  fake.on().Post("/v1/completions", give);
  fake.on().Post("/v1/chat/completions", give);
  fake.on().Post("/tokenize", give);
  fake.on().Get("/v1/models", give);
  const Client client(fake.start(), "m");
  for (const char* text :
       {"", "not JSON", "[]", "{}", R"({"choices": []})", R"({"choices": [{}]})",
        R"({"choices": [{"text": 5}]})", R"({"choices": [{"message": {"content": null}}]})",
        R"({"tokens": []})", R"({"tokens": 3})", R"({"data": []})"}) {
    body = text;
    EXPECT_FALSE(client.complete(short_request()).ok()) << text;
    EXPECT_FALSE(client.chat("q", 4).ok()) << text;
    EXPECT_FALSE(client.tokenize("q").ok()) << text;
    EXPECT_FALSE(client.served_model().ok()) << text;
  }
}

TEST(Client, ALogprobOfAnotherTokenIsNotTaken) {
  FakeServer fake;
  fake.on().Post("/v1/completions", [](const httplib::Request&, httplib::Response& out) {
    out.set_content(R"({"choices": [{"text": "", "prompt_logprobs":
        [null, {"5": {"logprob": -1}}, {"3": {"logprob": -1}}]}]})",
                    "application/json");
  });
  const Client client(fake.start(), "m");
  CompletionRequest request = short_request();
  request.prompt_logprobs = 0;
  EXPECT_FALSE(client.complete(request).ok());
}

TEST(Client, AStreamIsReadTokenByToken) {
  FakeServer fake;
  fake.on().Post("/v1/completions", [](const httplib::Request&, httplib::Response& out) {
    out.set_chunked_content_provider("text/event-stream", [](std::size_t, httplib::DataSink& sink) {
      // Cut in the middle of an event, as networks do.
      for (const char* piece : {"data: {\"choices\": [{\"token_ids\": [4]}]}\n\nda",
                                "ta: {\"choices\": [{\"token_ids\": [5, 6]}]}\r\n\r\n",
                                "data: {\"choices\": []}\n\ndata: [DONE]\n\n"}) {
        sink.write(piece, std::strlen(piece));
      }
      sink.done();
      return true;
    });
  });
  const Client client(fake.start(), "m");
  const Result<std::vector<StreamedToken>> tokens = client.stream(short_request());
  ASSERT_TRUE(tokens.ok()) << tokens.status().message();
  ASSERT_EQ(tokens.value().size(), 3U);
  EXPECT_EQ(tokens.value()[0].token, 4);
  EXPECT_EQ(tokens.value()[2].token, 6);
  EXPECT_LE(tokens.value()[0].at, tokens.value()[2].at);
}

TEST(Client, AStreamThatStopsEarlyOrHoldsAnErrorIsAnError) {
  FakeServer fake;
  std::string body;
  fake.on().Post("/v1/completions", [&](const httplib::Request&, httplib::Response& out) {
    out.set_content(body, "text/event-stream");
  });
  const Client client(fake.start(), "m");
  for (const char* text : {"data: {\"choices\": [{\"token_ids\": [4]}]}\n\n", "", "data: {]\n\n",
                           "data: {\"error\": {\"message\": \"out of blocks\"}}\n\n"}) {
    body = text;
    const Result<std::vector<StreamedToken>> tokens = client.stream(short_request());
    EXPECT_FALSE(tokens.ok()) << text;
  }
}

TEST(Client, NobodyListensIsASentence) {
  const Result<int> port = free_loopback_port();
  ASSERT_TRUE(port.ok());
  const Client client(port.value(), "m");
  const Result<Completion> reply = client.complete(short_request());
  ASSERT_FALSE(reply.ok());
  EXPECT_NE(reply.status().message().find(std::to_string(port.value())), std::string::npos);
}

TEST(RequestFields, AMisspeltFieldIsNamedWithItsNeighbour) {
  const Status status = check_request_fields("/v1/completions", {{"max_token", 4}});
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("'max_token'"), std::string::npos);
  EXPECT_NE(status.message().find("'max_tokens'"), std::string::npos);
  EXPECT_TRUE(check_request_fields("/v1/completions", {{"max_tokens", 4}, {"prompt", "a"}}).ok());
  // Each endpoint has its own fields.
  EXPECT_FALSE(check_request_fields("/v1/completions", {{"messages", Json::array()}}).ok());
  EXPECT_FALSE(check_request_fields("/v1/chat/completions", {{"prompt", "a"}}).ok());
  EXPECT_FALSE(check_request_fields("/unknown", Json::object()).ok());
  EXPECT_FALSE(check_request_fields("/tokenize", Json::array()).ok());
}

TEST(RequestFields, AMisspeltRequestIsNotSent) {
  FakeServer fake;
  bool sent = false;
  fake.on().Post("/tokenize", [&](const httplib::Request&, httplib::Response&) { sent = true; });
  const Client client(fake.start(), "m");
  EXPECT_FALSE(client.post("/tokenize", {{"promt", "a"}}).ok());
  EXPECT_FALSE(sent);
}

class Children : public ::testing::Test {
 protected:
  void SetUp() override {
    adopt_orphans();
    folder_ = fs::temp_directory_path() /
              ("bitdecoding_children_" +
               std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()));
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    log_ = (folder_ / "log").string();
  }
  void TearDown() override { fs::remove_all(folder_); }

  static Command shell(const std::string& text) { return {{"/bin/sh", "-c", text}, {}}; }
  std::string log_text() const {
    std::ifstream file(log_);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // The numbers that the child has written, once there are `count`.
  std::vector<pid_t> pids(std::size_t count) const {
    std::vector<pid_t> out;
    for (int tries = 0; tries < 1000 && out.size() < count; ++tries) {
      out.clear();
      std::istringstream text(log_text());
      for (pid_t pid = 0; text >> pid;) out.push_back(pid);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return out;
  }

  fs::path folder_;
  std::string log_;
};

TEST_F(Children, StopEndsGrandchildrenThatIgnoreTermAndThoseInOtherSessions) {
  Result<std::unique_ptr<ChildProcess>> child = ChildProcess::start(
      shell("(trap '' TERM; exec sleep 600) & echo $!; setsid sleep 600 & echo $!; wait"), log_);
  ASSERT_TRUE(child.ok()) << child.status().message();
  const std::vector<pid_t> grandchildren = pids(2);
  ASSERT_EQ(grandchildren.size(), 2U);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // for exec behind the echo
  EXPECT_TRUE(child.value()->running());
  child.value()->stop(std::chrono::milliseconds(300));
  EXPECT_FALSE(child.value()->running());
  for (const pid_t pid : grandchildren) {
    // Gone, or a zombie that nobody can see running any more.
    std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
    std::string name;
    std::string state;
    std::string number;
    if (stat >> number >> name >> state) {
      EXPECT_EQ(state, "Z") << pid;
    }
  }
}

// In a process of its own: signals are watched once a process, and then for good.
TEST_F(Children, AnInterruptionEndsAServerThatWillNotEnd) {
  const pid_t program = fork();
  ASSERT_GE(program, 0);
  if (program == 0) {
    watch_signals(std::chrono::seconds(1));
    Result<std::unique_ptr<ChildProcess>> child =
        ChildProcess::start(shell("trap '' TERM; echo $$; while :; do sleep 1; done"), log_);
    if (!child.ok() || interrupted() || pids(1).size() != 1) _exit(2);
    kill(getpid(), SIGTERM);
    for (int i = 0; i < 3000 && child.value()->running(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    _exit(interrupted() && child.value()->how_it_ended() == "signal 9 (Killed)" ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(program, &status, 0), program);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST_F(Children, HowItEndedIsToldAndTheEnvironmentArrives) {
  Command command = shell("echo $BITDECODING_TEST_WORD; echo ${HOME-unset}; exit 3");
  command.environment = {{"BITDECODING_TEST_WORD", "two words"}, {"HOME", ""}};
  Result<std::unique_ptr<ChildProcess>> child = ChildProcess::start(command, log_);
  ASSERT_TRUE(child.ok());
  while (child.value()->running()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(child.value()->how_it_ended(), "exit status 3");
  EXPECT_EQ(log_text(), "two words\nunset\n");
}

TEST_F(Children, AProgramThatIsNotThereIsAnErrorAtOnce) {
  const auto child = ChildProcess::start({{"/no/such/program"}, {}}, log_);
  ASSERT_FALSE(child.ok());
  EXPECT_NE(child.status().message().find("/no/such/program"), std::string::npos);
  EXPECT_FALSE(ChildProcess::start({{}, {}}, log_).ok());
  EXPECT_FALSE(ChildProcess::start(shell("true"), (folder_ / "none" / "log").string()).ok());
}

TEST_F(Children, AServerThatDiesShowsTheEndOfItsLog) {
  Result<std::unique_ptr<Server>> server =
      Server::start("test", shell("for i in $(seq 40); do echo line $i; done; exit 5"), 1, log_);
  ASSERT_TRUE(server.ok());
  const Status status = server.value()->wait_ready(std::chrono::seconds(60), nullptr);
  ASSERT_FALSE(status.ok());
  for (const char* words : {"exit status 5", "line 40", "line 30"}) {
    EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
  }
  EXPECT_EQ(status.message().find("line 20\n"), std::string::npos);
  EXPECT_NE(status.message().find(log_), std::string::npos);
}

TEST_F(Children, AServerThatNeverAnswersTimesOutAndIsStopped) {
  const Result<int> port = free_loopback_port();
  ASSERT_TRUE(port.ok());
  Result<std::unique_ptr<Server>> server =
      Server::start("test", shell("echo waiting; exec sleep 600"), port.value(), log_);
  ASSERT_TRUE(server.ok());
  const pid_t pid = server.value()->pid();
  int calls = 0;
  const Status status = server.value()->wait_ready(std::chrono::seconds(1),
                                                   [&](double, const std::string&) { ++calls; });
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("did not answer within 1 s"), std::string::npos);
  EXPECT_GT(calls, 0);
  server.value().reset();
  EXPECT_NE(kill(pid, 0), 0);
}

TEST_F(Children, TheTailLeavesOutOverwrittenProgress) {
  std::ofstream(log_) << "first\n\nload 0%\rload 50%\rload 100%\n" << std::string(500, 'x') << "\n";
  EXPECT_EQ(log_tail(log_, 2, 10), "load 100%\nxxxxxxxxxx...");
  EXPECT_EQ(log_tail((folder_ / "none").string(), 2), "(the log is empty)");
}

TEST(ShellLine, QuotesWhatAShellWouldTakeApart) {
  EXPECT_EQ(shell_line({{"vllm", "--x", "{\"a\": 1}", "it's", ""}, {{"A", "b c"}}}),
            "A='b c' vllm --x '{\"a\": 1}' 'it'\\''s' ''");
}

TEST(ServeCommand, TheProgramsAnswerBecomesACommand) {
  const Result<Command> command = parse_serve_command(
      R"({"argv": ["vllm", "serve"], "environment": {"A": null, "B": "b"}, "notes": []})");
  ASSERT_TRUE(command.ok()) << command.status().message();
  EXPECT_EQ(command.value().argv, (std::vector<std::string>{"vllm", "serve"}));
  EXPECT_EQ(command.value().environment.at("A"), "");
  EXPECT_EQ(command.value().environment.at("B"), "b");
  for (const char* text :
       {"", "{", "[]", R"({"argv": [], "environment": {}})", R"({"argv": [1], "environment": {}})",
        R"({"argv": ["a"], "environment": {"A": 1}})", R"({"argv": ["a"], "environment": []})",
        R"({"argv": ["a"]})", R"({"argv": "a", "environment": {}})"}) {
    EXPECT_FALSE(parse_serve_command(text).ok()) << text;
  }
}

}  // namespace
}  // namespace bitdecoding::eval
