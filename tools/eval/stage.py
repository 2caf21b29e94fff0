#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fetches the data of benchmarks from the Hugging Face hub into a data folder, as docs/evaluation.md
describes it. What was fetched is written into staged.json there: revision and SHA-256 of every file.
A later run takes that revision again, and refuses files that are not those.

usage: stage.py --data FOLDER [--model FOLDER] [--from FOLDER] [--again] BENCHMARK...

  BENCHMARK     longbench_pro mrcr aime aime25 lcb gpqa (ruler_niah is generated, not fetched)
  --model       the model's folder, whose tokenizer.json counts MRCR's prompts
  --from        a folder with OWNER/NAME/... as on the hub, instead of the hub itself
  --again       forget the revision and hashes of these benchmarks: take what is newest
"""

import argparse
import fnmatch
import hashlib
import json
import os
import shutil
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from parquet_to_jsonl import Refused, rows, write  # noqa: E402

# repository, files wanted (by pattern, the first pattern that matches any), what they become
SOURCES = {
    "longbench_pro": ("caskcsg/LongBench-Pro", ["*.jsonl", "*.json"], "longbench_pro/longbench_pro.jsonl"),
    "mrcr": ("openai/mrcr", ["*needle*.parquet"], "mrcr/_filtered_le98048.jsonl"),
    "aime": ("HuggingFaceH4/aime_2024", ["*.parquet"], "aime24/aime24.jsonl"),
    "aime25": ("math-ai/aime25", ["*.parquet", "*.jsonl"], "aime25/aime25.jsonl"),
    "lcb": ("livecodebench/code_generation_lite", ["test6.jsonl"], "lcb_v6/prompts.jsonl"),
    "gpqa": ("Idavidrein/gpqa", ["gpqa_diamond.csv", "gpqa_diamond*.parquet"], "gpqa/gpqa_diamond.jsonl"),
}
NOT_DATA = ("README*", "*config*.json", "dataset_infos.json", ".*")
MRCR_TOKENS = 98048
TEMPLATE_TOKENS = 5  # of each message: role and marks around it, in the chat templates of Qwen and GLM


class LocalHub:
    """A folder laid out as the hub: for tests, and for machines without a network."""

    def __init__(self, folder):
        self.folder = folder

    def files(self, repo, revision):
        base = os.path.join(self.folder, repo)
        if not os.path.isdir(base):
            raise Refused(f"there is no folder '{base}'")
        found = [os.path.relpath(os.path.join(at, name), base) for at, _, names in os.walk(base) for name in names]
        return revision or "local", sorted(found)

    def fetch(self, repo, revision, name):
        return os.path.join(self.folder, repo, name)


class Hub:
    def __init__(self):
        try:
            import huggingface_hub
        except ImportError:
            raise Refused("huggingface_hub is missing: pip install -r tools/eval/requirements.txt") from None
        self.hub = huggingface_hub

    def explained(self, repo, call):
        errors = self.hub.errors
        try:
            return call()
        except errors.GatedRepoError:
            raise Refused(f"{repo} is gated. Accept its conditions at https://huggingface.co/datasets/{repo}, then log "
                          "in on this machine with 'hf auth login' and run this again") from None
        except errors.RepositoryNotFoundError:
            raise Refused(f"the hub has no data set {repo}, or hides it: if it is gated, log in with "
                          "'hf auth login'") from None
        except (errors.HfHubHTTPError, OSError, ConnectionError) as error:
            raise Refused(f"{repo} cannot be fetched ({type(error).__name__}: {str(error).splitlines()[0]}). Without a "
                          "network, copy it to a folder FOLDER/OWNER/NAME and give --from FOLDER") from None

    def files(self, repo, revision):
        info = self.explained(repo, lambda: self.hub.HfApi().dataset_info(repo, revision=revision))
        return info.sha, sorted(item.rfilename for item in info.siblings)

    def fetch(self, repo, revision, name):
        return self.explained(repo, lambda: self.hub.hf_hub_download(repo, name, repo_type="dataset", revision=revision))


def wanted(files, patterns):
    data = [name for name in files if not any(fnmatch.fnmatch(os.path.basename(name), no) for no in NOT_DATA)]
    for pattern in patterns:
        found = [name for name in data if fnmatch.fnmatch(os.path.basename(name), pattern)]
        if found:
            return found
    return []


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def short_enough(items, model):
    """MRCR's prompts of at most MRCR_TOKENS tokens, with their number."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise Refused("tokenizers is missing: pip install -r tools/eval/requirements.txt") from None
    path = os.path.join(model or "", "tokenizer.json")
    if not model or not os.path.isfile(path):
        raise Refused("MRCR's prompts are chosen by their tokens: give --model a folder with a tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    for item in items:
        messages = item["prompt"] if isinstance(item["prompt"], list) else json.loads(item["prompt"])
        count = sum(len(tokenizer.encode(m["content"], add_special_tokens=False).ids) + TEMPLATE_TOKENS
                    for m in messages)
        if count <= MRCR_TOKENS:
            yield {**item, "n_tokens": count}


def record_of(data):
    path = os.path.join(data, "staged.json")
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def save_record(data, record):
    path = os.path.join(data, "staged.json")
    with open(path + ".partial", "w", encoding="utf-8") as file:
        json.dump(record, file, indent=2, sort_keys=True)
        file.write("\n")
    os.replace(path + ".partial", path)


def stage(name, hub, data, model, record):
    repo, patterns, target = SOURCES[name]
    known = record.get(name, {})
    revision, files = hub.files(repo, known.get("revision"))
    names = wanted(files, patterns)
    if not names:
        raise Refused(f"{repo} has no file that matches {' or '.join(patterns)}; it has {', '.join(files[:20])}")
    paths = [hub.fetch(repo, revision, file) for file in names]
    hashes = {file: sha256(path) for file, path in zip(names, paths)}
    if known and known["files"] != hashes:
        raise Refused(f"the files of {repo} at revision {revision} are not those that staged.json knows. Give --again "
                      "to take them all the same; scores are then not comparable with earlier ones")
    output = os.path.join(data, target)
    os.makedirs(os.path.dirname(output), exist_ok=True)
    items = (row for path in paths for row in rows(path))
    count = write(output, short_enough(items, model) if name == "mrcr" else items)
    for path in paths:  # the file of the protocol's own name, where there is one
        if path.endswith(".parquet") and len(paths) == 1:
            shutil.copyfile(path, output[: -len(".jsonl")] + ".parquet")
    record[name] = {"repository": repo, "revision": revision, "files": hashes,
                    "rows": count, "sha256": sha256(output)}
    save_record(data, record)
    print(f"{name}: {count} rows in {output}, from {repo} at {revision}")


def main(arguments):
    parser = argparse.ArgumentParser(usage=__doc__.strip(), add_help=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--model")
    parser.add_argument("--from", dest="source")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("benchmarks", nargs="+")
    options = parser.parse_args(arguments)
    failed = 0
    try:
        hub = LocalHub(options.source) if options.source else Hub()
        os.makedirs(options.data, exist_ok=True)
        record = record_of(options.data)
    except (Refused, OSError, ValueError) as error:
        print(f"stage.py: {error}.", file=sys.stderr)
        return 1
    for name in options.benchmarks:
        try:
            if name == "ruler_niah":
                raise Refused("its data is generated, nothing is fetched")
            if name not in SOURCES:
                raise Refused(f"there is no such benchmark; there are {', '.join(SOURCES)}")
            if options.again:
                record.pop(name, None)
            stage(name, hub, options.data, options.model, record)
        except (Refused, OSError, KeyError, ValueError) as error:
            print(f"stage.py: {name}: {error}.", file=sys.stderr)
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
