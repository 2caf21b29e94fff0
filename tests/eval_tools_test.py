#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The tools that fetch and convert data, against a made-up hub in a folder. Exits with 77 where
pyarrow is missing."""

import contextlib
import io
import json
import os
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tools", "eval"))
import parquet_to_jsonl  # noqa: E402
import stage  # noqa: E402

try:
    import pyarrow
    import pyarrow.parquet
except ImportError:
    print("pyarrow is missing: pip install -r tools/eval/requirements.txt")
    sys.exit(77)


def lines(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


class Tools(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, *names):
        out = os.path.join(self.folder.name, *names)
        os.makedirs(os.path.dirname(out), exist_ok=True)
        return out

    def text(self, content, *names):
        with open(self.path(*names), "w", encoding="utf-8", newline="") as file:
            file.write(content)
        return self.path(*names)

    def parquet(self, rows, *names):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), self.path(*names))
        return self.path(*names)

    def call(self, main, *arguments):
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = main(list(arguments))
        return code, out.getvalue(), errors.getvalue()

    def stage(self, *arguments):
        return self.call(stage.main, "--data", self.path("data", ""), "--from", self.path("hub", ""), *arguments)

    def test_parquet_becomes_lines(self):
        source = self.parquet([{"problem": "é", "answer": 5, "x": float("nan"), "l": ["a"]}], "a.parquet")
        code, _, _ = self.call(parquet_to_jsonl.main, source, self.path("a.jsonl"))
        self.assertEqual(code, 0)
        self.assertEqual(lines(self.path("a.jsonl")), [{"problem": "é", "answer": 5, "x": None, "l": ["a"]}])

    def test_what_cannot_be_read_is_named_and_nothing_is_overwritten(self):
        before = self.text("{}\n", "out.jsonl")
        for name, content, word in (("a.parquet", "no", "not a Parquet"), ("a.json", "[{}", "not JSON"),
                                    ("b.json", "[1]", "no object"), ("a.txt", "", "can be read"),
                                    ("c.json", "[]", "no rows")):
            code, _, errors = self.call(parquet_to_jsonl.main, self.text(content, name), before)
            self.assertEqual(code, 1)
            self.assertIn(word, errors)
        self.assertEqual(lines(before), [{}])
        self.assertEqual([n for n in os.listdir(self.folder.name) if "partial" in n], [])

    def test_csv_with_line_ends_in_fields(self):
        source = self.text('\ufeffQuestion,Correct Answer\r\n"a\r\nb","c, d"\r\n', "g.csv")
        self.assertEqual(list(parquet_to_jsonl.rows(source)), [{"Question": "a\r\nb", "Correct Answer": "c, d"}])

    def test_stages_and_holds_the_hashes(self):
        self.parquet([{"problem": "p", "answer": "1"}], "hub", "HuggingFaceH4", "aime_2024", "data",
                     "train-00000-of-00001.parquet")
        self.text("card", "hub", "HuggingFaceH4", "aime_2024", "README.md")
        self.text("Question,Correct Answer\nq,c\n", "hub", "Idavidrein", "gpqa", "gpqa_diamond.csv")
        self.text("Question,Correct Answer\nq,c\n", "hub", "Idavidrein", "gpqa", "gpqa_main.csv")
        code, _, errors = self.stage("aime", "gpqa")
        self.assertEqual(code, 0, errors)
        self.assertEqual(lines(self.path("data", "aime24", "aime24.jsonl")), [{"problem": "p", "answer": "1"}])
        self.assertTrue(os.path.exists(self.path("data", "aime24", "aime24.parquet")))
        self.assertEqual(len(lines(self.path("data", "gpqa", "gpqa_diamond.jsonl"))), 1)
        with open(self.path("data", "staged.json"), encoding="utf-8") as file:
            record = json.load(file)
        self.assertEqual(record["gpqa"]["revision"], "local")
        self.assertEqual(len(record["gpqa"]["files"]["gpqa_diamond.csv"]), 64)
        self.assertEqual(self.stage("gpqa")[0], 0)
        self.text("Question,Correct Answer\nq,changed\n", "hub", "Idavidrein", "gpqa", "gpqa_diamond.csv")
        code, _, errors = self.stage("gpqa")
        self.assertEqual(code, 1)
        self.assertIn("not those that staged.json knows", errors)
        self.assertEqual(lines(self.path("data", "gpqa", "gpqa_diamond.jsonl"))[0]["Correct Answer"], "c")
        self.assertEqual(self.stage("--again", "gpqa")[0], 0)

    def test_one_that_fails_does_not_stop_the_others(self):
        self.text('{"question_id": "a"}\n', "hub", "livecodebench", "code_generation_lite", "test6.jsonl")
        code, out, errors = self.stage("mmlu", "ruler_niah", "aime25", "lcb")
        self.assertEqual(code, 1)
        self.assertIn("there is no such benchmark", errors)
        self.assertIn("generated", errors)
        self.assertIn("aime25: there is no folder", errors)
        self.assertIn("lcb: 1 rows", out)

    def test_mrcr_keeps_what_fits(self):
        try:
            from tokenizers import Tokenizer, models, pre_tokenizers
        except ImportError:
            self.skipTest("tokenizers is missing")
        prompt = [{"role": "user", "content": "a b"}]
        long = [{"role": "user", "content": "a " * 98050}]
        self.parquet([{"prompt": json.dumps(p), "answer": "x"} for p in (prompt, long)],
                     "hub", "openai", "mrcr", "2needle.parquet")
        self.assertIn("give --model", self.stage("mrcr")[2])
        tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(self.path("model", "tokenizer.json"))
        code, _, errors = self.stage("--model", self.path("model", ""), "mrcr")
        self.assertEqual(code, 0, errors)
        kept = lines(self.path("data", "mrcr", "_filtered_le98048.jsonl"))
        self.assertEqual([row["n_tokens"] for row in kept], [7])

    def test_the_hub_explains(self):
        class Errors:
            class GatedRepoError(Exception):
                pass

            class RepositoryNotFoundError(Exception):
                pass

            class HfHubHTTPError(Exception):
                pass

        hub = stage.Hub.__new__(stage.Hub)
        hub.hub = type("Module", (), {"errors": Errors})

        def fails(error):
            def call():
                raise error
            return call

        for error, word in ((Errors.GatedRepoError("x"), "Accept its conditions"),
                            (Errors.RepositoryNotFoundError("x"), "hf auth login"),
                            (OSError("no route\nmore"), "--from FOLDER")):
            with self.assertRaisesRegex(parquet_to_jsonl.Refused, word):
                hub.explained("o/n", fails(error))


if __name__ == "__main__":
    unittest.main()
