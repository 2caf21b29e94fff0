// SPDX-License-Identifier: Apache-2.0
// LongBench-Pro: metrics against the packages that its runner uses (where Python has them; the
// values of such runs are kept, too), its data file, summaries with and without their helpers.
#include <gtest/gtest.h>
#include <httplib.h>

#include <cmath>
#include <random>
#include <thread>

#include "benchmarks/benchmark.h"
#include "benchmarks/longbench_pro/embedding.h"
#include "benchmarks/longbench_pro/metrics.h"
#include "benchmarks/longbench_pro/rouge.h"
#include "benchmarks/longbench_pro/segmenter.h"
#include "benchmarks/text/unicode.h"
#include "eval_bench_files.h"
#include "eval_bench_python.h"

namespace bitdecoding::eval {
namespace {

using Lines = std::vector<std::string>;

std::string asked_python() {
  const char* python = std::getenv("BITDECODING_PYTHON");
  return python == nullptr ? "python3" : python;
}

TEST(LongBenchMetrics, TheAnswerArea) {
  EXPECT_EQ(answer_lines("I think\n[Answer]\n D1 \nd2  x\n"), (Lines{"d1", "d2 x"}));
  EXPECT_EQ(answer_lines("[Answer] a [Answer]\nB\r\nC"), (Lines{"b", "c"}));
  EXPECT_EQ(answer_lines("[答案]\n甲\u3000乙\n[答案]\n丙"), (Lines{"丙"}));
  // Both: the English mark decides, as in the benchmark's runner.
  EXPECT_EQ(answer_lines("[Answer]\na\n[答案]\nb"), (Lines{"a", "[答案]", "b"}));
  EXPECT_EQ(answer_lines("A\n\nB"), (Lines{"a", "", "b"}));
  EXPECT_EQ(answer_lines("x [Answer]"), (Lines{""}));
}

TEST(LongBenchMetrics, ValuesByHand) {
  EXPECT_EQ(accuracy({"a"}, {"a", "b"}), 1.0);
  EXPECT_EQ(accuracy({"a"}, {"b", "a"}), 0.0);
  EXPECT_EQ(f1_score({"a", "b"}, {"b", "c", "b"}), 0.5);
  EXPECT_EQ(f1_score({"a"}, {"b"}), 0.0);
  EXPECT_EQ(sub_em({"a", "b", "c"}, {"c", "x", "a"}), 2.0 / 3);
  EXPECT_EQ(sub_em({"1 11"}, {"11 1"}), 0.0);
  // The denominator comes from the prediction.
  EXPECT_EQ(pairwise_accuracy({"a", "b", "c"}, {"a", "b", "c"}), 1.0);
  EXPECT_EQ(pairwise_accuracy({"a", "b", "c"}, {"a", "b"}), 1.0);
  EXPECT_EQ(pairwise_accuracy({"a", "b", "c"}, {"a", "b", "c", "d"}), 0.5);
  EXPECT_EQ(pairwise_accuracy({"a", "b"}, {"a"}), 0.0);
  EXPECT_EQ(pairwise_accuracy({"a", "b", "a", "b"}, {"a", "b"}), 3.0);  // what the runner refuses
  EXPECT_EQ(ndcg({"a", "b"}, {"a", "b"}), 1.0);
  EXPECT_EQ(ndcg({"a", "b"}, {"x"}), 0.0);
}

TEST(LongBenchMetrics, NdcgIsTrecEvals) {
  // Kept from pytrec_eval.
  EXPECT_DOUBLE_EQ(ndcg({"a", "b", "c"}, {"b", "a", "x", "c"}), 0.8174935137996165);
  EXPECT_DOUBLE_EQ(ndcg({"a", "b", "c"}, {"x", "c", "c", "a"}), 0.447499501061509);
  EXPECT_DOUBLE_EQ(ndcg({"a", "a", "b"}, {"b", "a"}), 0.8597186998521972);
  std::mt19937 random(7);
  nlohmann::json cases = nlohmann::json::array();
  for (int i = 0; i < 2000; ++i) {
    Lines answers;
    Lines lines;
    for (std::size_t n = 1 + random() % 8; n > 0; --n)
      answers.push_back(std::string("d").append(std::to_string(random() % 12)));
    for (std::size_t n = 1 + random() % 12; n > 0; --n)
      lines.push_back(std::string("d").append(std::to_string(random() % 12)));
    cases.push_back(nlohmann::json::array({answers, lines}));
  }
  const TemporaryFolder folder;
  const auto values = python_lines(R"(
import json, pytrec_eval, sys
for answers, lines in json.load(open(sys.argv[1])):
    k = len(answers)
    qrel = {'q': {a: k - i for i, a in enumerate(answers)}}
    run = {'q': {p: len(lines) - i for i, p in enumerate(lines)}}
    result = pytrec_eval.RelevanceEvaluator(qrel, {'ndcg_cut.%d' % k}).evaluate(run)
    print(repr(result['q']['ndcg_cut_%d' % k]))
)",
                                   folder.write("cases.json", cases.dump()));
  if (values.empty()) GTEST_SKIP() << asked_python() << " has no pytrec_eval";
  ASSERT_EQ(values.size(), cases.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    // Its sums are in another order: a few units in the last place.
    EXPECT_NEAR(ndcg(cases[i][0].get<Lines>(), cases[i][1].get<Lines>()), std::stod(values[i]),
                1e-14)
        << cases[i];
  }
}

std::string random_summary(std::mt19937& random) {
  static const Lines words = {"the", "cat",  "sat", "on",  "a", "mat", "中文", "x.y", "...",
                              " ",   "end.", "dog", "ran", ".", "1.5", "and",  "\n",  "\u3000"};
  std::string out;
  for (std::size_t n = random() % 60; n > 0; --n)
    out.append(words[random() % words.size()]).append(" ");
  return normalized(out);
}

TEST(LongBenchRouge, EqualsThePackageToTheLastDigit) {
  std::mt19937 random(11);
  nlohmann::json cases = nlohmann::json::array();
  for (int i = 0; i < 1500; ++i) cases.push_back({random_summary(random), random_summary(random)});
  const TemporaryFolder folder;
  const auto values = python_lines(R"(
import json, sys
from rouge import Rouge
for given, wanted in json.load(open(sys.argv[1], encoding='utf-8')):
    try:
        print(repr(Rouge().get_scores([given], [wanted])[0]['rouge-l']['f']))
    except Exception:
        print(0.0)
)",
                                   folder.write("cases.json", cases.dump()));
  if (values.empty()) GTEST_SKIP() << asked_python() << " has no rouge";
  ASSERT_EQ(values.size(), cases.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(rouge_l(decode_utf8(cases[i][0].get<std::string>()),
                      decode_utf8(cases[i][1].get<std::string>()))
                  .f,
              std::stod(values[i]))
        << cases[i];
  }
}

TEST(LongBenchRouge, ValuesOfThePackage) {
  // rouge 1.0.1, kept.
  const auto f = [](const char32_t* given, const char32_t* wanted) {
    return rouge_l(given, wanted).f;
  };
  EXPECT_EQ(f(U"the cat sat on the mat", U"the cat sat on the mat"), 0.999999995);
  EXPECT_EQ(f(U"the cat sat. it slept.", U"a cat slept. the mat was red."), 0.499999995138889);
  EXPECT_EQ(f(U"w5 w6 w7. w1 w2. ", U"w1 w2 w3 w4 w5"), 0.5454545404958678);
  EXPECT_EQ(f(U"...", U"a"), 0.0);
  EXPECT_EQ(f(U"", U"a"), 0.0);
  const std::u32string one_sentence = [] {
    std::u32string out;
    for (int i = 0; i < 1200; ++i)
      out.append(U"w").append(decode_utf8(std::to_string(i))).append(U" ");
    return out;
  }();
  EXPECT_GT(rouge_l(one_sentence, one_sentence).f, 0.999);
  EXPECT_GT(rouge_l(one_sentence, one_sentence).longest_walk, 1000U);
}

constexpr const char* kRow =
    R"({"id":"r1","context":" text","language":"English","token_length":"8k","primary_task":"T1. Retrieval & Ranking","secondary_task":"T1.1 Global Cohesive Retrieval","contextual_requirement":"Full","question_nonthinking":"Which?","question_thinking":"Think: which?","answer":["D1","D2"],"difficulty":"Easy"})";

std::string changed(const std::string& key, const nlohmann::json& value) {
  nlohmann::json row = nlohmann::json::parse(kRow);
  row["id"] = key + value.dump();
  if (value.is_null()) {
    row.erase(key);
  } else {
    row[key] = value;
  }
  return row.dump() + "\n";
}

TEST(LongBench, LoadsLinesAndLists) {
  const Benchmark& benchmark = *find_benchmark("longbench_pro").value();
  for (const bool list : {false, true}) {
    const TemporaryFolder folder;
    LoadOptions options;
    options.data_folder = folder.path();
    EXPECT_EQ(benchmark.load(options).status().code(), StatusCode::kNotFound);
    const std::string longest = changed("token_length", "256k");
    folder.write("longbench_pro/data.json",
                 list ? std::string("[").append(kRow).append(",\n").append(longest).append("]")
                      : std::string(kRow).append("\r\n").append(longest));
    options.model.window = 131072;
    options.model.thinking = true;  // the question stays the same
    const auto loaded = benchmark.load(options);
    ASSERT_TRUE(loaded.ok()) << loaded.status().message();
    ASSERT_EQ(loaded.value().rows.size(), 1U);  // the longest bucket is left out
    const BenchmarkRow& row = loaded.value().rows[0];
    EXPECT_EQ(row.messages[0].content, "text\n\n\n\nWhich?");
    EXPECT_EQ(row.labels.at("length"), "8k");
    EXPECT_EQ(row.labels.at("task"), "T1. Retrieval & Ranking");
    options.model.window = 0;
    EXPECT_EQ(benchmark.load(options).value().rows.size(), 2U);
  }
}

TEST(LongBench, TrapsOfTheDataFile) {
  const TemporaryFolder folder;
  LoadOptions options;
  options.data_folder = folder.path();
  folder.write("longbench_pro/data.jsonl",
               std::string(kRow).append("\n") + changed("secondary_task", "T99 New") +
                   changed("language", "French") + changed("answer", "D1") +
                   changed("answer", nlohmann::json::array()) + changed("context", nullptr) +
                   changed("difficulty", nullptr));
  const auto loaded = find_benchmark("longbench_pro").value()->load(options);
  ASSERT_TRUE(loaded.ok());
  EXPECT_EQ(loaded.value().rows.size(), 2U);
  ASSERT_EQ(loaded.value().problems.size(), 5U);
  EXPECT_EQ(loaded.value().problems[0].what,
            "its secondary_task 'T99 New' is none of the benchmark's");
  EXPECT_EQ(loaded.value().problems[1].what,
            "its language 'French' is neither English nor Chinese");
  EXPECT_EQ(loaded.value().problems[2].what, "'answer' is not a list of strings");
  EXPECT_EQ(loaded.value().problems[4].what, "has no field 'context'");
}

BenchmarkRow row_of(const std::string& subtask, const Lines& answers,
                    const std::string& language = "English") {
  BenchmarkRow row;
  row.labels = {{"subtask", subtask}, {"language", language}};
  row.reference = answers;
  return row;
}

TEST(LongBench, ScoresReplies) {
  const Benchmark& benchmark = *find_benchmark("longbench_pro").value();
  LoadOptions options;
  const auto retrieval = row_of("T1.1 Global Cohesive Retrieval", {"D1", "D2"});
  EXPECT_EQ(
      benchmark.score(retrieval, "<think>D2</think>ok [Answer]\nd1\nD2", options).value().value,
      1.0);
  EXPECT_EQ(benchmark.score(retrieval, "", options).value().value, 0.0);
  EXPECT_EQ(benchmark.score(retrieval, "<think>D1", options).value().why,
            "nothing outside the thinking part");
  const auto repeated = row_of("T2.1 Global Timeline Reconstruction", {"a", "b", "a", "b"});
  const Score above = benchmark.score(repeated, "[Answer]\na\nb", options).value();
  EXPECT_EQ(above.value, 0.0);
  EXPECT_NE(above.why.find("above 1"), std::string::npos);
  EXPECT_FALSE(benchmark.score(row_of("T0", {"a"}), "a", options).ok());
}

// An embedding server whose embeddings are counts of three letters.
class LetterServer {
 public:
  LetterServer() {
    server_.Get("/v1/models", [](const httplib::Request&, httplib::Response& response) {
      response.set_content(R"({"data":[{"id":"letters"}]})", "application/json");
    });
    server_.Post("/v1/embeddings",
                 [this](const httplib::Request& request, httplib::Response& response) {
                   const auto body = nlohmann::json::parse(request.body);
                   if (body["model"] != "letters") {
                     response.status = 404;
                     return;
                   }
                   nlohmann::json data = nlohmann::json::array();
                   for (std::size_t i = body["input"].size(); i-- > 0;) {
                     const std::string text = body["input"][i];
                     nlohmann::json vector = nlohmann::json::array();
                     for (const char c : {'a', 'b', 'c'})
                       vector.push_back(std::count(text.begin(), text.end(), c));
                     data.push_back({{"index", i}, {"embedding", vector}});
                   }
                   if (broken) data.erase(0);
                   response.set_content(nlohmann::json{{"data", data}}.dump(), "application/json");
                 });
    port_ = server_.bind_to_any_port("127.0.0.1");
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    while (!server_.is_running()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ~LetterServer() {
    server_.stop();
    thread_.join();
  }
  std::string address() const {
    return std::string("http://127.0.0.1:").append(std::to_string(port_));
  }
  bool broken = false;

 private:
  httplib::Server server_;
  int port_ = 0;
  std::thread thread_;
};

TEST(LongBench, SummariesNeedAnEmbeddingModel) {
  const Benchmark& benchmark = *find_benchmark("longbench_pro").value();
  const auto row = row_of("T4.2 Query-Focused Summary", {"a a b", "c"});
  LoadOptions options;
  const Score without = benchmark.score(row, "a b b", options).value();
  EXPECT_TRUE(without.missing);
  EXPECT_NE(without.why.find("--embedding-endpoint"), std::string::npos);
  EXPECT_GT(without.detail["rouge_l"].get<double>(), 0.9);
  EXPECT_FALSE(benchmark.score(row, " ", options).value().missing);  // an empty summary is 0
  LetterServer server;
  options.embedding_endpoint = server.address();
  const Score with = benchmark.score(row, "a b b", options).value();
  EXPECT_FALSE(with.missing);
  EXPECT_DOUBLE_EQ(with.detail["similarity"].get<double>(), 4.0 / 5.0);
  EXPECT_DOUBLE_EQ(with.value, 0.5 * 0.8 + 0.5 * with.detail["rouge_l"].get<double>());
  options.embedding_model = "other";
  EXPECT_EQ(benchmark.score(row, "a", options).status().code(), StatusCode::kIo);
  options.embedding_model = "";
  server.broken = true;
  EXPECT_NE(benchmark.score(row, "a", options).status().message().find("fewer texts"),
            std::string::npos);
  options.embedding_endpoint = "http://127.0.0.1:9";
  EXPECT_NE(benchmark.score(row, "a", options).status().message().find("does not answer"),
            std::string::npos);
}

TEST(LongBench, ChineseSummariesNeedJieba) {
  const Benchmark& benchmark = *find_benchmark("longbench_pro").value();
  const auto row = row_of("T4.2 Query-Focused Summary", {"我们在北京学习中文。"}, "Chinese");
  LoadOptions options;
  options.python = "no-such-python";
  const Score without = benchmark.score(row, "我们学习中文。", options).value();
  EXPECT_TRUE(without.missing);
  EXPECT_NE(without.why.find("jieba"), std::string::npos) << without.why;
  bool named = false;
  for (const MissingItem& item : benchmark.missing(options)) {
    if (item.what.find("jieba") == std::string::npos) continue;
    named = true;
    EXPECT_TRUE(item.optional);
  }
  EXPECT_TRUE(named);
  options.python = asked_python();
  const auto cut = Segmenter::cut(options.python, "", {"我们在北京学习中文。"});
  if (!cut.ok()) GTEST_SKIP() << cut.status().message();
  EXPECT_EQ(cut.value()[0], "我们 在 北京 学习 中文 。");
  const Score with = benchmark.score(row, "我们学习中文。", options).value();
  // 4 of 4 words and 4 of 6: f = 2 * (2/3) / (5/3 + 1e-8).
  EXPECT_NEAR(with.detail["rouge_l"].get<double>(), 0.8, 1e-7);
}

}  // namespace
}  // namespace bitdecoding::eval
