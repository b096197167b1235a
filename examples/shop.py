"""Writes the table of docs/your_data.md: who saw which article of a made-up shop, and clicked or not.

python examples/shop.py shop.csv 20000
python examples/shop.py shop.parquet 20000
"""

from __future__ import annotations

import csv
import math
import random
import sys

TAGS = ("new", "sale", "red", "blue", "green", "used", "gift")


def rows(count: int, seed: int = 1):
    """Records whose label depends on the user, the item, the price and the tags."""
    tastes = [random.Random(f"user {i}").gauss(0, 1) for i in range(300)]
    appeals = [random.Random(f"item {i}").gauss(0, 1) for i in range(200)]
    random_numbers = random.Random(seed)
    for _ in range(count):
        user, item = random_numbers.randrange(300), random_numbers.randrange(200)
        tags = random_numbers.sample(TAGS, random_numbers.randrange(4))
        price = round(random_numbers.lognormvariate(3, 1), 2)
        visits = random_numbers.randrange(120)
        logit = tastes[user] + appeals[item] - 0.4 * (math.log1p(price) - 3) + ("sale" in tags)
        clicked = random_numbers.random() < 1 / (1 + math.exp(1 - logit))
        yield {
            "clicked": int(clicked),
            "user": f"u-{user:03}",
            "item_id": item,
            "price": "" if random_numbers.random() < 0.05 else price,
            "visits": visits,
            "tags": "|".join(tags),
            "title": f'Article "{item}", size {random_numbers.randrange(30, 50)}',
        }


def write_parquet(path: str, all_rows: list[dict]) -> None:
    """The same as columns with types: a price that is missing is null, tags are a list."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for row in all_rows:
        row["price"] = None if row["price"] == "" else row["price"]
        row["tags"] = row["tags"].split("|") if row["tags"] else []
    pq.write_table(pa.Table.from_pylist(all_rows), path)


def main() -> None:
    """Write as many records as asked for."""
    path, count = sys.argv[1], int(sys.argv[2])
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    all_rows = list(rows(count, seed))
    if path.endswith(".parquet"):
        write_parquet(path, all_rows)
        return
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, all_rows[0])
        writer.writeheader()
        writer.writerows(all_rows)


if __name__ == "__main__":
    main()
