"""Bring the result of a job into pandas or Polars.

Use it in notebooks and reports. A job of tables gives a `pyarrow.Table`, which both take without a
loop over rows; a DataFrame becomes a table the same way, by `Table.from_arrow`. It needs pandas:
`pip install pandas`.

Prints::

      customer  total  orders
    0      ann   15.5       2
    1      bob   37.0       2
    2       cy    3.0       1
"""

from __future__ import annotations

import pandas as pd

from minishuffle import LocalCluster, Table

ORDERS = pd.DataFrame({"customer": ["ann", "bob", "ann", "bob", "cy"], "amount": [12.5, 30.0, 3.0, 7.0, 3.0]})


def main() -> None:
    orders = Table.from_arrow(ORDERS)
    totals = orders.key_by("customer").aggregate(total=("amount", "sum"), orders=("amount", "count"))
    with LocalCluster(workers=2) as cluster:
        print(cluster.run(totals).sort_by("customer").to_pandas())


if __name__ == "__main__":
    main()
