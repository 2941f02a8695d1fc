"""Settings: built-in defaults < TOML file < environment (``MINISHUFFLE_…``) < flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from minishuffle import limits

__all__ = ["ClusterSettings", "load_settings"]


class ClusterSettings(BaseSettings):
    """Settings of the processes of a cluster; seconds and bytes unless the name says otherwise."""

    model_config = SettingsConfigDict(env_prefix="MINISHUFFLE_", extra="ignore", frozen=True)

    segment_bytes: int = Field(
        limits.SEGMENT_BYTES_DEFAULT, ge=limits.SEGMENT_BYTES_MIN, le=limits.SEGMENT_BYTES_MAX
    )
    network_memory_bytes: int = Field(limits.NETWORK_MEMORY_BYTES_DEFAULT, ge=64 * 1024)
    slots: int = Field(2, ge=1, le=1024)
    heartbeat_interval: float = Field(0.5, gt=0)
    heartbeat_timeout: float = Field(10.0, gt=0)
    """At least five times the loop's p99 lag with eight busy threads; see the README."""
    ping_interval: float = Field(5.0, gt=0)
    task_cancel_timeout: float = Field(10.0, gt=0)
    """A task that still runs user code this long after a cancel is abandoned."""
    abandoned_max: int = Field(4, ge=1)
    """A worker with more abandoned tasks than this exits."""
    switch_interval: float = Field(0.0005, gt=0, le=0.1)
    """The interpreter's thread switch interval in a worker."""
    partition_request_timeout: float = Field(10.0, gt=0)
    use_uvloop: bool = True

    @model_validator(mode="after")
    def _relations(self) -> ClusterSettings:
        if self.heartbeat_timeout < 3 * self.heartbeat_interval:
            raise ValueError(
                f"heartbeat_timeout ({self.heartbeat_timeout} s) must be at least three times "
                f"heartbeat_interval ({self.heartbeat_interval} s)"
            )
        return self


def load_settings(toml: Path | None = None, **flags: Any) -> ClusterSettings:
    """Combine defaults, the TOML file (if given), the environment and ``flags`` that are not None.

    Raises:
        pydantic.ValidationError: a value does not fit; names the field.
        FileNotFoundError: ``toml`` does not exist.
    """
    if toml is not None and not toml.is_file():
        raise FileNotFoundError(f"settings file {toml} does not exist")

    class _Layered(ClusterSettings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            layers = [init_settings, env_settings]
            if toml is not None:
                layers.append(TomlConfigSettingsSource(settings_cls, toml))
            return tuple(layers)

    return _Layered(**{name: value for name, value in flags.items() if value is not None})
