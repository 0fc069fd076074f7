"""Wrote the folders beside it, with datasets 5.2.0: python make_datasets.py FOLDER."""

import shutil
import sys
from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset

top = Path(sys.argv[1])
texts = [f"text {n}, naïve 漢" for n in range(5)]
table = {"content": texts, "meta": [{"set": f"s{n % 2}"} for n in range(5)]}
dataset = Dataset.from_dict(table)
dataset.save_to_disk(top / "saved", num_shards=2)
dataset.select([3, 1]).save_to_disk(top / "selected")
splits = {"train": dataset, "test": dataset.select([4])}
DatasetDict(splits).save_to_disk(top / "splits")
dataset.to_json(top / "rows.jsonl")
loaded = load_dataset("json", data_files={"train": str(top / "rows.jsonl")}, cache_dir=top / "all")
loaded["train"].map(lambda row: {"content": row["content"].upper()})
built = Path(loaded["train"].cache_files[0]["filename"]).parent
shutil.copytree(built, top / "cache", ignore=shutil.ignore_patterns("*.lock"))
shutil.rmtree(top / "all")
(top / "rows.jsonl").unlink()
