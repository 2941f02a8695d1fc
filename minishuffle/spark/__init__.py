"""Spark feeds jobs and reads their results, through PySpark 4.3 (``pip install 'minishuffle[spark]'``)."""
