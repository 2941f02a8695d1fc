"""A ready configuration for a Prometheus server that finds a cluster's processes by itself."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

__all__ = ["SD_REFRESH_SECONDS", "prometheus_command", "prometheus_config"]

SD_REFRESH_SECONDS = 5
"""How often Prometheus should ask for the list of targets; its own default is a minute."""

SCRAPE_SECONDS = 5
LISTEN_ADDRESS = "127.0.0.1:9090"

# A JSON string is a YAML string too.
_CONFIG = """\
# Written by minishuffle: Prometheus asks the coordinator for the workers, so nothing here changes
# when workers come and go.
global:
  scrape_interval: {scrape}s
  scrape_timeout: {scrape}s
scrape_configs:
  - job_name: minishuffle
    http_sd_configs:
      - url: {url}
        refresh_interval: {refresh}s
    relabel_configs:
      - source_labels: [__meta_minishuffle_worker]
        target_label: worker
"""


def prometheus_config(coordinator_web: str, directory: Path) -> Path:
    """Write ``prometheus.yml`` into ``directory``, which must exist, and return its path.

    ``coordinator_web`` is ``HOST:PORT`` of the coordinator's web server.
    """
    url = json.dumps(f"http://{coordinator_web}/sd/prometheus")
    path = directory / "prometheus.yml"
    path.write_text(
        _CONFIG.format(url=url, scrape=SCRAPE_SECONDS, refresh=SD_REFRESH_SECONDS), encoding="utf-8"
    )
    return path


def prometheus_command(path: Path) -> str:
    """The shell command that runs Prometheus on a file of :func:`prometheus_config`.

    Its data stays beside the file, and it listens on loopback alone.
    """
    return shlex.join(
        [
            "prometheus",
            f"--config.file={path}",
            f"--storage.tsdb.path={path.parent / 'prometheus-data'}",
            f"--web.listen-address={LISTEN_ADDRESS}",
        ]
    )
