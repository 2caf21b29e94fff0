#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns data files into JSON lines: Parquet (needs pyarrow), CSV, a JSON list or JSON lines.

usage: parquet_to_jsonl.py INPUT [INPUT...] OUTPUT.jsonl
"""

import csv
import datetime
import decimal
import json
import math
import os
import sys


class Refused(Exception):
    """What is wrong and what to do, as a sentence."""


def plain(value):
    """What JSON can hold: dates as text, NaN as null, bytes only if they are UTF-8."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            raise Refused("it holds bytes that are not UTF-8, which JSON cannot hold") from None
    if isinstance(value, (datetime.datetime, datetime.date)):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def parquet_rows(path):
    try:
        import pyarrow.parquet
    except ImportError:
        raise Refused("Parquet files need pyarrow: pip install -r tools/eval/requirements.txt") from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
        for batch in file.iter_batches(batch_size=64):
            yield from batch.to_pylist()
    except pyarrow.lib.ArrowException as error:
        raise Refused(f"it is not a Parquet file that can be read: {error}") from None


def csv_rows(path):
    csv.field_size_limit(1 << 30)
    with open(path, encoding="utf-8-sig", newline="") as file:
        yield from csv.DictReader(file)


def json_rows(path):
    with open(path, encoding="utf-8-sig") as file:
        start = file.read(1)
        while start and start.isspace():
            start = file.read(1)
        file.seek(0)
        try:
            if start == "[":
                yield from json.load(file)
            else:
                for line in file:
                    if line.strip():
                        yield json.loads(line)
        except ValueError as error:
            raise Refused(f"it is not JSON: {error}") from None


READERS = {".parquet": parquet_rows, ".csv": csv_rows, ".json": json_rows, ".jsonl": json_rows}


def rows(path):
    """The rows of a file, as objects that JSON can hold."""
    reader = READERS.get(os.path.splitext(path)[1])
    if reader is None:
        raise Refused(f"'{path}': files that end in {', '.join(READERS)} can be read")
    if not os.path.isfile(path):
        raise Refused(f"there is no file '{path}'")
    try:
        for row in reader(path):
            if not isinstance(row, dict):
                raise Refused("it has a row that is no object")
            yield plain(row)
    except Refused as error:
        raise Refused(f"'{path}': {error}") from None


def write(path, items):
    """Writes all rows, or leaves what was there. Returns how many."""
    count = 0
    partial = f"{path}.partial-{os.getpid()}"
    try:
        with open(partial, "w", encoding="utf-8", newline="\n") as file:
            for item in items:
                # ASCII, so that a lone surrogate of the source stays one and is named when read.
                file.write(json.dumps(item) + "\n")
                count += 1
            file.flush()
            os.fsync(file.fileno())
        if count == 0:
            raise Refused(f"'{path}' would be empty: the source has no rows")
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)
    return count


def main(arguments):
    if len(arguments) < 2 or not arguments[-1].endswith(".jsonl"):
        print(__doc__.strip(), file=sys.stderr)
        return 2
    try:
        count = write(arguments[-1], (row for path in arguments[:-1] for row in rows(path)))
    except Refused as error:
        print(f"parquet_to_jsonl.py: {error}.", file=sys.stderr)
        return 1
    print(f"{count} rows in {arguments[-1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
