"""Join two CSV files, add the amounts up, and write the result as Parquet.

Use it as the first job on files of yours: paths may be folders or patterns such as `orders/*.csv`,
and the types of the columns are found in them. Data that have an end are joined without event time:
all rows of a key match.

Prints::

    Bern: 37.0 in 2 orders
    Oslo: 18.5 in 3 orders
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow.parquet as pq

from minishuffle import LocalCluster, Table

ORDERS = "customer,amount\nann,12.5\nbob,30\nann,3\nbob,7\ncy,3\n"
CUSTOMERS = "name,town\nann,Oslo\nbob,Bern\ncy,Oslo\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, LocalCluster(workers=2) as cluster:
        Path(folder, "orders.csv").write_text(ORDERS)
        Path(folder, "customers.csv").write_text(CUSTOMERS)
        orders = Table.from_files(Path(folder, "orders.csv"), format="csv")
        customers = Table.from_files(Path(folder, "customers.csv"), format="csv")
        joined = orders.key_by("customer").join(customers.key_by("name"))
        towns = joined.key_by("town").aggregate(total=("amount", "sum"), orders=("amount", "count"))
        cluster.submit(towns.to_files(Path(folder, "towns"))).wait()
        for row in pq.read_table(Path(folder, "towns")).sort_by("town").to_pylist():
            print(f"{row['town']}: {row['total']} in {row['orders']} orders")


if __name__ == "__main__":
    main()
