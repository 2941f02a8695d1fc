"""A ready configuration for a Prometheus server that finds a cluster's processes by itself."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from textwrap import indent

from minishuffle.config import TlsFiles

__all__ = ["SD_REFRESH_SECONDS", "prometheus_command", "prometheus_config"]

SD_REFRESH_SECONDS = 5
"""How often Prometheus should ask for the list of targets; its own default is a minute."""

SCRAPE_SECONDS = 5
TOKEN_FILE = "read-token"
LISTEN_ADDRESS = "127.0.0.1:9090"

# A JSON string is a YAML string too. Some releases of Prometheus send no type in the discovery unless it is
# written out.
_CONFIG = """\
# Written by minishuffle: Prometheus asks the coordinator for the workers, so nothing here changes
# when workers come and go.
global:
  scrape_interval: {scrape}s
  scrape_timeout: {scrape}s
scrape_configs:
  - job_name: minishuffle
{tls}    authorization:
      type: Bearer
      credentials_file: {token_file}
    http_sd_configs:
      - url: {url}
        refresh_interval: {refresh}s
{discovery_tls}        authorization:
          type: Bearer
          credentials_file: {token_file}
    relabel_configs:
      - source_labels: [__meta_minishuffle_worker]
        target_label: worker
"""


def prometheus_config(coordinator_web: str, directory: Path, token: str, tls: TlsFiles | None = None) -> Path:
    """Write ``prometheus.yml`` into ``directory``, which must exist, and return its path.

    ``coordinator_web`` is ``HOST:PORT`` of the coordinator's web server. Prometheus shows ``token`` to every
    process, whether that asks for one or not; it stands in a file of its own that this user alone may read.
    With ``tls`` it asks by HTTPS, and shows that certificate.
    """
    token_file = directory.absolute() / TOKEN_FILE  # A relative one counts from where the configuration is.
    with open(os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(f"{token}\n")
    path = directory / "prometheus.yml"
    scheme, of_tls = "http", ""
    if tls is not None:
        files = {"ca_file": tls.ca, "cert_file": tls.certificate, "key_file": tls.key}
        scheme = "https"
        of_tls = "tls_config:\n"
        of_tls += "".join(f"  {name}: {json.dumps(os.path.abspath(path))}\n" for name, path in files.items())
    text = _CONFIG.format(
        url=json.dumps(f"{scheme}://{coordinator_web}/sd/prometheus"),
        tls=indent(f"scheme: https\n{of_tls}", 4 * " ") if of_tls else "",
        discovery_tls=indent(of_tls, 8 * " "),
        token_file=json.dumps(str(token_file)),
        scrape=SCRAPE_SECONDS,
        refresh=SD_REFRESH_SECONDS,
    )
    path.write_text(text, encoding="utf-8")
    return path


def prometheus_command(path: Path) -> str:
    """The shell command that runs Prometheus with a file of :func:`prometheus_config`. Its data is stored
    next to the file, and it listens only on loopback."""
    return shlex.join(
        [
            "prometheus",
            f"--config.file={path}",
            f"--storage.tsdb.path={path.parent / 'prometheus-data'}",
            f"--web.listen-address={LISTEN_ADDRESS}",
        ]
    )
