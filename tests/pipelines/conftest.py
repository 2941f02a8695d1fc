from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from minishuffle.pipelines import DataDirectory


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    from minishuffle.spark.session import spark_session, stop_spark

    session = spark_session("tests", master="local[2]")
    yield session
    stop_spark(session)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataDirectory:
    return DataDirectory(Path(tmp_path_factory.mktemp("data")))
